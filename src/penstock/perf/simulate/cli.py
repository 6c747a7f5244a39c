"""`penstock simulate`: predicts each policy and batch size on recorded or synthetic arrivals, without a model."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.perf.cli import exit_code, seconds

if TYPE_CHECKING:
    from penstock.perf.bench.arrivals import Trace
    from penstock.perf.simulate.replay import ReplayResult

SECONDS: Final = 30.0
HEADER: Final = (
    "policy", "instances", "batch", "answered/s", "p50 ms", "p99 ms", "p99.9 ms", "mean batch", "busy", "SLO",
)  # fmt: skip


@click.command()
@click.option(
    "--arrivals", required=True, metavar="FILE|KIND:RATE",
    help="A recording of `penstock serve --record`, or poisson:500, constant:500, gamma:2.5:500 requests per second.",
)  # fmt: skip
@click.option("--cost", required=True, metavar="A,B", help="A batch takes A + B x rows, for instance 5ms,0.2ms.")
@click.option(
    "--policies", default="adaptive,fixed:5ms,none", show_default=True, metavar="NAME[:DELAY],...",
    help="adaptive, fixed or none, with the longest hold.",
)  # fmt: skip
@click.option("--batch", default="1..64", show_default=True, metavar="RANGE", help="Largest batches: 1..64, or 8,16.")
@click.option("--instances", default="1", show_default=True, metavar="RANGE", help="How many: 1..8, or 1,2,4.")
@click.option("--slo", metavar="SLO", help='For instance "p99<=100ms".')
@click.option(
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Scale a FILE to this many requests per second."
)
@click.option(
    "--seconds", "duration", callback=seconds, metavar="TIME", help="Length of the arrivals [30s; a FILE: all of it]."
)
@click.option("--model", default="", metavar="NAME", help="The model whose requests to replay, if a FILE has several.")
@click.option("--handover", default="0.5ms", show_default=True, metavar="TIME", help="From queue to worker and back.")
@click.option(
    "--jitter",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="Spread of a batch's time, as a share of it.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of arrivals and jitter.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines and nothing else.")
def simulate(**flags: Any) -> None:
    """Replay arrivals through each batching policy and batch size, in virtual time.

    The scheduler is the one that serves; only time and the model are simulated. Nothing is rejected and nothing
    expires, so overload shows as latency. A server under load learns the cost of a batch: see
    penstock_cost_fixed_seconds and penstock_cost_row_seconds in its metrics.
    """
    sys.exit(exit_code(lambda: _simulate(flags)))


def _simulate(flags: dict[str, Any]) -> int:
    import msgspec

    from penstock.perf.bench.slo import Slo, parse_slo
    from penstock.perf.simulate.replay import (
        Grid,
        ReplayedServer,
        parse_cost,
        parse_duration,
        parse_policies,
        replay,
    )
    from penstock.perf.simulate.simulator import ServiceTime

    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    service = ServiceTime(*parse_cost(flags["cost"]), flags["jitter"], 0.0)
    server = ReplayedServer(service=service, handover_s=parse_duration(flags["handover"]))
    grid = Grid(
        parse_policies(flags["policies"]),
        _numbers("batch", flags["batch"]),
        _numbers("instances", flags["instances"]),
    )
    trace = _arrivals(flags)
    results: list[ReplayResult] = []
    if not flags["as_json"]:
        click.echo(_summary(trace), err=True)
    for result in replay(trace.times_s, server, grid, slo, rows=trace.rows, seed=flags["seed"]):
        results.append(result)
        if flags["as_json"]:
            click.echo(msgspec.json.encode(result))
    if not flags["as_json"]:
        click.echo("\n".join(_table(results)))
    return 0


def _numbers(name: str, text: str) -> list[int]:
    from penstock.perf.tune.space import parse_space

    values = parse_space(f"{name}={text}").parameters[0].values
    if not all(isinstance(value, int) for value in values):
        raise click.UsageError(f"--{name}: expected whole numbers such as 1..8 or 1,2,4, found '{text}'")
    return [value for value in values if isinstance(value, int)]


def _arrivals(flags: dict[str, Any]) -> Trace:
    """The arrivals of the flags. Raises ConfigError."""
    from penstock.errors import ConfigError
    from penstock.perf.bench.arrivals import Trace, parse_arrival, read_trace, times

    text = flags["arrivals"]
    kind, _, rate_text = text.rpartition(":")
    if text.partition(":")[0] not in ("poisson", "constant", "gamma"):
        trace = read_trace(text, flags["model"])
        if len(trace.models) > 1 and not flags["model"]:
            raise ConfigError(f"{text} has requests for {', '.join(trace.models)}; name one with --model")
        rate, duration = flags["rate"] or 0.0, flags["duration"] or 0.0
        arrivals = times(parse_arrival(f"trace:{text}"), rate, duration, 0, trace.times_s)
        return Trace(arrivals, trace.rows[: len(arrivals)], trace.bytes[: len(arrivals)])
    if flags["rate"] or flags["model"]:
        raise ConfigError(f"--rate and --model are for a file of arrivals; found {text}")
    try:
        rate = float(rate_text)
    except ValueError:
        raise ConfigError(f'arrivals "{text}": expected a rate after the kind, for instance poisson:500') from None
    duration = flags["duration"] or SECONDS
    arrivals = times(parse_arrival(kind), rate, duration, flags["seed"])
    if not arrivals:
        raise ConfigError(f'arrivals "{text}": no request arrives within {duration:g} s; raise the rate or the time')
    return Trace(arrivals, array("q"), array("q"))


def _summary(trace: Trace) -> str:
    n, last = len(trace.times_s), trace.times_s[-1]
    rows = sum(trace.rows) / n if trace.rows else 1.0
    return f"{n:,} requests in {last:,.4g} s, {rows:.3g} rows each"


def _table(results: Sequence[ReplayResult]) -> Iterator[str]:
    """A line for each combination, then the best."""
    from penstock.perf.bench.document import align
    from penstock.perf.simulate.replay import best

    yield from align([HEADER, *(_cells(one) for one in results)])
    first = best(results)
    slo = ",".join(clause.text for clause in results[0].slo)
    if first is None:
        if any(one.keeps_up and one.met is None for one in results):
            yield "too few requests to choose the best; use a longer time or a higher rate to get some hundreds"
        else:
            yield f"none of them meets {slo}" if slo else "none of them keeps up"
        return
    why = f"meets {slo} with the fewest instances" if slo else "keeps up with the lowest p99"
    yield f"{first.policy}, {first.instances} x {first.batch}: {why}"


def _cells(one: ReplayResult) -> list[str]:
    def ms(value: float | None) -> str:
        return "n/a" if value is None else f"{value * 1e3:,.0f}" if value >= 1 else f"{value * 1e3:.3g}"

    latency = one.latency
    verdict = {True: "met", False: "MISSED", None: "n/a" if one.slo else ""}[one.met]
    if not one.keeps_up:
        verdict = "does not keep up"
    return [
        one.policy,
        str(one.instances),
        str(one.batch),
        f"{one.throughput:,.5g}",
        ms(latency.p50_s),
        ms(latency.p99_s),
        ms(latency.p999_s),
        f"{one.mean_batch:.1f}",
        f"{one.busy:.0%}",
        verdict,
    ]
