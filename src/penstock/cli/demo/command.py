"""`penstock demo`: serves the digits model and measures the same load of held-out images with batching off and on."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.demo.digits import data, encode, has_opencv
from penstock.client.endpoint import parse_url
from penstock.errors import FAILED
from penstock.perf.bench.document import number, seconds
from penstock.perf.bench.load_run import run_async
from penstock.perf.bench.measurement import FIGURES, Load, Measurement
from penstock.perf.bench.run import measure
from penstock.perf.bench.server import ServerProcess
from penstock.perf.bench.target import Target
from penstock.perf.bench.workload import JSON, Payload, request_of
from penstock.perf.cli import exit_code

if TYPE_CHECKING:
    from rich.console import Console

LEAST_ACCURACY = 0.97
SECONDS = 4.0
WARM_S = 0.5  # a network this small is warm at once
POLICIES = {"off": "none", "on": "adaptive"}
MODEL = "penstock.cli.demo.digits:Digits"
PATH = "/predictions/digits"
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

    sys.exit(exit_code(lambda: 0 if _run(Console(), connections, requests, keep, port) else FAILED))


def _run(console: Console, connections: int, requests: int | None, keep: bool, port: int) -> bool:
    load = DemoLoad()
    rows: dict[str, DemoRun] = {}
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

                rows[name] = load.run(server, connections, requests, show)
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


def _table(rows: dict[str, DemoRun]) -> Any:
    from rich.table import Table

    table = Table("batching", title="handwritten digits")
    for column in ("accuracy", "requests/s", "p50", "p99", "mean batch"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        latency, batch = row.run.latency, FIGURES["mean_batch"](row.run)
        figures = (number(row.run.throughput), seconds(latency.p50_s), seconds(latency.p99_s), number(batch))
        table.add_row(name, f"{row.accuracy:.2%}", *figures)
    return table


def _verdict(console: Console, rows: dict[str, DemoRun]) -> bool:
    """Prints every failure, or what batching gained; returns whether all is well."""
    good = True
    for name, row in rows.items():
        for why in row.run.invalid:
            console.print(f"batching {name}: {why}", style="yellow", markup=False)
        if failed := sum(row.run.errors.values()):
            text = f"batching {name}: {failed} requests failed: {row.run.first_error}"
            console.print(text, style="red", markup=False)
            good = False
        if row.accuracy < LEAST_ACCURACY:
            console.print(f"batching {name}: accuracy {row.accuracy:.2%}, expected {LEAST_ACCURACY:.0%}", style="red")
            good = False
    if good:
        gain = rows["on"].run.throughput / rows["off"].run.throughput
        console.print(f"batching answers {gain:.1f} x as many requests")
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


class DigitAnswer(msgspec.Struct):
    """The model's response to one image."""

    digit: int
    probability: float


class DemoRun(msgspec.Struct):
    """One run of load, and the share of right digits among all responses, also those of the warm-up."""

    run: Measurement
    accuracy: float


def make_server(policy: str, port: int = 0) -> ServerProcess:
    """`penstock serve` with the digits model and the given policy, not started yet."""
    # A network this small is faster on one thread: handing parts to other threads costs more than it saves.
    sets = ("models.digits.threads=1", f"models.digits.batching.policy={policy}")
    return ServerProcess([MODEL, *(word for text in sets for word in ("--set", text))], port=port)


class DemoLoad:
    """The held-out images as requests, with their labels: PNG, or JSON arrays if OpenCV is not installed."""

    def __init__(self) -> None:
        heldout = data("heldout.npz")
        images, self.labels = heldout["images"], heldout["labels"].tolist()
        arrays = [json.dumps(image.tolist(), separators=(",", ":")) for image in images]
        self.sample = arrays[0]  # a body that a user can type
        self.format = "PNG" if has_opencv() else "JSON arrays"
        if has_opencv():
            self.payloads = [Payload(encode(image), "image/png", "image") for image in images]
        else:
            self.payloads = [Payload(text.encode(), JSON, "image") for text in arrays]

    def run(self, server: ServerProcess, connections: int, requests: int | None, show: Show) -> DemoRun:
        """Warms up, then measures. Raises PenstockError if the server is lost or returns only errors."""
        inference, metrics = (parse_url(server.urls[name]) for name in ("inference", "metrics"))
        target = Target(text=MODEL, endpoint=inference, model="digits", path=PATH, metrics=metrics)
        count = math.ceil((requests or 0) / len(self.labels)) * len(self.labels)
        load = Load(mode="closed", concurrency=connections, seconds=0.0 if requests else SECONDS, requests=count)
        decode = msgspec.json.Decoder(DigitAnswer).decode
        answered = right = 0

        def check(number: int, status: int, body: bytes) -> bool:
            nonlocal answered, right
            try:
                answer = decode(body)
            except msgspec.DecodeError:
                return False
            answered += 1
            right += answer.digit == self.labels[number]
            return True

        def report(elapsed_s: float, answers: int) -> None:
            show(answers / count if count else elapsed_s / SECONDS, answers)

        posts = [request_of(target, payload) for payload in self.payloads]
        run = run_async(measure(target, posts, load, warm_s=WARM_S, check=check, on_progress=report))
        return DemoRun(run, right / max(1, answered))
