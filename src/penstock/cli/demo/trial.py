"""One run of the demo: sends the held-out images to a server process and measures its answers."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock.cli.demo.digits import data, encode, has_opencv
from penstock.client.endpoint import parse_url
from penstock.perf.bench.figures import percentile
from penstock.perf.bench.load import closed_loop, http_request
from penstock.perf.bench.load_run import LOST, REFUSED, TIMED_OUT
from penstock.perf.bench.probe import read_page
from penstock.perf.bench.server import ServerProcess, fetch
from penstock.perf.cli import run_async

Show = Callable[[float, int], None]
"""Receives the finished share, from 0 to 1, and the number of answers, a few times per second."""

PATH = "/predictions/digits"
_FAILED = {
    LOST: "the connection was lost",
    REFUSED: "no connection to the server",
    TIMED_OUT: "no answer within a minute",
}


class DigitAnswer(msgspec.Struct):
    """The model's answer to one image."""

    digit: int
    probability: float


@dataclass
class DemoFigures:
    """The figures of one run. `failures` counts the requests that returned no digit, by reason."""

    accuracy: float
    rate: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    failures: Counter[str]


def make_server(policy: str, port: int = 0) -> ServerProcess:
    """`penstock serve` with the digits model and the given policy, not started yet."""
    # A network this small is faster on one thread: handing parts to other threads costs more than it saves.
    sets = ("models.digits.threads=1", f"models.digits.batching.policy={policy}")
    return ServerProcess(
        ["penstock.cli.demo.digits:Digits", *(word for text in sets for word in ("--set", text))], port=port
    )


def _batches(server: ServerProcess) -> tuple[float, float]:
    """The number of rows run so far, and of batches."""
    page = read_page(fetch(parse_url(server.urls["metrics"]), "GET", "/metrics").body.decode(), "")
    return page.sums.get("rows_sum", 0.0), page.sums.get("rows_count", 0.0)


class DemoLoad:
    """The held-out images as requests, with their labels: PNG, or JSON arrays if OpenCV is not installed."""

    def __init__(self) -> None:
        heldout = data("heldout.npz")
        images, self.labels = heldout["images"], heldout["labels"].tolist()
        arrays = [json.dumps(image.tolist(), separators=(",", ":")) for image in images]
        self.sample = arrays[0]  # a body that a user can type
        if has_opencv():
            self.format, self._content_type = "PNG", "image/png"
            self._bodies = [encode(image) for image in images]
        else:
            self.format, self._content_type = "JSON arrays", "application/json"
            self._bodies = [text.encode() for text in arrays]

    def run(
        self, server: ServerProcess, connections: int, requests: int | None, seconds: float, show: Show
    ) -> DemoFigures:
        """Warms up with one pass over the images, then measures. Raises PenstockError if the server is lost."""
        endpoint = parse_url(server.urls["inference"])
        decode = msgspec.json.Decoder(DigitAnswer).decode
        failures: Counter[str] = Counter()
        right = 0

        def check(number: int, status: int, body: bytes) -> bool:
            nonlocal right
            if status != 200:
                failures[f"status {status}: {body[:200].decode(errors='replace')}"] += 1
                return False
            try:
                right += decode(body).digit == self.labels[number]
            except msgspec.DecodeError as error:
                failures[f"{error}: {body[:200].decode(errors='replace')}"] += 1
            return True

        def report(elapsed_s: float, answers: int) -> None:
            show(elapsed_s / seconds if seconds else answers / at_least, answers)

        headers = {"Content-Type": self._content_type}
        posts = [http_request(endpoint, "POST", PATH, headers, body) for body in self._bodies]
        at_least = requests or 1
        send = partial(closed_loop, endpoint, posts, concurrency=connections, whole_passes=True, check=check)
        warm = run_async(send(at_least=1))
        rows, batches = _batches(server)
        right = 0
        counted = run_async(send(at_least=at_least, seconds=seconds, on_progress=report))
        more_rows, more_batches = _batches(server)
        for status in (*warm.status, *counted.status):
            if status in _FAILED:
                failures[_FAILED[status]] += 1
        latencies_s = sorted(took for took, s in zip(counted.latency_s, counted.status, strict=True) if s > 0)
        return DemoFigures(
            accuracy=right / max(1, len(latencies_s)),
            rate=len(latencies_s) / counted.seconds,
            p50_ms=percentile(latencies_s, 0.5) * 1e3,
            p99_ms=percentile(latencies_s, 0.99) * 1e3,
            mean_batch=(more_rows - rows) / max(1.0, more_batches - batches),
            failures=failures,
        )
