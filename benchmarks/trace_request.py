"""How many calls, functions, files and changes of file one plain JSON request costs once everything is warm.

    python benchmarks/trace_request.py [inline|process]

Prints the totals, the files in the order of their first call, and every call. With `process`, the default, the counts
cover the server process only.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import FrameType

from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.serving.http.server import HttpServer

MODEL = "def shout(items):\n    return [str(x).upper() for x in items]\n"
BODY = b'{"a":1}'
REQUEST = (
    b"POST /predictions/shout HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
WARM = 12  # requests before the traced one
Call = tuple[str, str]  # file, qualified name


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """The body of one response."""
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


async def trace(transport: str) -> list[Call]:
    """The calls of one request, in order."""
    calls: list[Call] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "src/penstock/" in file:
            calls.append((file.split("src/penstock/")[-1], frame.f_code.co_qualname))

    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "app.py"
        app.write_text(MODEL)
        async with Engine(LimitsConfig()) as engine:
            await engine.load("shout", ModelConfig(target=f"{app}:shout", transport=transport))
            server = HttpServer(engine, LimitsConfig())
            reader, writer = await asyncio.open_connection(*await server.start("127.0.0.1", 0))
            for _ in range(WARM):
                await ask(reader, writer)
            await asyncio.sleep(0.2)
            sys.setprofile(profile)
            await ask(reader, writer)
            await asyncio.sleep(0.05)
            sys.setprofile(None)
            writer.close()
            await server.close(1)
    return calls


def main() -> None:
    transport = sys.argv[1] if len(sys.argv) > 1 else "process"
    calls = asyncio.run(trace(transport))
    files = list(dict.fromkeys(file for file, _ in calls))
    changes = sum(a[0] != b[0] for a, b in pairwise(calls))
    print(
        f"{transport}: {len(calls)} calls, {len(set(calls))} functions, {len(files)} files, {changes} changes of file"
    )
    print("\n".join(files))
    last = ""
    for file, name in calls:
        print("   " if file == last else "-> ", file, name)
        last = file


if __name__ == "__main__":
    main()
