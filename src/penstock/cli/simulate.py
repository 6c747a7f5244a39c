"""`penstock simulate`: what each policy and batch size would do with recorded or made-up arrivals, without a model."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.perf.cli import exit_code, seconds

if TYPE_CHECKING:
    from penstock.perf.bench.arrivals import Trace
    from penstock.perf.simulate.replay import Outcome

SECONDS: Final = 30.0
HEADER: Final = (
    "policy", "instances", "batch", "answered/s", "p50 ms", "p99 ms", "p99.9 ms", "mean batch", "busy", "SLO",
)  # fmt: skip


@click.command()
@click.option(
    "--arrivals", required=True, metavar="FILE|KIND:RATE",
    help="What `penstock serve --record` wrote, or poisson:500, constant:500, gamma:2.5:500 requests a second.",
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
    "--rate", type=click.FloatRange(min=0, min_open=True), help="Requests a second that a FILE is stretched to."
)
@click.option("--seconds", "lasts", callback=seconds, metavar="TIME", help="Of arrivals [30s; a FILE whole].")
@click.option("--model", default="", metavar="NAME", help="Whose requests, of a FILE with those of several models.")
@click.option("--handover", default="0.5ms", show_default=True, metavar="TIME", help="From queue to worker and back.")
@click.option(
    "--jitter",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="Spread of the time of a batch, as a share.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of arrivals and of the jitter.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, and nothing else.")
def simulate(**flags: Any) -> None:
    """Replay arrivals through each batching policy and batch size, in virtual time.

    The scheduler is the one that serves; only time and the model are not real. Nothing is refused or given up, so that
    what a setting cannot do shows as latency. The cost of a batch is what a server has learned under load:
    penstock_cost_fixed_seconds and penstock_cost_row_seconds of its metrics.
    """
    sys.exit(exit_code(lambda: _simulate(flags)))


def _simulate(flags: dict[str, Any]) -> int:
    import msgspec

    from penstock.perf.bench.slo import Slo, parse_slo
    from penstock.perf.simulate.replay import Machine, parse_cost, parse_duration, parse_policies, replay
    from penstock.perf.simulate.simulate import Service

    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    a, b = parse_cost(flags["cost"])
    machine = Machine(service=Service(a, b, flags["jitter"], 0.0), handover_s=parse_duration(flags["handover"]))
    policies = parse_policies(flags["policies"])
    batches, instances = _numbers("batch", flags["batch"]), _numbers("instances", flags["instances"])
    trace = _arrivals(flags)
    found: list[Outcome] = []
    if not flags["as_json"]:
        click.echo(_offered(trace), err=True)
    for outcome in replay(trace.times_s, trace.rows, machine, policies, batches, instances, slo, flags["seed"]):
        found.append(outcome)
        if flags["as_json"]:
            click.echo(msgspec.json.encode(outcome))
    if not flags["as_json"]:
        click.echo("\n".join(_table(found)))
    return 0


def _numbers(name: str, text: str) -> list[int]:
    from penstock.perf.tune.space import parse_space

    values = parse_space(f"{name}={text}").knobs[0].values
    if not all(isinstance(value, int) for value in values):
        raise click.UsageError(f"--{name}: expected whole numbers such as 1..8 or 1,2,4, found '{text}'")
    return [value for value in values if isinstance(value, int)]


def _arrivals(flags: dict[str, Any]) -> Trace:
    """Raises ConfigError."""
    from penstock.errors import ConfigError
    from penstock.perf.bench.arrivals import Trace, parse_arrival, read_trace, times

    text = flags["arrivals"]
    kind, _, rate = text.rpartition(":")
    if text.partition(":")[0] not in ("poisson", "constant", "gamma"):
        trace = read_trace(text, flags["model"])
        if len(trace.models) > 1 and not flags["model"]:
            raise ConfigError(f"{text} has requests for {', '.join(trace.models)}; name one with --model")
        arrivals = times(parse_arrival(f"trace:{text}"), flags["rate"] or 0.0, flags["lasts"] or 0.0, 0, trace.times_s)
        return Trace(arrivals, trace.rows[: len(arrivals)], trace.bytes[: len(arrivals)])
    if flags["rate"] or flags["model"]:
        raise ConfigError(f"--rate and --model are for a file of arrivals; found {text}")
    try:
        wanted = float(rate)
    except ValueError:
        raise ConfigError(f'arrivals "{text}": expected a rate behind the kind, for instance poisson:500') from None
    found = times(parse_arrival(kind), wanted, flags["lasts"] or SECONDS, flags["seed"])
    if not found:
        raise ConfigError(f'arrivals "{text}": no request comes in {flags["lasts"] or SECONDS:g} s; raise one of them')
    return Trace(found, array("q"), array("q"))


def _offered(trace: Trace) -> str:
    n, last = len(trace.times_s), trace.times_s[-1]
    rows = sum(trace.rows) / n if trace.rows else 1.0
    return f"{n:,} requests in {last:,.4g} s, {rows:.3g} rows each"


def _table(found: Sequence[Outcome]) -> Iterator[str]:
    """A line a setting, and which is the best."""
    from penstock.perf.bench.document import align
    from penstock.perf.simulate.replay import best

    yield from align([HEADER, *(_cells(one) for one in found)])
    first = best(found)
    slo = ",".join(clause.text for clause in found[0].slo)
    if first is None:
        if any(one.keeps_up and one.met is None for one in found):
            yield "too few requests to tell the best; expected some hundreds, of a longer time or at a higher rate"
        else:
            yield f"none of them meets {slo}" if slo else "none of them keeps up"
        return
    why = f"meets {slo} with the fewest instances" if slo else "keeps up with the lowest p99"
    yield f"{first.policy}, {first.instances} x {first.batch}: {why}"


def _cells(one: Outcome) -> list[str]:
    def ms(value: float | None) -> str:
        return "n/a" if value is None else f"{value * 1e3:,.0f}" if value >= 1 else f"{value * 1e3:.3g}"

    latency = one.latency
    told = {True: "met", False: "MISSED", None: "n/a" if one.slo else ""}[one.met]
    if not one.keeps_up:
        told = "does not keep up"
    figures = [f"{one.throughput:,.5g}", ms(latency.p50_s), ms(latency.p99_s), ms(latency.p999_s)]
    return [one.policy, str(one.instances), str(one.batch), *figures, f"{one.mean_batch:.1f}", f"{one.busy:.0%}", told]
