"""`penstock bench`: its loads one after another (fixed, rising until the SLO breaks, or doubling), printed and kept."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

import click
from msgspec import Struct

from penstock.errors import FAILED
from penstock.perf.bench.document import Paragraph, as_text, table, value_text
from penstock.perf.bench.expectation import Expectation
from penstock.perf.bench.measurement import MOST_ERRORS, Load, Measurement, Slo, group_by_load, parse_slo
from penstock.perf.bench.report import LOADS, findings, in_a_line, load_verdict, publish
from penstock.perf.bench.results import Origin, Results, json_text
from penstock.perf.bench.run import measure
from penstock.perf.bench.target import Target
from penstock.perf.bench.workload import check_of

Mode = Literal["closed", "open", "ramp", "saturate"]
Measure = Callable[[Load, int], Awaitable[Measurement]]
"""Runs a load once; the number is the repeat."""

STEP: Final = 1.5  # from one rate of a ramp to the next
NEAR: Final = 1.06  # between the last rate that holds and the first that does not: 1.5 halved three times
DOWN: Final = 64.0  # the lowest rate tried, as a divisor of the first
KNEE: Final = 5.0  # limit of the p99 without an SLO, as a multiple of the lowest rate's
GAIN: Final = 1.03  # the smallest relevant gain
MOST_CLIENTS: Final = 4096  # of a generator; it has 8000 connections


class LoadPlan(Struct, frozen=True, kw_only=True):
    """The loads to run. `rates` of a ramp are the first rate and optionally the last; `saturate` starts with the first
    of `concurrency`. `rates` may be empty for a ramp and for a trace in `arrival`."""

    mode: Mode
    concurrency: tuple[int, ...] = (1, 8, 64)
    rates: tuple[float, ...] = ()
    arrival: str = "poisson"
    seconds: float = 10.0
    requests: int = 0
    seed: int = 0
    connections: int = 256
    repeat: int = 1

    def closed(self, clients: int) -> Load:
        seconds = 0.0 if self.requests else self.seconds
        return Load(mode="closed", concurrency=clients, seconds=seconds, requests=self.requests, seed=self.seed)

    def open(self, rate: float, seconds: float, repeat: int) -> Load:
        """An open loop; each repeat has different arrivals."""
        return Load(
            mode="open",
            rate=rate,
            arrival=self.arrival,
            seconds=seconds,
            requests=self.requests,
            seed=self.seed + repeat,
            connections=self.connections,
        )


async def run_plan(plan: LoadPlan, slo: Slo, measure: Measure) -> AsyncIterator[str]:
    """Runs all loads, with interleaved repeats; yields the result of each search in words."""
    for repeat in range(plan.repeat):
        if plan.mode == "closed":
            for clients in plan.concurrency:
                await measure(plan.closed(clients), repeat)
        elif plan.mode == "open":
            for rate in plan.rates or (0.0,):
                await measure(plan.open(rate, plan.seconds, repeat), repeat)
        elif plan.mode == "ramp":
            yield await _Ramp(plan, slo, measure, repeat).run()
        else:
            yield await _saturate(plan, measure, repeat)


async def _saturate(plan: LoadPlan, measure: Measure, repeat: int) -> str:
    """Doubles the clients until two doublings gain nothing: one may only fill the batch of the next."""
    best: Measurement | None = None
    clients, idle = plan.concurrency[0], 0
    while idle < 2 and clients <= MOST_CLIENTS:
        found = await _twice(measure, plan.closed(clients), repeat)
        if found.invalid:
            return _unknown("saturates", f"{best.load.label} get {best.throughput:,.6g}/s" if best else "")
        if found.error_share > MOST_ERRORS:
            break
        if best is None or found.throughput > best.throughput * GAIN:
            best, idle = found, 0
        else:
            idle += 1
        clients *= 2
    if best is None:
        return f"no throughput: already {plan.concurrency[0]} clients get more than {MOST_ERRORS:.0%} errors"
    why = "more clients gain less than 3 %" if idle else "more clients get errors"
    return f"saturates at {best.load.label}: {best.throughput:,.6g}/s; {why}"


async def _twice(measure: Measure, load: Load, repeat: int) -> Measurement:
    """The measurement, repeated once if invalid: something else may have disturbed the generator."""
    found = await measure(load, repeat)
    return await measure(load, repeat) if found.invalid else found


def _unknown(what: str, so_far: str) -> str:
    known = f"{so_far}; more" if so_far else "it"
    return f"where it {what} is not known: {known} cannot be measured, see INVALID"


class _Ramp:
    """A search for the knee: the highest rate that holds."""

    def __init__(self, plan: LoadPlan, slo: Slo, measure: Measure, repeat: int) -> None:
        self._plan, self._slo, self._measure, self._repeat = plan, slo, measure, repeat
        self._good: float | None = None
        self._bad: float | None = None
        self._why = ""

    async def run(self) -> str:
        first = self._plan.rates[0] if self._plan.rates else await self._slow()
        if not first:
            return "no knee: a single client gets no good responses"
        last = self._plan.rates[1] if len(self._plan.rates) > 1 else None
        rate: float | None = first
        while rate is not None:
            found = await _twice(self._measure, self._plan.open(rate, self._seconds(rate), self._repeat), self._repeat)
            if found.invalid:
                return _unknown("breaks", f"{self._good:,.6g}/s hold {self._slo.text}" if self._good else "")
            why = self._broken(found)
            if why is None:
                few = f"{found.answered:,} good responses at {rate:,.6g}/s"
                return f"no knee: {few} are too few to judge {self._slo.text}"
            if why:
                self._bad, self._why = rate, why
            else:
                self._good = rate
            rate = self._next(first, last)
        if self._good is None:
            return f"no knee: {self._bad:,.6g}/s is already too much: {self._why}"
        beyond = f"{self._bad:,.6g}/s do not: {self._why}" if self._bad else "no higher rate was requested"
        return f"knee: {self._good:,.6g}/s hold {self._slo.text}; {beyond}"

    async def _slow(self) -> float:
        """Half of a single client's throughput, which hardly loads a server."""
        alone = await _twice(self._measure, self._plan.closed(1), self._repeat)
        return 0.0 if alone.invalid else float(f"{alone.throughput / 2:.3g}")

    def _next(self, first: float, last: float | None) -> float | None:
        """The next rate to try; None if the knee is known."""
        if self._bad is None:
            assert self._good is not None
            higher = self._good * STEP
            if last is None or self._good < last:
                return float(f"{min(higher, last or higher):.4g}")
            return None
        if self._good is None:
            return self._bad / 2 if self._bad > first / DOWN else None
        return float(f"{(self._good * self._bad) ** 0.5:.4g}") if self._bad > self._good * NEAR else None

    def _seconds(self, rate: float) -> float:
        """Long enough for the samples of the SLO's percentiles, plus a fifth."""
        names = {objective.name for objective in self._slo.objectives} or {"p99"}
        samples = 1000 if "p99.9" in names else 100
        return max(self._plan.seconds, 1.2 * samples / rate)

    def _broken(self, run: Measurement) -> str | None:
        """Why the rate does not hold: "" if it does, None if unknown."""
        if not self._slo.objectives and run.latency.p99_s is not None:
            self._slo = parse_slo(f"p99<={run.latency.p99_s * KNEE * 1e3:.4g}ms")
        objectives = self._slo.objectives
        if run.error_share > MOST_ERRORS and all(objective.name != "error" for objective in objectives):
            return f"{run.error_share:.1%} errors"
        results = self._slo.judge(run)
        if not results or any(result.value is None for result in results):
            return None
        missed = [(o.name, r.value) for o, r in zip(objectives, results, strict=True) if not r.met]
        return ", ".join(f"{name} is {value_text(name, value)}" for name, value in missed)


# ---- the loads of a plan, one after another: nothing here sends requests, because `measure` is an argument

_CLEAR: Final = "\r\x1b[K"  # the line of a terminal


class BenchSession(Struct, kw_only=True):
    """The options of `penstock bench` and the measurements so far. With `as_json` nothing is printed before the end."""

    plan: LoadPlan
    slo: Slo
    origin: Origin
    results: Results | None = None
    warm_s: float | None = None
    timeout_s: float | None = None
    as_json: bool = False
    expect: Expectation | None = None
    runs: list[Measurement] = []
    found: list[str] = []

    async def send(self, target: Target, requests: list[bytes]) -> None:
        """Runs the plan. If cancelled, it has stored the partial result of the current run."""
        with _progress(quiet=self.as_json) as show:

            async def one(load: Load, repeat: int) -> Measurement:
                run = await measure(
                    target,
                    requests,
                    load,
                    slo=self.slo,
                    warm_s=self.warm_s,
                    repeat=repeat,
                    check=check_of(target, self.expect),
                    timeout_s=self.timeout_s,
                    on_progress=lambda seconds, answered: show(load, seconds, answered),
                    on_partial=self.store,
                )
                self.store(run)
                return run

            async for text in run_plan(self.plan, self.slo, one):
                self.found.append(text)

    def store(self, run: Measurement) -> None:
        self.runs.append(run)
        if self.results is not None:
            self.results.append(run)
        if not self.as_json:
            repeat = f" #{run.repeat + 1}" if self.plan.repeat > 1 else ""
            click.echo(_CLEAR * sys.stderr.isatty() + f"{run.load.label}{repeat}: {in_a_line(run)}", err=True)

    def print(self) -> None:
        if self.as_json:
            found = {"origin": self.origin, "measurements": self.runs, "found": self.found}
            click.echo(json_text(found), nl=False)
        elif self.runs:
            points, judged = group_by_load(self.runs), self.slo.objectives and self.plan.mode in ("closed", "open")
            verdict = load_verdict(points, self.slo.text) if judged else map(Paragraph, self.found)
            blocks = [table(LOADS, points), Paragraph(self._agreement()), *verdict, *findings(points, self.origin)]
            click.echo(as_text(blocks))

    def _agreement(self) -> str:
        """How many responses differ from the expected ones; "" without --expect."""
        if self.expect is None:
            return ""
        wrong, of = sum(run.errors.get("wrong", 0) for run in self.runs), sum(run.requests for run in self.runs)
        first = f"; the first: {self.expect.first}" if self.expect.first else ""
        return f"{wrong:,} of {of:,} responses differ from --expect{first}"

    def close(self) -> None:
        """Writes the summary and the report, if results are stored."""
        if self.results is None:
            return
        self.results.close()
        if self.runs:
            report, page = publish(self.results.folder)
            click.echo(f"written: {report} and {page}", err=True)

    def code(self) -> int:
        """The exit status: whether all runs are valid and meet the SLO, or a search found its result."""
        if self.expect is not None and self.expect.first:
            return FAILED
        if self.plan.mode in ("ramp", "saturate"):
            known = self.found and all(text.startswith(("knee", "saturates")) for text in self.found)
            return 0 if known else FAILED
        if not self.runs or any(run.invalid or not run.answered for run in self.runs):
            return FAILED
        return FAILED if self.slo.objectives and not all(run.met for run in self.runs) else 0


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[Load, float, int], None]]:
    """Shows load, seconds and responses on a terminal; written directly, because a drawing thread would delay the
    generator."""
    if quiet or not sys.stderr.isatty():
        yield lambda load, seconds, answered: None
        return

    def show(load: Load, seconds: float, answered: int) -> None:
        length = f" of {load.seconds:g}" if load.seconds else ""
        sys.stderr.write(f"{_CLEAR}{load.label}: {seconds:.1f}{length} s, {answered:,} responses")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write(_CLEAR)
