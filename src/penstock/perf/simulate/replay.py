"""Replays arrivals through each policy and batch size: the real scheduler in virtual time."""

import itertools
import math
import os
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec
from msgspec import Struct, field

from penstock.config.schema import BatchingConfig, check_sizes
from penstock.core.batching.ladder import Sizes, ladder_of
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.engine.rules import policy_of
from penstock.errors import ConfigError, nearest
from penstock.perf.bench.document import as_text, number, percent, seconds, table
from penstock.perf.bench.figures import latency_of
from penstock.perf.bench.measurement import Latency, Load, Measurement, ObjectiveResult, Slo, parse_slo
from penstock.perf.bench.report import MET
from penstock.perf.bench.workload import parse_arrival, read_trace, times
from penstock.perf.simulate.simulator import WARM, OpenLoop, ServiceTime, SimulationSettings, simulate
from penstock.perf.tune.space import parse_space
from penstock.values import TIME_UNITS, quantity

TIMEOUT_S: Final = 30.0  # the configuration's default; here no request expires
DEPTH: Final = 2  # process workers receive one batch ahead
KEEPS_UP: Final = 0.97  # of the offered rate: with less throughput the queue grows without bound
SECONDS: Final = 30.0


class PolicyChoice(Struct, frozen=True):
    """A batching policy by name, with its longest hold if one was given."""

    name: str
    max_hold_s: float | None = None

    @property
    def text(self) -> str:
        """The form that `parse_policies` reads."""
        return self.name if self.max_hold_s is None else f"{self.name}:{self.max_hold_s * 1e3:g}ms"

    def make(self) -> BatchPolicy:
        """A new policy; a policy learns, so each simulation needs its own."""
        hold: float | Literal["auto"] = "auto" if self.max_hold_s is None else self.max_hold_s
        return policy_of(BatchingConfig(policy=self.name, max_hold_s=hold, timeout_s=TIMEOUT_S))


class ReplayResult(Struct, frozen=True, kw_only=True):
    """The result of one combination. `offered` and `throughput` are requests per second, `capacity` is the rows per
    second of full batches, `busy` the share of the instances' time, `wait_s` the mean wait of a request. Batches were
    padded to the `sizes`, if there are any. `padding` is the share of the tokens that ran, with lengths."""

    policy: str
    batch: int
    instances: int
    offered: float
    throughput: float
    capacity: float
    goodput: float | None
    latency: Latency
    mean_batch: float
    busy: float
    wait_s: float | None = None
    sizes: tuple[int, ...] = ()
    padding: float | None = None
    slo: list[ObjectiveResult] = field(default_factory=list)

    @property
    def keeps_up(self) -> bool:
        """Whether the queue stays bounded. The throughput leaves out responses after the last arrival; the goodput has
        them if they meet the SLO."""
        return max(self.throughput, self.goodput or 0.0) >= KEEPS_UP * self.offered

    @property
    def met(self) -> bool | None:
        """Whether it keeps up and meets the SLO; None without an SLO or with too few requests."""
        if not self.slo or any(clause.met is None for clause in self.slo):
            return None
        return self.keeps_up and all(clause.met for clause in self.slo)


def parse_duration(text: str) -> float:
    """Seconds of "5ms", "200us" or "0.1s". Raises ConfigError."""
    found = quantity(text, TIME_UNITS)
    if found is None:
        raise ConfigError(f'"{text}" is no time; expected a number with us, ms or s, for instance 5ms')
    return found


def parse_cost(text: str) -> tuple[float, float]:
    """(a, b) of "5ms,0.2ms": seconds per batch, and per row in it. Raises ConfigError."""
    parts = text.split(",")
    if len(parts) != 2:
        raise ConfigError(f'cost "{text}": expected A,B for batches that take A + B x rows, for instance 5ms,0.2ms')
    a, b = (parse_duration(part) for part in parts)
    if a + b <= 0:
        raise ConfigError(f'cost "{text}": a batch that takes no time needs no policy')
    return a, b


def parse_policies(text: str) -> list[PolicyChoice]:
    """The distinct policies of "adaptive,fixed:5ms,none"; a delay is the longest hold. Raises ConfigError."""
    found = []
    for piece in text.split(","):
        name, _, delay = piece.strip().partition(":")
        policy = PolicyChoice(name, parse_duration(delay) if delay else None)
        policy.make()
        if delay and name == "none":
            raise ConfigError(f'policy "{piece}": none holds nothing; expected none without a delay')
        found.append(policy)
    return list(dict.fromkeys(found))


def combinations(
    policies: Sequence[PolicyChoice], batches: Sequence[int], instances: Sequence[int]
) -> Iterator[tuple[PolicyChoice, int, int]]:
    """Each (policy, batch size, instances). The policy `none` ignores the batch size and so appears once."""
    for count, policy in itertools.product(instances, policies):
        for batch in batches if policy.name != "none" else (1,):
            yield policy, batch, count


def replay(
    load: OpenLoop,
    service: ServiceTime,
    slo: Slo,
    policy: PolicyChoice,
    batch: int,
    instances: int,
    *,
    sizes: Sizes = None,
    max_tokens: int | None = None,
    handover_s: float = 0.0,
    seed: int = 0,
) -> ReplayResult:
    """The result of one combination. Many parameters: the first three are the question, the next four the combination.

    The server rejects and expires nothing, so overload shows as latency.
    """
    arrivals = load.arrivals
    start = WARM * arrivals[-1]  # the throughput counts from here, too
    span = arrivals[-1] - start
    offered = (len(arrivals) - bisect_left(arrivals, start)) / span if span > 0 else 0.0
    ladder = ladder_of(sizes, batch)
    settings = SimulationSettings(
        slots=instances, depth=DEPTH, handover_s=handover_s, max_batch_size=batch, slo_s=slo.latency_s, seed=seed,
        sizes=() if ladder is None else ladder.sizes, lengths=bool(load.lengths), max_tokens=max_tokens,
    )  # fmt: skip
    found = simulate(service, policy.make(), load, settings)
    latency, count = latency_of(found.latencies_s), len(found.latencies_s)
    run = Measurement(
        load=Load(mode="open", rate=offered), requests=count, throughput=found.throughput, latency=latency
    )
    return ReplayResult(
        policy=policy.text,
        batch=batch,
        instances=instances,
        offered=offered,
        throughput=found.throughput,
        capacity=service.capacity(instances, *load.full_batch(batch, max_tokens)),
        goodput=None if slo.latency_s is None else found.goodput,
        latency=latency,
        mean_batch=found.mean_batch,
        busy=found.busy,
        sizes=settings.sizes,
        padding=found.padding if load.lengths else None,
        wait_s=None if latency.mean_s is None else max(0.0, latency.mean_s - found.run_s - handover_s),
        slo=slo.judge(run),
    )


def best(results: Sequence[ReplayResult]) -> ReplayResult | None:
    """The cheapest result that meets the SLO: fewest instances, then the lowest p99. Without an SLO the lowest p99 of
    all that keep up. None if there is none."""

    def cost(one: ReplayResult) -> tuple[int, float]:
        p99_s = one.latency.p99_s
        return (one.instances if one.slo else 0, math.inf if p99_s is None else p99_s)

    eligible = (one for one in results if (one.met if one.slo else one.keeps_up and one.latency.p99_s is not None))
    return min(eligible, key=cost, default=None)


# ---- the command


def run_simulation(flags: dict[str, Any]) -> int:
    """Runs `penstock simulate` and returns its exit status. Raises ConfigError."""
    slo = parse_slo(flags["slo"]) if flags["slo"] else Slo()
    service = ServiceTime(*parse_cost(flags["cost"]), flags["jitter"], 0.0)
    handover_s, sizes = parse_duration(flags["handover"]), parse_sizes(flags["sizes"])
    each = combinations(
        parse_policies(flags["policies"]), read_batches(flags["batch"], sizes, "1..64"),
        whole_numbers("instances", flags["instances"]),
    )  # fmt: skip
    load, note = read_arrivals(flags)
    results: list[ReplayResult] = []
    if not flags["as_json"]:
        click.echo(f"{describe(flags['arrivals'], load)}{note}", err=True)
    for combination in each:
        more = {"sizes": sizes, "max_tokens": flags["max_tokens"], "handover_s": handover_s, "seed": flags["seed"]}
        result = replay(load, service, slo, *combination, **more)
        results.append(result)
        if flags["as_json"]:
            click.echo(msgspec.json.encode(result))
    if not flags["as_json"]:
        click.echo("\n".join(_table(results)))
    return 0


def whole_numbers(name: str, text: str) -> list[int]:
    """The values of a flag such as 1..8 or 1,2,4. Raises UsageError, ConfigError."""
    values = parse_space(f"{name}={text}").parameters[0].values
    if not all(isinstance(value, int) for value in values):
        raise click.UsageError(f"--{name}: expected whole numbers such as 1..8 or 1,2,4, found '{text}'")
    return [value for value in values if isinstance(value, int)]


def parse_sizes(text: str) -> Sizes:
    """The value of the key `sizes`: any, auto, or numbers such as 1,8,32. Raises ConfigError."""
    if text in ("any", "auto"):
        return "auto" if text == "auto" else "any"
    sizes = tuple(int(size) if size.strip().isdecimal() else size for size in text.split(","))
    check_sizes(BatchingConfig(sizes=sizes), "--")  # type: ignore[arg-type]
    return sizes  # type: ignore[return-value]


def read_batches(text: str | None, sizes: Sizes, default: str) -> list[int]:
    """The largest batches to try; by default those of a list of sizes. Raises ConfigError, UsageError."""
    if not isinstance(sizes, tuple):
        return whole_numbers("batch", text or default)
    batches = list(sizes) if text is None else whole_numbers("batch", text)
    if other := next((batch for batch in batches if batch not in sizes), None):
        raise ConfigError(f"--batch {text}: {other} is none of the sizes {', '.join(map(str, sizes))}")
    return batches


def read_arrivals(
    flags: dict[str, Any], usual_s: Callable[[float], float] = lambda rate: SECONDS
) -> tuple[OpenLoop, str]:
    """The arrivals and lengths of the flags, and a remark on their file or "".

    Synthetic ones at `rate` last `usual_s(rate)`, unless a time is given. Raises ConfigError.
    """
    load, remark = _read_arrivals(flags, usual_s)
    text, most = flags["lengths"], flags["max_tokens"]
    if text is None:
        if most is not None:
            raise ConfigError(f"--max-tokens {most}: it bounds batches of rows with --lengths, which are not given")
        return load, remark
    lengths = read_lengths(text, len(load.arrivals), flags["seed"])
    if most is not None and max(lengths) > most:
        raise ConfigError(f"--max-tokens {most}: a row has {max(lengths)} tokens, and no batch may hold it")
    return OpenLoop(load.arrivals, load.rows, lengths), remark


def read_lengths(text: str, count: int, seed: int) -> list[int]:
    """Lengths of `count` rows: drawn from the lines of a file, or log-normal from LEAST to MOST for "LEAST..MOST".

    Three of the distribution's standard deviations lie on either side of the geometric mean. Raises ConfigError.
    """
    rng = random.Random(seed)
    least, dots, most = text.partition("..")
    if dots and least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most):
        low, high = math.log(int(least)), math.log(int(most))
        draws = (rng.gauss((low + high) / 2, (high - low) / 6) for _ in range(count))
        return [round(math.exp(min(high, max(low, x)))) for x in draws]
    try:
        known = [int(line) for line in Path(text).read_text().split()]
    except (OSError, ValueError):
        known = []
    if not known or min(known) < 1:
        raise ConfigError(f'lengths "{text}": expected LEAST..MOST tokens such as 8..256, or a file of whole numbers')
    return rng.choices(known, k=count)


def _read_arrivals(flags: dict[str, Any], usual_s: Callable[[float], float]) -> tuple[OpenLoop, str]:
    text = flags["arrivals"]
    kind, _, rate_text = text.rpartition(":")
    known = ("poisson", "constant", "gamma")
    if (first := text.partition(":")[0]) not in known:
        if not os.path.exists(text):
            raise ConfigError(
                f'arrivals "{text}": there is no such file; expected a file of `penstock serve --record`,'
                f" poisson:RATE, constant:RATE or gamma:CV:RATE{nearest(first, known)}"
            )
        trace = read_trace(text, flags["model"])
        if len(trace.models) > 1 and not flags["model"]:
            raise ConfigError(f"{text} has requests for {', '.join(trace.models)}; name one with --model")
        rate, duration = flags["rate"] or 0.0, flags["duration"] or 0.0
        arrivals = times(parse_arrival(f"trace:{text}"), rate, duration, 0, trace.times_s)
        remark = f"; {trace.unsorted:,} lines were out of order" if trace.unsorted else ""
        return OpenLoop(arrivals, trace.rows[: len(arrivals)]), remark
    if flags["rate"] or flags["model"]:
        raise ConfigError(f"--rate and --model are for a file of arrivals; found {text}")
    try:
        rate = float(rate_text)
    except ValueError:
        raise ConfigError(f'arrivals "{text}": expected a rate after the kind, for instance poisson:500') from None
    duration = flags["duration"] or (usual_s(rate) if rate > 0 else SECONDS)
    arrivals = times(parse_arrival(kind), rate, duration, flags["seed"])
    if not arrivals:
        raise ConfigError(f'arrivals "{text}": no request arrives within {duration:g} s; raise the rate or the time')
    return OpenLoop(arrivals), ""


def describe(text: str, load: OpenLoop) -> str:
    """The arrivals that `text` names, in figures."""
    count, last_s = len(load.arrivals), load.arrivals[-1]
    rows = sum(load.rows) / count if load.rows else 1.0
    mean = f"{number(count / last_s)}/s in the mean" if last_s > 0 else "at once"
    tokens = f" of {sum(load.lengths) / count:.3g} tokens" if load.lengths else ""
    return f"{text}: {count:,} requests in {number(last_s)} s, {mean}, {rows:.3g} row{'s' * (rows != 1)}{tokens} each"


def _table(results: Sequence[ReplayResult]) -> Iterator[str]:
    """A line for each combination, then the best."""
    yield as_text([table(COLUMNS | (LENGTHS if results[0].padding is not None else {}), results)])
    first = best(results)
    slo = ",".join(objective.text for objective in results[0].slo)
    if first is not None:
        why = f"meets {slo} with the fewest instances" if slo else "keeps up with the lowest p99"
        yield f"{first.policy}, {first.instances} x {first.batch}: {why}"
    elif any(one.keeps_up and one.met is None for one in results):
        yield "too few requests to choose the best; use a longer time or a higher rate to get some hundreds"
    else:
        yield f"none of them meets {slo}" if slo else "none of them keeps up"


def _judged(one: ReplayResult) -> str:
    if not one.keeps_up:
        return "does not keep up"
    return MET[one.met] if one.slo else ""


COLUMNS: Final[dict[str, Callable[[ReplayResult], str]]] = {
    "policy": lambda one: one.policy,
    "instances": lambda one: f"{one.instances:,}",
    "batch": lambda one: f"{one.batch}",
    "answered/s": lambda one: number(one.throughput),
    "p50": lambda one: seconds(one.latency.p50_s),
    "p99": lambda one: seconds(one.latency.p99_s),
    "p99.9": lambda one: seconds(one.latency.p999_s),
    "mean batch": lambda one: f"{one.mean_batch:.1f}",
    "busy": lambda one: percent(one.busy),
    "wait": lambda one: seconds(one.wait_s),
    "SLO": _judged,
}
LENGTHS: Final[dict[str, Callable[[ReplayResult], str]]] = {"padding": lambda one: percent(one.padding or 0.0)}
