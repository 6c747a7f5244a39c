"""What one run of load saw, as it is kept: latencies, errors, the generator's own health, and the server's side."""

from __future__ import annotations

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


class Generator(Struct, frozen=True, kw_only=True):
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


class ServerSide(Struct, frozen=True, kw_only=True):
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


class Clause(Struct, frozen=True, kw_only=True):
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
    generator: Generator = Generator()
    server: ServerSide | None = None
    slo: list[Clause] = field(default_factory=list)
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
