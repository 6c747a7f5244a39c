"""The result of one run of load as it is stored, SLOs, the repeats of a load grouped, and the verdict of a search.

Pure."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Literal

from msgspec import Struct, field

from penstock.errors import ConfigError
from penstock.values import TIME_UNITS

# For an SLO that does not limit errors: a server that rejects most requests responds quickly to the others.
MOST_ERRORS = 0.01
SCHEMA = 1  # of all files in a results folder


class Load(Struct, frozen=True, kw_only=True):
    """How requests arrive. In a closed loop each of `concurrency` clients sends after its last response; in an open
    loop requests arrive at `rate` per second, spaced by `arrival`, whatever the server does. The load ends after
    `seconds`, or after `requests` if that is not 0. An open loop keeps `connections` ready."""

    mode: Literal["closed", "open"]
    concurrency: int = 0
    rate: float = 0.0
    arrival: str = "poisson"
    seconds: float = 0.0
    requests: int = 0
    seed: int = 0
    connections: int = 256

    @property
    def label(self) -> str:
        """The name in tables: "64 clients", "500/s poisson", "trace:FILE" at its own times."""
        if self.mode == "closed":
            return f"{self.concurrency} client{'s' * (self.concurrency != 1)}"
        return f"{self.rate:g}/s {self.arrival}" if self.rate else self.arrival


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds, over good responses and timeouts; a timeout counts with the time waited. None: too few samples.

    An open loop counts from the *intended* send time: a server stall delays every request that arrives during it.
    `p99_low_s` and `p99_high_s` bound the p99 with 95 % confidence, by order statistics.
    """

    mean_s: float | None = None
    p50_s: float | None = None
    p75_s: float | None = None
    p90_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    p999_s: float | None = None
    max_s: float | None = None
    p99_low_s: float | None = None
    p99_high_s: float | None = None


class GeneratorHealth(Struct, frozen=True, kw_only=True):
    """The load generator's share of one core, and the share of requests that an open loop sent over 1 ms late."""

    cpu: float = 0.0
    late_share: float = 0.0
    late_p99_s: float = 0.0


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU during the run: mean utilization from 0 to 1, peak memory of all processes, and total memory."""

    name: str
    utilization: float
    memory_bytes: int
    total_bytes: int = 0


class ServerStats(Struct, frozen=True, kw_only=True):
    """The server's side of a run; None where the server reports nothing.

    `queue_s` is the mean wait of a request; `preprocess_s`, `run_s` (the model itself) and `postprocess_s` are means
    per batch. `queue_at_s` and `worker_at_s` (the worker's whole time per batch) map "p50", "p90" and "p99" to seconds,
    interpolated in the server's histograms. `batches` maps an upper bound of rows to the number of batches up to it and
    above the next smaller bound. `cpu` counts cores over all processes of the server. `memory_bytes` is the peak of
    their summed resident sets: a shared page counts once per process.
    """

    queue_s: float | None = None
    preprocess_s: float | None = None
    run_s: float | None = None
    postprocess_s: float | None = None
    queue_at_s: dict[str, float] = field(default_factory=dict)
    worker_at_s: dict[str, float] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    mean_batch: float | None = None
    cpu: float | None = None
    memory_bytes: int | None = None
    gpus: list[Gpu] = field(default_factory=list)


class ObjectiveResult(Struct, frozen=True, kw_only=True):
    """One objective of an SLO as measured; `met` is None with too few samples."""

    text: str
    value: float | None
    met: bool | None

    @property
    def name(self) -> str:
        """What the objective limits, such as "p99"."""
        return re.split(r"\s*[<>]", self.text)[0]


class Measurement(Struct, frozen=True, kw_only=True):
    """One run. `errors` counts failed requests by status code ("503") or word ("lost", "timeout", "refused").

    `requests` counts requests in the counted time (after the warm-up), `answered` the good responses among them;
    `throughput` is good responses per second, `goodput` those within the latency objective; `too_slow` of `answered`
    exceeded it. `histogram` holds the latencies as an HDR histogram in microseconds (V2 compressed, base64). Each text
    of `invalid` says why the run measures nothing about the server; `caveats` qualify a valid run.
    """

    load: Load
    label: str = ""
    repeat: int = 0
    started: str = ""
    seconds: float = 0.0
    requests: int = 0
    answered: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    first_error: str | None = None
    throughput: float = 0.0
    goodput: float | None = None
    too_slow: int | None = None
    latency: Latency = Latency()
    histogram: str = ""
    generator: GeneratorHealth = GeneratorHealth()
    server: ServerStats | None = None
    slo: list[ObjectiveResult] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)

    @property
    def error_share(self) -> float:
        return sum(self.errors.values()) / self.requests if self.requests else 0.0

    @property
    def met(self) -> bool | None:
        """Whether the run met the SLO; None without an SLO or with too few samples. More than 1 % errors miss an SLO
        that does not limit errors."""
        if self.invalid or not self.slo or any(result.met is None for result in self.slo):
            return None
        if self.error_share > MOST_ERRORS and not any(result.name == "error" for result in self.slo):
            return False
        return all(result.met for result in self.slo)


# ---- figures of a measurement

Figure = Callable[[Measurement], float | None]


def throughput(m: Measurement) -> float | None:
    """Good responses per second."""
    return m.throughput


def goodput(m: Measurement) -> float:
    """Goodput per second if known, else throughput."""
    return m.throughput if m.goodput is None else m.goodput


def p99(m: Measurement) -> float | None:
    """Seconds."""
    return m.latency.p99_s


def server_stats(m: Measurement) -> ServerStats:
    """The server's side; empty if unknown."""
    return m.server or ServerStats()


def _of(path: str) -> Figure:
    """A figure of the server or of the latency; None if it is unknown."""
    side, name = path.split(".")
    return lambda m: getattr(getattr(m, side), name, None)


STAGES: Final = {name: _of(f"server.{name}_s") for name in ("queue", "preprocess", "run", "postprocess")}
FIGURES: Final[dict[str, Figure]] = {
    "error_share": lambda m: m.error_share,
    "throughput_per_s": throughput,
    "goodput_per_s": lambda m: m.goodput,
    **{name: _of(f"latency.{name}") for name in Latency.__struct_fields__},
    **{f"{name}_s": figure for name, figure in STAGES.items()},
    "mean_batch": _of("server.mean_batch"),
    "cpu_cores": _of("server.cpu"),
    "memory_bytes": _of("server.memory_bytes"),
}
"""By their names in summary.csv."""


# ---- repeats


class LoadPoint(Struct, frozen=True, kw_only=True):
    """One load on one configuration: `runs` are the valid repeats, `invalid` the others."""

    label: str
    load: Load
    runs: list[Measurement]
    invalid: list[Measurement]

    @property
    def name(self) -> str:
        """The name in sentences: "batch=8 at 64 clients"."""
        return f"{self.label} at {self.load.label}" if self.label else self.load.label

    def values(self, figure: Figure) -> list[float]:
        return [value for run in self.runs if (value := figure(run)) is not None]

    def median(self, figure: Figure) -> float | None:
        """The median over the valid repeats; None unless all of them have the figure."""
        values = self.values(figure)
        return statistics.median(values) if values and len(values) == len(self.runs) else None

    @property
    def met(self) -> bool | None:
        """Whether every valid repeat met the SLO; None if none missed it and one has too few samples."""
        each = [run.met for run in self.runs]
        if not each or any(met is False for met in each):
            return False if each else None
        return None if None in each else True

    @property
    def errors(self) -> dict[str, int]:
        found = Counter[str]()
        for run in self.runs:
            found.update(run.errors)
        return dict(sorted(found.items()))


def group_by_load(measurements: Iterable[Measurement]) -> list[LoadPoint]:
    """The points in the order of their first measurement."""
    found: dict[tuple[str, str], LoadPoint] = {}
    for m in measurements:
        key = (m.label, m.load.label)
        if key not in found:
            found[key] = LoadPoint(label=m.label, load=m.load, runs=[], invalid=[])
        (found[key].invalid if m.invalid else found[key].runs).append(m)
    return list(found.values())


def parse_label(label: str) -> dict[str, str]:
    """The settings in a label: "batch=8,instances=2" -> {"batch": "8", "instances": "2"}."""
    return dict(part.split("=", 1) for part in label.split(",") if "=" in part)


# ---- the result of a search


class RunnerUp(Struct, frozen=True, kw_only=True):
    """Settings that were not chosen, and the reason in words, with numbers."""

    settings: str
    why: str


class SearchStep(Struct, frozen=True, kw_only=True):
    """One step of a search: settings, their goodput (None: ruled out unmeasured), whether they met the SLO, and the
    seconds of measuring until then."""

    settings: str
    goodput: float | None = None
    met: bool | None = None
    elapsed_s: float = 0.0


class Verdict(Struct, frozen=True, kw_only=True):
    """The result of tuning. Settings are canonical text, "batch=8,instances=2", as in `Measurement.label`.

    With `met` false no settings met the SLO and `chosen` comes nearest ("": nothing was measured). With `proven` false
    the search ended before repeats confirmed the choice. `gain` is the relative gain over `default` (0.4: 40 % more),
    within `interval` with 95 % confidence; None if the default has no goodput. `command` reproduces the search.
    `cost_per_million` is the price of a million requests in the unit of --price. `table` has a heading and one row per
    settings.
    """

    slo: str
    chosen: str
    default: str
    met: bool = True
    proven: bool = True
    goodput: float | None = None
    default_goodput: float | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    command: str = ""
    cost_per_million: float | None = None
    runners_up: list[RunnerUp] = field(default_factory=list)
    trajectory: list[SearchStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)


# ---- SLOs, such as "p99<=100ms,error<=0.1%"

_TAIL: Final = ("p99", "p99.9", "max")
_NAMES: Final = ("mean", "p50", "p75", "p90", "p95", *_TAIL, "error", "throughput")  # latencies in ascending strictness
_OBJECTIVE: Final = re.compile(r"\s*([a-z0-9.]+)\s*(<=|<|>=|>)\s*([0-9]*\.?[0-9]+)\s*(us|ms|s|%|/s|)\s*", re.ASCII)


class Objective(Struct, frozen=True):
    """One condition. `limit` is in seconds, a share from 0 to 1, or requests per second."""

    name: str
    limit: float
    at_least: bool
    text: str

    @property
    def is_latency(self) -> bool:
        return self.name not in ("error", "throughput")

    def met_by(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


class Slo(Struct, frozen=True):
    """Objectives that must all be met; an empty SLO is always met."""

    objectives: tuple[Objective, ...] = ()

    @property
    def text(self) -> str:
        """The text that `parse_slo` reads."""
        return ",".join(objective.text for objective in self.objectives)

    @property
    def bounds(self) -> tuple[Objective, ...]:
        """All but the throughput, which a lower rate than the required one cannot reach."""
        return tuple(objective for objective in self.objectives if objective.name != "throughput")

    @property
    def latency_s(self) -> float | None:
        """The latency up to which a request counts as goodput; None without a latency objective.

        The tightest objective that binds nearly all requests; without one, the limit of the highest percentile, because
        half of all requests may exceed a median.
        """
        latencies = sorted((o for o in self.objectives if o.is_latency), key=lambda o: _NAMES.index(o.name))
        tail = [o.limit for o in latencies if o.name in _TAIL]
        return min(tail or [o.limit for o in latencies[-1:]], default=None)

    def judge(self, run: Measurement) -> list[ObjectiveResult]:
        values = [(o, measured_value(o.name, run)) for o in self.objectives]
        return [ObjectiveResult(text=o.text, value=v, met=None if v is None else o.met_by(v)) for o, v in values]


def measured_value(name: str, run: Measurement) -> float | None:
    """The value of an objective in a run; None with too few samples."""
    if name == "error":
        return run.error_share if run.requests else None
    return run.throughput if name == "throughput" else FIGURES[f"{name.replace('.', '')}_s"](run)


def parse_slo(text: str) -> Slo:
    """The SLO of a text: objectives joined by commas, each NAME<=LIMIT. Raises ConfigError.

    NAME is mean, p50, p75, p90, p95, p99, p99.9 or max (us, ms or s), error (% or a share), or throughput (>=, /s).
    """
    objectives = tuple(_objective(part) for part in text.split(",") if part.strip())
    if not objectives:
        raise ConfigError(f'SLO "{text}" is empty; expected for instance "p99<=100ms,error<=0.1%"')
    if len({objective.name for objective in objectives}) < len(objectives):
        raise ConfigError(f'SLO "{text}" names the same thing twice')
    return Slo(objectives)


def _objective(text: str) -> Objective:
    found = _OBJECTIVE.fullmatch(text)
    where = f'SLO part "{text.strip()}"'
    if found is None:
        raise ConfigError(f"{where}: expected NAME<=LIMIT, for instance p99<=100ms or error<=0.1%")
    name, sign, number, unit = found.groups()
    if name not in _NAMES:
        raise ConfigError(f'{where}: "{name}" is none of {", ".join(_NAMES)}')
    at_least = sign in (">=", ">")
    if at_least != (name == "throughput"):
        raise ConfigError(f"{where}: {name} takes {'<=' if at_least else '>='}")
    units = ("%", "") if name == "error" else ("/s", "") if name == "throughput" else tuple(TIME_UNITS)
    if unit not in units:
        raise ConfigError(f"{where}: expected {' or '.join(u or 'no unit' for u in units)}")
    limit = float(number) * (0.01 if unit == "%" else TIME_UNITS.get(unit, 1.0))
    if limit <= 0 and name != "error":
        raise ConfigError(f"{where}: the limit must be over 0")
    return Objective(name, limit, at_least, text.strip())
