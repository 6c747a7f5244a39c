"""How much of the machine does the listener leave to others: its requests/s against a bare echo on uvicorn.

Both answer a small JSON body to 64 connections of `wrk` in one process without a worker. The listener has all its
features on and a backend that answers in the next pass of the loop.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness

TEXT = "a small body of some sixty bytes, as a prompt or a row"
WORKLOAD = harness.Workload("echo", f'{{"text": "{TEXT}"}}'.encode(), {"text": TEXT})


async def ours() -> None:
    """Serves on a free port, which it prints, until stdin closes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from penstock.config.schema import LimitsConfig
    from penstock.serving.http.server import HttpServer
    from penstock.types import Item, ItemResult, Sink
    from support.backend import Call, FakeBackend

    call_soon = asyncio.get_running_loop().call_soon
    ticket = Call(Item(b""), lambda result: None, None, 0)

    class Echo(FakeBackend):
        """Ignores its requests."""

        def submit(self, model: str, version: str | None, item: Item, sink: Sink, **more: Any) -> Call:
            call_soon(sink, ItemResult(item.payload, "application/json"))
            return ticket

    server = HttpServer(Echo(), LimitsConfig())
    _, port = await server.start("127.0.0.1", 0)
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close(1.0)


async def theirs() -> None:
    """The same echo as a plain ASGI function on uvicorn."""
    import uvicorn

    async def app(scope: dict, receive, send) -> None:  # type: ignore[no-untyped-def,type-arg]
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan="off", http="httptools")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.should_exit = True
    await task


def measure(kind: str, seconds: int) -> harness.Sample:
    """One run of one server in its own process, which ends when its stdin closes."""
    command = [sys.executable, __file__, "--serve", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/predictions/echo"
        return harness.wrk(url, WORKLOAD.body, WORKLOAD.content_type, 64, seconds)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        import uvloop

        uvloop.run(ours() if sys.argv[2] == "penstock" else theirs())
        return
    options = harness.options(__doc__, peers=())
    columns = {"rate": "requests/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms"}
    report = harness.Report(__file__, __doc__, options, columns, libraries=("uvicorn",))
    kinds = {kind: lambda k=kind: measure(k, options.seconds) for kind in ("penstock", "uvicorn")}
    report.add({"connections": 64}, harness.interleave(options.rounds, kinds))
    report.save()


if __name__ == "__main__":
    main()
