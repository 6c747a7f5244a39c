"""How much of the machine does the listener leave to others: its requests/s against a bare echo on uvicorn.

Both answer a small JSON body to `wrk` in one process without a worker, one after the other in the same minute; ours
with all its features, on a backend that answers from the loop's next pass. Needs `wrk`.

    python benchmarks/listener.py [--connections 64] [--seconds 5] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from typing import Any

BODY = '{"text": "a small body of some sixty bytes, as a prompt or a row"}'
LUA = f"""wrk.method = "POST"
wrk.body = '{BODY}'
wrk.headers["Content-Type"] = "application/json"
"""


async def ours() -> None:
    """Serves on a free port, which is printed, until stdin closes."""
    from penstock.config.schema import LimitsConfig
    from penstock.frontends.http.server import HttpServer
    from penstock.testing.backend import Call, FakeBackend
    from penstock.types import Item, ItemResult, Sink

    call_soon = asyncio.get_running_loop().call_soon
    ticket = Call(Item(b""), lambda result: None, None, 0)

    class Echo(FakeBackend):
        """Keeps no record of what it is asked."""

        def submit(self, model: str, version: str | None, item: Item, sink: Sink, **more: Any) -> Call:
            call_soon(sink, ItemResult(item.payload, "application/json"))
            return ticket

    server = HttpServer(Echo(), LimitsConfig())
    _, port = await server.start("127.0.0.1", 0)
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close(1.0)


async def theirs() -> None:
    """The same echo as a bare ASGI function on uvicorn."""
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


def measure(kind: str, connections: int, seconds: int, script: str) -> tuple[float, str]:
    """(requests/s, p99 as wrk prints it) of one run of one server in its own process."""
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/predictions/echo"
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", script, url]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        server.stdin.close()
        server.wait(10)
    if "Non-2xx" in out:
        raise SystemExit(f"{kind}: not every answer was 200\n{out}")
    rate, p99 = re.search(r"Requests/sec:\s+([\d.]+)", out), re.search(r"99%\s+(\S+)", out)
    assert rate is not None
    assert p99 is not None
    return float(rate[1]), p99[1]


def main() -> None:
    """Prints one line a server and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", choices=("penstock", "uvicorn"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        import uvloop

        uvloop.run(ours() if args.serve == "penstock" else theirs())
        return
    rates: dict[str, list[float]] = {"penstock": [], "uvicorn": []}
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA)
        script.flush()
        for _ in range(args.rounds):
            for kind, found in rates.items():
                rate, p99 = measure(kind, args.connections, args.seconds, script.name)
                found.append(rate)
                print(f"{kind:9} {rate:9.0f} requests/s  p99 {p99}", flush=True)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("uvicorn", "uvloop", "httptools"))
    print(f"{platform.machine()}, Python {platform.python_version()}, {libraries}, {args.connections} connections")
    ratio = statistics.median(rates["penstock"]) / statistics.median(rates["uvicorn"])
    spread = ", ".join(f"{a / b:.2f}" for a, b in zip(rates["penstock"], rates["uvicorn"], strict=True))
    print(f"ratio {ratio:.2f} (rounds: {spread})")


if __name__ == "__main__":
    main()
