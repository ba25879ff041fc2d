// A message is a line of JSON. Where the other process has ended, this one ends too.
const __braid = (() => {
  const fs = require('fs');
  const {parse, stringify} = JSON;
  let received = Buffer.alloc(0);
  const write = (message) => {
    const line = Buffer.from(stringify(message) + '\n');
    try {
      for (let at = 0; at < line.length;) at += fs.writeSync(4, line, at);
    } catch (error) {
      process.exit(0);
    }
  };
  const read = () => {
    const chunk = Buffer.alloc(65536);
    for (;;) {
      const end = received.indexOf(10);
      if (end >= 0) {
        const line = received.subarray(0, end).toString();
        received = received.subarray(end + 1);
        return parse(line);
      }
      const count = fs.readSync(3, chunk);
      if (count === 0) process.exit(0);
      received = Buffer.concat([received, chunk.subarray(0, count)]);
    }
  };
  const isInJson = (number) => Number.isFinite(number) && !Object.is(number, -0);
  const encode = (value) => {
    if (value === null || typeof value === 'boolean' || typeof value === 'string') return value;
    if (typeof value === 'number') return isInJson(value) ? value : {number: value === 0 ? '-0' : `${value}`};
    if (value === undefined) return {undefined: 0};
    if (typeof value === 'bigint') return {bigint: `${value}`};
    if (Array.isArray(value)) return Array.from(value, encode);
    if (value instanceof Map) return {map: Array.from(value, encode)};
    if (value instanceof Set) return {set: Array.from(value, encode)};
    if (typeof value === 'object') return {object: Object.entries(value).map(encode)};
    throw new TypeError(`a ${typeof value} cannot be sent to another process`);
  };
  const decode = (message) => {
    if (Array.isArray(message)) return message.map(decode);
    if (message === null || typeof message !== 'object') return message;
    const [[kind, content]] = Object.entries(message);
    if (kind === 'number') return Number(content);
    if (kind === 'undefined') return undefined;
    if (kind === 'bigint') return BigInt(content);
    if (kind === 'map') return new Map(content.map(decode));
    if (kind === 'set') return new Set(content.map(decode));
    return Object.fromEntries(content.map(decode));
  };
  return {read, write, encode, decode};
})();
