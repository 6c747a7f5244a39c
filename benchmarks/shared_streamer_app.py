"""The programs of `shared_streamer.py`: an application for gunicorn, and one that makes lone calls.

BENCH_KIND is "own" for a streamer of each process, "shared" for one batcher for all.
"""

import fcntl
import functools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from penstock import ManagedModel, Streamer

BATCH = 64
CALL_S, ITEM_S = 0.005, 0.0002
MODEL_BYTES = 100 * 2**20


class Device(ManagedModel):
    """A model of 100 MiB on a device that runs one batch at a time, of whatever process."""

    def init_model(self) -> None:
        self.model = bytearray(os.urandom(2**20) * (MODEL_BYTES // 2**20))
        self.turn = os.open(os.path.join(os.environ["TMPDIR"], "device"), os.O_RDWR | os.O_CREAT)
        Path(os.environ["TMPDIR"], f"loaded-{os.getpid()}").touch()

    def predict(self, batch: list[Any]) -> list[Any]:
        fcntl.flock(self.turn, fcntl.LOCK_EX)
        try:
            time.sleep(CALL_S + ITEM_S * len(batch))
        finally:
            fcntl.flock(self.turn, fcntl.LOCK_UN)
        return batch


def nothing(batch: list[Any]) -> list[Any]:
    return batch


def made(model: Any, kind: str) -> Streamer:
    keys: dict[str, Any] = {"shared": os.path.join(os.environ["TMPDIR"], "b", "s")} if kind == "shared" else {}
    return Streamer(model, BATCH, worker_timeout=60, **keys)


def post_fork(server: Any, worker: Any) -> None:
    """gunicorn calls this in a new worker, which serves one of the addresses."""
    worker.sockets = [worker.sockets[(worker.age - 1) % len(worker.sockets)]]


@functools.cache
def streamer() -> Streamer:
    """That of this process."""
    return made(Device, os.environ["BENCH_KIND"])


def wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """One item per request."""
    (text,) = streamer().predict(["1"])
    start_response("200 OK", [("content-type", "text/plain"), ("content-length", "1")])
    return [text.encode()]


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """`wsgi` for asyncio."""
    (text,) = await streamer().apredict(["1"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": text.encode()})


def lone_calls() -> None:
    """Latencies in seconds of lone calls, in turns of both kinds: a line for each line of BENCH_FD."""
    with made(nothing, "own") as own, made(nothing, "shared") as shared:
        streamers = {"own": own, "shared": shared}
        for each in streamers.values():
            each.predict([1])
        with socket.socket(fileno=int(os.environ["BENCH_FD"])) as s, s.makefile("rw", buffering=1) as lines:
            lines.write("{}\n")
            for line in lines:
                kind, seconds = json.loads(line)
                found = []
                last = start = time.perf_counter()
                while last - start < seconds:
                    streamers[kind].predict([1])
                    now = time.perf_counter()
                    found.append(now - last)
                    last = now
                lines.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    lone_calls()
