"""What the chaos tests share: a small HTTP/1.1 client, a crowd of them, and eyes for what a server holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import textwrap
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from penstock.streamer.redis.client import RedisStreamer
from support.brokers import APP, WorkerProcess
from support.waiting import until

FULL = os.environ.get("CHAOS") == "full"
PATIENCE_S = 60.0  # longest wait for anything that must come


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Lost(Exception):
    """The connection ended without a whole answer; `begun` tells whether a part of one came."""

    def __init__(self, begun: bool) -> None:
        super().__init__(f"no whole answer, begun={begun}")
        self.begun = begun


class Client:
    """One kept-alive connection: one request at a time, or many at once with `send` and `receive`."""

    def __init__(self, server: Any, listener: str = "inference") -> None:
        host, port = server.urls[listener].removeprefix("http://").split(":")
        self.address = host, int(port)

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(*self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def send(self, path: str, body: bytes = b"", method: str = "POST", **headers: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
        lines += [f"{k.replace('_', '-')}: {v}" for k, v in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def receive(self) -> Answer:
        """The next answer. Raises Lost."""
        head = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await self.reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").strip().split("\r\n")
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
                body = await self.reader.readexactly(int(headers["content-length"]))
        except asyncio.IncompleteReadError as e:
            raise Lost(bool(head or e.partial)) from None
        except ConnectionError:
            raise Lost(bool(head)) from None
        return Answer(int(first.split()[1]), headers, body)

    async def ask(self, path: str, body: bytes = b"", **headers: str) -> Answer:
        """The answer to one request. Raises Lost."""
        self.send(path, body, **headers)
        return await self.receive()


class Crowd:
    """Clients in a closed loop: each asks `/predictions/{model}` with a number of its own, until `stop`.

    The answer must be that number. `statuses` counts the answers; `wrong` has what was not the caller's own;
    `unanswered` the numbers whose connection ended before any byte of an answer. `asked` has the time of
    every request, `told` that of every answer 200.
    """

    def __init__(self, server: Any, model: str, clients: int) -> None:
        self.server, self.path, self.clients = server, f"/predictions/{model}", clients
        self.statuses: Counter[int] = Counter()
        self.wrong: list[object] = []
        self.unanswered: set[int] = set()
        self.asked: dict[int, float] = {}
        self.told: dict[int, float] = {}
        self.refused = 0
        self._going = True

    async def __aenter__(self) -> Crowd:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def dismiss(self) -> None:
        """Nobody asks again."""
        self._going = False

    async def stop(self) -> None:
        """Every client gets its last answer and leaves."""
        self.dismiss()
        await asyncio.gather(*self._tasks)

    async def answered(self, more: int = 1) -> None:
        """Returns when so many more answers have come."""
        target = self.statuses.total() + more
        await until(lambda: self.statuses.total() >= target)

    @property
    def longest_s(self) -> float:
        """The longest that anybody waited for an answer."""
        return max(at - self.asked[number] for number, at in self.told.items())

    async def _client(self) -> None:
        while self._going:
            try:
                async with Client(self.server) as client:
                    await self._talk(client)
            except OSError:
                self.refused += 1
                await asyncio.sleep(0.01)

    async def _talk(self, client: Client) -> None:
        while self._going:
            number = len(self.asked) + 1
            self.asked[number] = time.monotonic()
            try:
                answer = await client.ask(self.path, b"%d" % number, content_type="application/json")
            except Lost as lost:
                if lost.begun:
                    self.wrong.append((number, "half an answer"))
                self.unanswered.add(number)
                return
            except TimeoutError:
                self.wrong.append((number, "never answered"))
                return
            self.statuses[answer.status] += 1
            if answer.status == 200:
                self.told[number] = time.monotonic()
                if answer.body != b"%d" % number:
                    self.wrong.append((number, answer))
            if answer.headers.get("connection") == "close":
                return
            if answer.status != 200:
                await asyncio.sleep(0.01)


def workers(server: Any) -> list[psutil.Process]:
    """The worker processes that live now."""
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [p for p in found if alive(p)]


async def kill_one(server: Any, count: int) -> None:
    """Kills one of the `count` workers, which must all be up. Returns when the server has counted the death and all
    are up again. If a test only waits until all are up, it may read the state before the death: its next kill can then
    hit a worker that is still loading, which the server counts as "failed", not as "died".
    """
    deaths = server.metric("penstock_worker_events_total", state="died")
    victim = random.choice(workers(server))
    victim.kill()
    await until(lambda: not alive(victim) and len(workers(server)) == count)  # without the server's time
    await until(lambda: server.metric("penstock_worker_events_total", state="died") == deaths + 1)
    await until(lambda: server.metric("penstock_workers_up") == count)


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def descriptors(server: Any) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def anonymous_bytes(server: Any) -> int:
    """The server's own memory, without what it shares with workers and files."""
    with open(f"/proc/{server.process.pid}/smaps_rollup") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("Anonymous:")) * 1024


def cpu_s(server: Any) -> float:
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


@pytest.fixture
def chaos() -> SimpleNamespace:
    """The helpers of this file; `count(short, full)` is how often: `full` when CHAOS=full."""
    return SimpleNamespace(
        count=lambda short, full: full if FULL else short,
        **{
            f.__name__: f
            for f in (Answer, Lost, Client, Crowd, until, workers, kill_one, alive, descriptors, anonymous_bytes, cpu_s)
        },
    )


@pytest.fixture
async def guarded(serve: Callable[..., Any], chaos: SimpleNamespace) -> AsyncIterator[Callable[..., Any]]:
    """`serve`, and a look afterwards: each server still ends by itself with status 0, and none of its workers lives."""
    servers: list[Any] = []

    def start(*arguments: Any, **named: Any) -> Any:
        server = serve(*arguments, **named)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.process.poll() is not None:
            continue
        left = workers(server)
        status, _, said = await asyncio.to_thread(server.stop)
        assert status == 0, said
        assert "event=bug" not in said, said
        assert "never retrieved" not in said, said
        assert not psutil.wait_procs(left, timeout=10)[1]


@pytest.fixture
def worker(tmp_path: Path, redis_server: Any) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts workers: `worker("echo", "--workers", "2")`."""
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    workers: list[WorkerProcess] = []

    def start(target: str = "echo", *options: str, broker: str = "", wait: bool = True) -> WorkerProcess:
        fast = ["--lease", "1", "--max-batch-size", "8", *options]
        workers.append(WorkerProcess(tmp_path, target, broker or redis_server.address, *fast, wait=wait))
        return workers[-1]

    yield start
    for one in workers:
        one.end()


@pytest.fixture
def streamer(redis_server: Any) -> Iterator[Callable[..., RedisStreamer]]:
    made: list[RedisStreamer] = []

    def make(broker: str = "", **keywords: Any) -> RedisStreamer:
        made.append(RedisStreamer(broker or redis_server.address, **keywords))
        return made[-1]

    yield make
    for one in made:
        one._portal.close(0.0)
