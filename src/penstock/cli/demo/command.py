"""`penstock demo`: serves the digits model and measures the same load with batching off and on."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.cli.demo.trial import DemoFigures

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

    from penstock.perf.cli import FAILED, exit_code

    sys.exit(exit_code(lambda: 0 if _run(Console(), connections, requests, keep, port) else FAILED))


def _run(console: Console, connections: int, requests: int | None, keep: bool, port: int) -> bool:
    from penstock.cli.demo.trial import DemoLoad, make_server

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
