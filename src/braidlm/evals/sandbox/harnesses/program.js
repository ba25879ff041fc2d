globalThis.require = require;
const run = require('vm').runInThisContext;
for (;;) {
  const [action, source, values] = __braid.read();
  let answer;
  try {
    const result = action === 'run' ? void run(source) : run(source)(...__braid.decode(values));
    answer = {result: __braid.encode(result)};
  } catch (error) {
    answer = {error: `${error}`};
  }
  __braid.write(answer);
}
