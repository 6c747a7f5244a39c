"""What one run of load saw, as it is kept: latencies, errors, the generator's own health, and the server's side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import Struct, field

MOST_ERRORS = 0.01  # where the SLO says nothing of errors
SCHEMA = 1  # of everything that is written to a results folder


class Load(Struct, frozen=True, kw_only=True):
    """How requests come. In a closed loop each of `concurrency` clients sends when its last answer is there; in an open
    loop requests come at `rate` a second, by `arrival`, whatever the server does. Ends after `seconds`, or after
    `requests` when that is not 0. `connections` is how many an open loop holds ready."""

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
        """As it stands in tables: "64 clients", "500/s poisson", "trace:FILE" at its own times."""
        if self.mode == "closed":
            return f"{self.concurrency} client{'s' * (self.concurrency != 1)}"
        return f"{self.rate:g}/s {self.arrival}" if self.rate else self.arrival


class Latency(Struct, frozen=True, kw_only=True):
    """Seconds, of the requests that were answered well, and of those that timed out: these count with the time they
    were waited for. None where there are too few samples to tell.

    In an open loop counted from the *intended* send time, so that a stall of the server counts for all who came in it.
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
    """The health of the load generator: `cpu` is its share of one core, `late_share` that of the sends that left more
    than 1 ms after their time (open loop only)."""

    cpu: float = 0.0
    late_share: float = 0.0
    late_p99_s: float = 0.0


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU during the run: mean utilisation from 0 to 1, most memory in use by anybody, of `total_bytes`."""

    name: str
    utilization: float
    memory_bytes: int
    total_bytes: int = 0


class ServerStats(Struct, frozen=True, kw_only=True):
    """What the server did during the run; None where it does not tell.

    `queue_s`: mean wait of a request. `preprocess_s`, `run_s`, `postprocess_s`: mean of a batch; `run_s` is the model
    itself. `queue_at_s` and `worker_at_s` ("p50", "p90", "p99" -> seconds) are read between the steps of the server's
    histograms: the wait of a request, and all of the worker's time on a batch. `batches`: rows -> how many batches had
    at most so many (and more than the next smaller key). `cpu` counts cores, of all of the server's processes;
    `memory_bytes` is the most that they held together: a page that several share counts for each of them.
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
    """One part of an SLO, as measured: `met` None when there are too few samples to tell."""

    text: str
    value: float | None
    met: bool | None


class Measurement(Struct, frozen=True, kw_only=True):
    """One run. `errors` counts what was no good answer, by status code ("503") or word ("lost", "timeout", "refused").

    `requests` is how many came in the counted time (after the warm-up), `answered` how many of those went well;
    `throughput` is good answers a second, `goodput` those of them that met the latency part of the SLO. `histogram` is
    the latencies as an HDR histogram in microseconds (V2 compressed, base64). With `invalid` not empty the run says
    nothing about the server: each text tells why. `caveats` are what a reader must know of a valid one.
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
    latency: Latency = Latency()
    histogram: str = ""
    generator: GeneratorHealth = GeneratorHealth()
    server: ServerStats | None = None
    slo: list[ObjectiveResult] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)

    @property
    def error_share(self) -> float:
        """Of all requests."""
        return sum(self.errors.values()) / self.requests if self.requests else 0.0

    @property
    def met(self) -> bool | None:
        """Whether the whole SLO was: None if it cannot be told, or there is none. Errors over 1 % break one that does
        not name them."""
        if self.invalid or not self.slo or any(clause.met is None for clause in self.slo):
            return None
        if self.error_share > MOST_ERRORS and not any(clause.text.startswith("error") for clause in self.slo):
            return False
        return all(clause.met for clause in self.slo)


Get = Callable[[Measurement], float | None]


class LoadPoint(Struct, frozen=True, kw_only=True):
    """One load on one configuration. `runs` are the valid repeats, `invalid` the others."""

    label: str
    load: Load
    runs: list[Measurement]
    invalid: list[Measurement]

    @property
    def name(self) -> str:
        """As it stands in sentences: "batch=8 at 64 clients"."""
        return f"{self.label} at {self.load.label}" if self.label else self.load.label

    def values(self, get: Get) -> list[float]:
        """Of each valid repeat that can tell it."""
        return [value for run in self.runs if (value := get(run)) is not None]

    def median(self, get: Get) -> float | None:
        """Over the valid repeats; None when not all of them can tell it."""
        values = self.values(get)
        return statistics.median(values) if values and len(values) == len(self.runs) else None

    @property
    def met(self) -> bool | None:
        """Whether each valid repeat kept the SLO: None when one cannot tell and none missed it."""
        each = [run.met for run in self.runs]
        if not each or any(met is False for met in each):
            return False if each else None
        return None if None in each else True

    @property
    def errors(self) -> dict[str, int]:
        """By code, of all valid repeats together."""
        found: dict[str, int] = {}
        for run in self.runs:
            for code, count in run.errors.items():
                found[code] = found.get(code, 0) + count
        return dict(sorted(found.items()))


def points(measurements: Iterable[Measurement]) -> list[LoadPoint]:
    """In the order in which they were first measured."""
    found: dict[tuple[str, str], LoadPoint] = {}
    for m in measurements:
        key = (m.label, m.load.label)
        if key not in found:
            found[key] = LoadPoint(label=m.label, load=m.load, runs=[], invalid=[])
        (found[key].invalid if m.invalid else found[key].runs).append(m)
    return list(found.values())


def throughput(m: Measurement) -> float | None:
    """Good answers a second."""
    return m.throughput


def worth(m: Measurement) -> float:
    """Goodput where it is known, else throughput, a second."""
    return m.throughput if m.goodput is None else m.goodput


def p99(m: Measurement) -> float | None:
    """Seconds."""
    return m.latency.p99_s


def side(m: Measurement) -> ServerStats:
    """The server's side; one that tells nothing where there is none."""
    return m.server or ServerStats()


def knobs(label: str) -> dict[str, str]:
    """The settings that a label tells: "batch=8,instances=2" -> {"batch": "8", "instances": "2"}."""
    return dict(part.split("=", 1) for part in label.split(",") if "=" in part)


SPLIT: dict[str, Get] = {
    "queue": lambda m: side(m).queue_s,
    "preprocess": lambda m: side(m).preprocess_s,
    "run": lambda m: side(m).run_s,
    "postprocess": lambda m: side(m).postprocess_s,
}


class RunnerUp(Struct, frozen=True, kw_only=True):
    """Settings that were not chosen, and why not: in words, with numbers."""

    settings: str
    why: str


class SearchStep(Struct, frozen=True, kw_only=True):
    """One look of a search: settings, what they were found to bear (good answers a second; None when they were ruled
    out without), whether that was within the SLO, and how long the search had measured when it knew."""

    settings: str
    goodput: float | None = None
    met: bool | None = None
    elapsed_s: float = 0.0


class Verdict(Struct, frozen=True, kw_only=True):
    """What tuning came to. Settings are their canonical text, "batch=8,instances=2", as in `Measurement.label`.

    `met` False: nothing tried keeps the SLO, and `chosen` is only what comes nearest ("": nothing was measured). Not
    `proven`: the search ended before repeats made sure of it.
    `gain` is goodput over that of `default`, less one (0.4: 40 % more), within `interval` with 95 % confidence; None
    where the default has none. `command` reproduces the search, `cost_per_million` is the price of a million requests,
    in the unit of --price. `table` is what each of the settings bore: the heading, then a row each.
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
