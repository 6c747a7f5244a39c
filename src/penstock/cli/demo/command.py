"""`penstock demo`: serves the digits model and measures the same load of held-out images with batching off and on."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.demo.digits import data, encode, has_opencv
from penstock.client.endpoint import parse_url
from penstock.perf.bench.figures import percentile
from penstock.perf.bench.load import closed_loop, http_request
from penstock.perf.bench.load_run import LOST, REFUSED, TIMED_OUT, run_async
from penstock.perf.bench.probe import read_page
from penstock.perf.bench.server import ServerProcess, fetch

if TYPE_CHECKING:
    from rich.console import Console

LEAST_ACCURACY = 0.97
SECONDS = 4.0
POLICIES = {"off": "none", "on": "adaptive"}
MODEL = "penstock.cli.demo.digits:Digits"
NEXT = """
Try next:
  {program} serve {model}
      serves this model on port 8080. From another terminal:
  curl -H 'content-type: application/json' -d '{sample}' http://127.0.0.1:8080/predictions/digits
  curl http://127.0.0.1:8082/metrics

Serve a function of your own: save these two lines as app.py, then run "{program} serve app.py:shout".
  def shout(items):
      return [text.upper() for text in items]
"""


@click.command()
@click.option("--connections", type=click.IntRange(1, 10_000), default=64, show_default=True, help="Open connections.")
@click.option(
    "--requests", type=click.IntRange(1), help="Requests per run, rounded up to whole passes [as many as fit in 4 s]."
)
@click.option("--keep", is_flag=True, help="Leave the second server running.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the second server; 0 takes a free one.")
def demo(connections: int, requests: int | None, keep: bool, port: int) -> None:
    """Serve a model of handwritten digits and measure what batching gains.

    Sends held-out images to a server on a free port, first with batching off, then on. The images are PNG files, or
    JSON arrays if OpenCV is not installed. Exits with 0 if the model recognises at least 97 % and no request fails.
    """
    from rich.console import Console

    from penstock.errors import FAILED
    from penstock.perf.cli import exit_code

    sys.exit(exit_code(lambda: 0 if _run(Console(), connections, requests, keep, port) else FAILED))


def _run(console: Console, connections: int, requests: int | None, keep: bool, port: int) -> bool:
    from penstock.cli.demo.command import DemoLoad, make_server

    load = DemoLoad()
    rows: dict[str, DemoFigures] = {}
    console.print(
        f"{len(load.labels)} held-out images of handwritten digits as {load.format}, {connections} connections"
    )
    with _progress(console) as progress:
        for name, policy in POLICIES.items():
            task = progress.add_task(f"batching {name}: starting the server", total=None, answers=0)
            server = make_server(policy, port if name == "on" else 0)
            try:
                server.start()
                progress.update(task, description=f"batching {name}")

                def show(done: float, answers: int, task: Any = task) -> None:
                    progress.update(task, total=1, completed=done, answers=answers)

                rows[name] = load.run(server, connections, requests, 0 if requests else SECONDS, show)
            except BaseException:
                server.stop()
                raise
            if name == "off" or not keep:
                server.stop()
    console.print(_table(rows))
    good = _verdict(console, rows)
    if keep:
        _keep(console, server, load.sample)
    elif good:
        program = "penstock" if shutil.which("penstock") else sys.argv[0]
        click.echo(NEXT.format(program=program, model=MODEL, sample=load.sample), nl=False)
    return good


def _progress(console: Console) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[answers]} answers"))
    return Progress(*columns, console=console, transient=True)


def _table(rows: dict[str, DemoFigures]) -> Any:
    from rich.table import Table

    table = Table("batching", title="handwritten digits")
    for column in ("accuracy", "requests/s", "p50 ms", "p99 ms", "mean batch"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        figures = (f"{row.accuracy:.2%}", f"{row.rate:,.0f}", f"{row.p50_ms:.1f}", f"{row.p99_ms:.1f}")
        table.add_row(name, *figures, f"{row.mean_batch:.1f}")
    return table


def _verdict(console: Console, rows: dict[str, DemoFigures]) -> bool:
    """Prints every failure, or what batching gained; returns whether all is well."""
    good = True
    for name, row in rows.items():
        for reason, count in row.failures.items():
            console.print(f"batching {name}: {count} requests failed: {reason}", style="red", markup=False)
            good = False
        if row.accuracy < LEAST_ACCURACY:
            console.print(f"batching {name}: accuracy {row.accuracy:.2%}, expected {LEAST_ACCURACY:.0%}", style="red")
            good = False
    if good:
        console.print(f"batching answers {rows['on'].rate / rows['off'].rate:.1f} x as many requests")
    return good


def _keep(console: Console, server: Any, sample: str) -> None:
    """Waits for Ctrl-C, or until the server exits."""
    url = server.urls["inference"]
    console.print("the server runs until Ctrl-C; try:", markup=False)
    click.echo(f"curl -H 'content-type: application/json' -d '{sample}' {url}/predictions/digits")
    try:
        server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()


Show = Callable[[float, int], None]
"""Receives the finished share, from 0 to 1, and the number of answers, a few times per second."""

PATH = "/predictions/digits"
_FAILED = {
    LOST: "the connection was lost",
    REFUSED: "no connection to the server",
    TIMED_OUT: "no response within a minute",
}


class DigitAnswer(msgspec.Struct):
    """The model's response to one image."""

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
