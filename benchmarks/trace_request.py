"""How many calls, functions, files and changes of file one small request costs once everything is warm.

    python benchmarks/trace_request.py [inline|process] [http|grpc]

The request is plain JSON over HTTP, the default, or a tensor over gRPC. Prints the totals, the files in the order of
their first call, and every call. With `process`, the default, the counts cover the server process only.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType

from penstock.config.schema import LimitsConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.serving.grpc.dispatch import CallDispatcher, GrpcService
from penstock.serving.grpc.inference import DIRECT_CALLS, NAME, RAW_CALLS, OpenInferenceService, failure
from penstock.serving.grpc.listener import GrpcLimits, GrpcListener
from penstock.serving.http.server import HttpServer
from penstock.serving.http2 import frames as h2
from penstock.serving.protocols.oip_protobuf import open_inference

MODEL = "def shout(items):\n    return items\n"
BODY = b'{"a":1}'
REQUEST = (
    b"POST /predictions/shout HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
WARM = 12  # requests before the traced one
Call = tuple[str, str]  # file, qualified name
Ask = Callable[[], Awaitable[None]]


@asynccontextmanager
async def http(engine: Engine) -> AsyncIterator[Ask]:
    """Sends one request over a connection that stays open, and reads the response."""
    server = HttpServer(engine, LimitsConfig())
    reader, writer = await asyncio.open_connection(*await server.start("127.0.0.1", 0))

    async def ask() -> None:
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))

    yield ask
    writer.close()
    await server.close(1)


@asynccontextmanager
async def grpc(engine: Engine) -> AsyncIterator[Ask]:
    """Calls ModelInfer as gRPC's C++ client does, which updates its windows with each call."""
    service = GrpcService(NAME, [OpenInferenceService(engine, 64, 60.0)], raw=RAW_CALLS, direct=DIRECT_CALLS)
    dispatcher = CallDispatcher(open_inference(), [service], lambda guard, token: None, failure)
    server = GrpcListener(engine, dispatcher, GrpcLimits(LimitsConfig()))
    reader, writer = await asyncio.open_connection("127.0.0.1", await server.start("127.0.0.1", 0, "a key"))
    writer.write(h2.PREFACE + h2.settings({}))
    path = f"/{NAME}/ModelInfer"
    fields = {":method": "POST", ":scheme": "http", ":path": path, "content-type": "application/grpc"}
    block = h2.encode_headers(fields.items())
    request = open_inference().message("inference.ModelInferRequest")(model_name="shout")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 64])
    request.raw_input_contents.append(bytes(256))
    message = request.SerializeToString()
    data = bytes(1) + len(message).to_bytes(4, "big") + message

    def call(id: int) -> bytes:
        begin = h2.frame(h2.HEADERS, h2.END_HEADERS, id, block) + h2.window_update(id, 5)
        return begin + h2.frame(h2.DATA, h2.END_STREAM, id, data) + h2.window_update(0, len(data))

    calls = iter([call(id) for id in range(1, 2 * WARM + 2, 2)])

    async def ask() -> None:
        writer.write(next(calls))
        kind = flags = 0
        while kind != h2.HEADERS or not flags & h2.END_STREAM:
            high, low, kind, flags, _ = h2.HEAD.unpack(await reader.readexactly(h2.HEAD_BYTES))
            await reader.readexactly(high << 8 | low)

    yield ask
    writer.close()
    await server.close(1)


async def trace(transport: str, protocol: str) -> list[Call]:
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
            async with {"http": http, "grpc": grpc}[protocol](engine) as ask:
                for _ in range(WARM):
                    await ask()
                await asyncio.sleep(0.2)
                sys.setprofile(profile)
                await ask()
                await asyncio.sleep(0.05)
                sys.setprofile(None)
    return calls


def main() -> None:
    transport, protocol = (*sys.argv[1:], "process", "http")[:2] if len(sys.argv) < 3 else sys.argv[1:3]
    calls = asyncio.run(trace(transport, protocol))
    files = list(dict.fromkeys(file for file, _ in calls))
    changes = sum(a[0] != b[0] for a, b in pairwise(calls))
    counts = f"{len(calls)} calls, {len(set(calls))} functions, {len(files)} files, {changes} changes of file"
    print(f"{transport}, {protocol}: {counts}")
    print("\n".join(files))
    last = ""
    for file, name in calls:
        print("   " if file == last else "-> ", file, name)
        last = file


if __name__ == "__main__":
    main()
