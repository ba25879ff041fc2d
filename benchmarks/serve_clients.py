"""The clients of `serve.py`, in a process of their own that imports nothing slow: one stream for each prompt.

Standard input has {"port", "prompts", "body"}; standard output gets the tokens, the seconds and the events.
"""

import asyncio
import json
import sys
import time
from typing import Any


async def main(port: int, prompts: list[list[int]], body: dict[str, Any]) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            break
        except OSError:  # the server is about to start
            await asyncio.sleep(0.1)
    writer.close()
    begun = time.perf_counter()
    results = await asyncio.gather(*(client(port, {**body, "prompt": prompt}) for prompt in prompts))
    seconds = time.perf_counter() - begun
    first = sorted(first - begun for _, _, first in results)
    tokens, events = (sum(result[at] for result in results) for at in (0, 1))
    facts = {"tokens": tokens, "seconds": seconds, "events": events, "first_token_median": first[len(first) // 2]}
    print(json.dumps(facts))


async def client(port: int, body: dict[str, Any]) -> tuple[int, int, float]:
    """One stream: its tokens, events, and when the first came."""
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    events, first, usage, rest = 0, 0.0, None, []
    async for line in reader:
        if not line.startswith(b"data: {"):
            rest.append(line)
        elif b'"completion_tokens"' in line:
            usage = json.loads(line[6:])["usage"]
        elif line.startswith(b'data: {"error"'):
            sys.exit(f"a stream failed: {line.decode()}")
        else:
            first = first or time.perf_counter()
            events += 1
    writer.close()
    if usage is None:
        sys.exit(f"the server answered:\n{b''.join(rest).decode()}")
    return usage["completion_tokens"], events, first


if __name__ == "__main__":
    asyncio.run(main(**json.load(sys.stdin)))
