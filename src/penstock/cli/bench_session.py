"""One call of `penstock bench`: sends the loads of a plan, tells what is measured as it comes, keeps it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click
import msgspec
from msgspec import Struct

from penstock.cli.measuring import FAILED
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.modes import Plan, carry_out
from penstock.perf.bench.protocol import check_of
from penstock.perf.bench.publish import publish
from penstock.perf.bench.results import Origin, Results
from penstock.perf.bench.run import measure
from penstock.perf.bench.slo import Slo
from penstock.perf.bench.table import line, notes, plain, rows, server_lines, verdict
from penstock.perf.bench.target import Target

_CLEAR: Final = "\r\x1b[K"  # the line of a terminal

Show = Callable[[Load, float, int], None]
"""Told ten times a second how far a load is: seconds since its start, and answers."""


class Session(Struct, kw_only=True):
    """What is to be done, and what was measured so far. With `as_json` nothing is printed before the end."""

    plan: Plan
    slo: Slo
    origin: Origin
    results: Results | None = None
    warm_s: float | None = None
    timeout_s: float | None = None
    as_json: bool = False
    runs: list[Measurement] = []
    found: list[str] = []

    async def send(self, target: Target, requests: list[bytes]) -> None:
        """Runs the plan. Cancelled, it has kept the part of the run that was under way."""
        with _progress(quiet=self.as_json) as show:

            async def one(load: Load, repeat: int) -> Measurement:
                run = await measure(
                    target,
                    requests,
                    load,
                    slo=self.slo,
                    warm_s=self.warm_s,
                    repeat=repeat,
                    check=check_of(target),
                    timeout_s=self.timeout_s,
                    on_progress=lambda seconds, answered: show(load, seconds, answered),
                    on_partial=self.keep,
                )
                self.keep(run)
                return run

            async for text in carry_out(self.plan, self.slo, one):
                self.found.append(text)

    def keep(self, run: Measurement) -> None:
        """One more is measured."""
        self.runs.append(run)
        if self.results is not None:
            self.results.append(run)
        if not self.as_json:
            click.echo(_CLEAR * sys.stderr.isatty() + line(run, self.plan.repeat), err=True)

    def tell(self) -> None:
        """Prints all of it."""
        if self.as_json:
            told = {"origin": self.origin, "measurements": self.runs, "found": self.found}
            click.echo(msgspec.json.format(msgspec.json.encode(told)))
        elif self.runs:
            for text in (*plain(rows(self.runs)), *server_lines(self.runs), *notes(self.runs), *self.found):
                click.echo(text)
            if self.slo.parts and self.plan.mode in ("closed", "open"):
                click.echo(verdict(self.runs, self.slo))

    def close(self) -> None:
        """Writes the summary and the report, if results are kept."""
        if self.results is None:
            return
        self.results.close()
        if self.runs:
            report, page = publish(self.results.folder)
            click.echo(f"kept: {report} and {page}", err=True)

    def code(self) -> int:
        """The exit status: whether all runs count and keep the SLO, or a search found what it looked for."""
        if self.plan.mode in ("ramp", "saturate"):
            known = self.found and all(text.startswith(("knee", "saturates")) for text in self.found)
            return 0 if known else FAILED
        if not self.runs or any(run.invalid or not run.answered for run in self.runs):
            return FAILED
        return FAILED if self.slo.parts and not all(run.met for run in self.runs) else 0


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Show]:
    """A line that tells how far the load is, on a terminal. Written as it is: what draws in a thread of its own would
    hold up the generator."""
    if quiet or not sys.stderr.isatty():
        yield lambda load, seconds, answered: None
        return

    def show(load: Load, seconds: float, answered: int) -> None:
        length = f" of {load.seconds:g}" if load.seconds else ""
        sys.stderr.write(f"{_CLEAR}{load.label}: {seconds:.1f}{length} s, {answered:,} answers")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(_CLEAR)
