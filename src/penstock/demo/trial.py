"""One run of the demo: a server in a process of its own, the held-out images sent to it, and what came of it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from penstock.bench.ask import ask
from penstock.bench.page import read_page
from penstock.bench.server import ServerProcess
from penstock.client.endpoint import parse_url
from penstock.demo.digits import data, encode
from penstock.demo.load import Figures, Load, percentile, post
from penstock.errors import PenstockError

T = TypeVar("T")
Show = Callable[[float, int], None]
"""Called a few times a second with the share that is done, from 0 to 1, and the number of answers."""

PATH = "/predictions/digits"


class Answer(msgspec.Struct):
    """What the model answers to one image."""

    digit: int
    probability: float


@dataclass
class Row:
    """The figures of one run. `failures` counts the requests that were not answered with a digit, by reason."""

    accuracy: float
    rate: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    failures: Counter[str]


def make_server(policy: str, port: int = 0) -> ServerProcess:
    """`penstock serve` with the digits model and the given policy, not started yet."""
    # one thread: a network this small only loses time handing its pieces to others, most of all on a busy machine
    sets = ("models.digits.threads=1", f"models.digits.batching.policy={policy}")
    return ServerProcess(
        ["penstock.demo.digits:Digits", *(word for text in sets for word in ("--set", text))], port=port
    )


def _batches(server: ServerProcess) -> tuple[float, float]:
    """How many rows were run so far, and in how many batches."""
    page = read_page(ask(parse_url(server.urls["metrics"]), "GET", "/metrics").body.decode(), "")
    return page.sums.get("rows_sum", 0.0), page.sums.get("rows_count", 0.0)


class Trial:
    """The held-out images as PNG requests, and their labels. Raises PenstockError without OpenCV."""

    def __init__(self) -> None:
        heldout = data("heldout.npz")
        self.images, self.labels = heldout["images"], heldout["labels"].tolist()
        self._pngs = [encode(image) for image in self.images]

    def sample(self) -> str:
        """The first image as the JSON body of a request."""
        return json.dumps(self.images[0].tolist(), separators=(",", ":"))

    def run(self, server: ServerProcess, connections: int, requests: int | None, seconds: float, show: Show) -> Row:
        """One uncounted pass over the images, then the counted run. Raises PenstockError if the server is lost."""
        url = urlsplit(server.urls["inference"])
        host, port = str(url.hostname), int(url.port or 80)
        decode = msgspec.json.Decoder(Answer).decode
        failures: Counter[str] = Counter()
        right = 0

        def check(number: int, status: int, body: bytes) -> None:
            nonlocal right
            if status != 200:
                failures[f"status {status}: {body[:200].decode(errors='replace')}"] += 1
                return
            try:
                right += decode(body).digit == self.labels[number]
            except msgspec.DecodeError as error:
                failures[f"{error}: {body[:200].decode(errors='replace')}"] += 1

        load = Load([post(url.netloc, PATH, "image/png", png) for png in self._pngs], check)
        try:
            _in_loop(load.run(host, port, connections=connections))
            failures["the connection was lost"] += load.figures.lost
            rows, batches = _batches(server)
            right = 0
            at_least = requests or 1
            figures = _in_loop(_watched(load, host, port, connections, at_least, seconds, show))
            more_rows, more_batches = _batches(server)
        except OSError as error:  # TimeoutError too
            raise PenstockError(f"the server was lost: {error}") from None
        failures["the connection was lost"] += figures.lost
        answers = len(figures.latencies_s)
        return Row(
            accuracy=right / max(1, answers),
            rate=answers / figures.seconds,
            p50_ms=percentile(figures.latencies_s, 0.5) * 1e3,
            p99_ms=percentile(figures.latencies_s, 0.99) * 1e3,
            mean_batch=(more_rows - rows) / max(1.0, more_batches - batches),
            failures=+failures,
        )


async def _watched(
    load: Load, host: str, port: int, connections: int, at_least: int, seconds: float, show: Show
) -> Figures:
    """Runs the load and shows how far it is, ten times a second."""
    start = time.perf_counter()
    run = asyncio.ensure_future(load.run(host, port, connections=connections, at_least=at_least, seconds=seconds))
    while not run.done():
        await asyncio.wait([run], timeout=0.1)
        answers = len(load.figures.latencies_s)
        show((time.perf_counter() - start) / seconds if seconds else answers / at_least, answers)
    return await run


def forward_terminations() -> None:
    """Makes SIGTERM and SIGHUP end this process as Ctrl-C does, so that its server is stopped too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts with "&"
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))


def _in_loop(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_new_loop()) as runner:
        return runner.run(work)


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
