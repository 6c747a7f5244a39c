"""The figures of a run: percentiles with confidence, throughput, errors, and whether the run is valid. Pure."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import numpy as np
from msgspec import structs

from penstock.errors import ConfigError, install_hint
from penstock.perf.bench.load_run import LOST, REFUSED, TIMED_OUT, UNDER_WAY, WRONG, Samples
from penstock.perf.bench.measurement import GeneratorHealth, Latency, Load, Measurement, ServerStats, Slo
from penstock.plugins import optional_module

# All limits below are choices: a run is rejected rather than believed.
LATE_S: Final = 0.001  # a loop's own timer is this exact; the alarms of the generator are exact to microseconds
MOST_LATE: Final = 0.01  # of the sends: a p99 ignores one request in a hundred
MATTERS: Final = 0.1  # lateness above this share of a latency distorts it
MOSTLY: Final = 0.5  # the largest latency is a single request, so only lateness that explains half of it is noted
CHANCE: Final = 3  # this many late sends prove nothing
HOPELESS: Final = 5  # times the limits of lateness: the beginning of a run decides
MOST_CPU: Final = 0.9  # of a core; above it, the generator may be the bottleneck
CONFIDENCE: Final = 0.95
# Above this sample size the normal approximation of the binomial distribution is used: it is off by two ranks at most.
_EXACT: Final = 50_000

Numbers = np.ndarray[Any, np.dtype[Any]]

SHARES: Final = {"p50_s": 0.5, "p75_s": 0.75, "p90_s": 0.9, "p95_s": 0.95, "p99_s": 0.99, "p999_s": 0.999}
_WORDS: Final = {LOST: "lost", TIMED_OUT: "timeout", REFUSED: "refused", WRONG: "wrong"}
CLOSED: Final = "a closed loop sends nothing while the server is stalled, so it cannot see stalls: use --mode open"
NO_HISTOGRAM: Final = f"no histogram was stored: {install_hint('bench')}"

_LEAST_US: Final = 1
_MOST_US: Final = 3_600_000_000  # an hour
_DIGITS: Final = 3  # as in the tables


# ---- histograms: HDR, microseconds, V2 compressed, base64


def encode(latencies_s: Sequence[float]) -> str:
    """The histogram; "" without the library (the extra `bench`). More than an hour counts as an hour."""
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        return ""
    histogram = HdrHistogram(_LEAST_US, _MOST_US, _DIGITS)
    us = np.clip(np.rint(np.asarray(latencies_s, float) * 1e6), _LEAST_US, _MOST_US)
    for value, count in zip(*np.unique(us, return_counts=True), strict=True):
        histogram.record_value(int(value), int(count))
    return str(histogram.encode().decode("ascii"))


def decode(text: str) -> list[tuple[float, int]]:
    """Ascending (seconds, count). Raises ConfigError for an invalid histogram or without the library."""
    library = optional_module("hdrh.histogram", "reading histograms needs hdrhistogram", "bench")
    try:
        histogram = library.HdrHistogram.decode(text)
    except Exception as exc:  # the library's own, zlib's, base64's and ctypes'
        raise ConfigError(f"no HDR histogram: found {text[:20]!r}..., expected V2 in base64 ({exc})") from None
    found = ((x.value_iterated_to * 1e-6, x.count_at_value_iterated_to) for x in histogram.get_recorded_iterator())
    return [(seconds, int(count)) for seconds, count in found if math.isfinite(seconds)]


# ---- percentiles


def percentile(ordered: Sequence[float], q: float) -> float:
    """The nearest-rank percentile `q` of sorted values; NaN without values."""
    return ordered[max(0, math.ceil(len(ordered) * q - 1e-9) - 1)] if ordered else math.nan


def enough(count: int, q: float) -> bool:
    """Whether `count` samples suffice for the percentile: at least one must lie beyond it."""
    return count * (1 - q) >= 1 - 1e-9


def interval_p99(ordered: Sequence[float]) -> tuple[float | None, float | None]:
    """The bounds of the p99 with 95 % confidence; None where the samples are too few.

    By order statistics: the number of n samples below the true p99 is binomial, whatever the distribution. This assumes
    independent samples. Requests delayed by one stall are not, so the repeats of a run are better evidence.
    """
    n = len(ordered)
    few, many = _beyond_p99(n)
    low = ordered[n - 1 - many] if many < n else None
    high = ordered[n - few] if few >= 1 else None
    return low, high


def _beyond_p99(n: int) -> tuple[int, int]:
    """(few, many): fewer than `few`, or more than `many`, of n samples exceed the p99 with probability 2.5 % each."""
    tail, share = (1 - CONFIDENCE) / 2, 0.01
    if n > _EXACT:
        spread = statistics.NormalDist(n * share, math.sqrt(n * share * (1 - share)))
        return math.floor(spread.inv_cdf(tail)), math.ceil(spread.inv_cdf(1 - tail))
    few = many = 0
    chance = below = (1 - share) ** n
    while below < 1 - tail:
        many += 1
        if below <= tail:
            few = many
        chance *= (n - many + 1) / many * share / (1 - share)
        below += chance
    return few, many


def latency_of(ordered: Sequence[float]) -> Latency:
    """The figures of sorted latencies; a percentile with too few samples is None."""
    if not ordered:
        return Latency()
    known = {name: percentile(ordered, q) for name, q in SHARES.items() if enough(len(ordered), q)}
    low, high = interval_p99(ordered)
    mean_s = math.fsum(ordered) / len(ordered)
    return Latency(mean_s=mean_s, max_s=ordered[-1], p99_low_s=low, p99_high_s=high, **known)


# ---- a run


def summarise(
    load: Load,
    samples: Samples,
    slo: Slo | None = None,
    *,
    label: str = "",
    repeat: int = 0,
    started: str = "",
    server: ServerStats | None = None,
    late_s: float = 0.0,
) -> Measurement:
    """The measurement of a run, with its SLO results, caveats and the reasons that make it invalid.

    Lateness of the generator up to `late_s` is only a caveat, however short the latencies are. `label`, `repeat`,
    `started` and `server` are stored as given, hence the many parameters.
    """
    status, took = np.asarray(samples.status), np.asarray(samples.latency_s)
    good = (status >= 200) & (status < 300)
    ordered = _sorted(took[good | (status == TIMED_OUT)])
    latency = latency_of(ordered)
    late = _sorted(np.asarray(samples.late_s)) if load.mode == "open" else array("d")
    health = _health(samples, late)
    limit_s = slo.latency_s if slo else None
    run = Measurement(
        load=load,
        label=label,
        repeat=repeat,
        started=started,
        seconds=samples.seconds,
        requests=int(np.count_nonzero(status != UNDER_WAY)),
        answered=int(np.count_nonzero(good)),
        errors=_errors(status[~good & (status != UNDER_WAY)]),
        first_error=_first_error(samples),
        throughput=_throughput(load, samples, good),
        goodput=None if limit_s is None else _throughput(load, samples, good, limit_s),
        too_slow=None if limit_s is None else int(np.count_nonzero(took[good] > limit_s)),
        latency=latency,
        histogram=encode(ordered),
        generator=health,
        server=server,
        invalid=_invalid(samples, health, late, latency, late_s),
    )
    caveats = [*([CLOSED] if load.mode == "closed" else []), *_late_caveats(run, late), *_caveats(run, samples)]
    return structs.replace(run, caveats=caveats, slo=slo.judge(run) if slo else [])


def _sorted(values: Numbers) -> array[float]:
    """Ascending, in a compact array: a run may have ten million samples."""
    return array("d", np.sort(values).tobytes())


def _throughput(load: Load, samples: Samples, good: Numbers, limit_s: float = math.inf) -> float:
    """Good responses per second, counting only those within the limit.

    A closed loop is busy beyond the end of the counted time: a request across the end counts with the share of its
    latency before it. Counting starts when each client has its first response: until then the server's queue only
    fills. An open loop receives its last responses after the end: it counts the responses of an equally long window
    that starts when the first response can arrive.
    """
    at, took = np.asarray(samples.intended_s)[good], np.asarray(samples.latency_s)[good]
    if not len(took) or not samples.seconds:
        return 0.0
    in_time = took <= limit_s
    if load.mode == "closed":
        start, end = _first_round_s(load, samples), samples.seconds
        inside = np.maximum(0.0, np.minimum(end, at + took) - np.maximum(start, at)) / np.maximum(took, 1e-9)
        return float(inside[in_time].sum()) / (end - start)
    inside = at + took <= samples.seconds + took.min()
    return int(np.count_nonzero(inside & in_time)) / samples.seconds


def _first_round_s(load: Load, samples: Samples) -> float:
    """When each client of a closed loop had its first response; 0 if that took half of the time or more."""
    first = zip(samples.intended_s[: load.concurrency], samples.latency_s[: load.concurrency], strict=True)
    end = max((at + took for at, took in first if took < math.inf), default=0.0)
    return end if load.seconds and end < samples.seconds / 2 else 0.0


def _errors(failed: Numbers) -> dict[str, int]:
    """The errors by status, the most frequent first."""
    each = zip(*(found.tolist() for found in np.unique(failed, return_counts=True)), strict=True)
    return {_WORDS.get(status, str(status)): count for status, count in sorted(each, key=lambda one: -one[1])}


def _first_error(samples: Samples) -> str | None:
    if samples.first_error is None:
        return None
    status, body = samples.first_error
    text = body.decode(errors="replace").strip()
    try:
        status_text = _WORDS.get(status) or f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        status_text = str(status)
    return f"{status_text}: {text}" if text else status_text


# ---- validity


def _health(samples: Samples, late: Sequence[float]) -> GeneratorHealth:
    cpu = samples.cpu_s / samples.busy_s if samples.busy_s else 0.0
    share = (len(late) - bisect_right(late, LATE_S)) / len(late) if late else 0.0
    return GeneratorHealth(cpu=cpu, late_share=share, late_p99_s=percentile(late, 0.99) if late else 0.0)


def _invalid(
    samples: Samples, health: GeneratorHealth, late: Sequence[float], latency: Latency, late_s: float
) -> list[str]:
    """Why the run measures nothing about the server."""
    found = []
    if _is_late(health, late) and _distorts(late, latency, late_s):
        found.append(
            f"the generator was late: found {health.late_share:.1%} of the sends over {LATE_S * 1e3:g} ms after their "
            f"time (p99 {health.late_p99_s * 1e3:.3g} ms), expected under {MOST_LATE:.0%}; lower the rate, or run the "
            "generator on another machine or on cores of its own"
        )
    if samples.starved:
        found.append(
            f"this machine had no file or port for {samples.starved} more connections, expected none; lower the rate, "
            "or let the server keep connections open"
        )
    if health.cpu > MOST_CPU:
        found.append(
            f"the generator was at its limit: found {health.cpu:.0%} of a core in use, expected at most "
            f"{MOST_CPU:.0%}; lower the rate or the concurrency, or run the generator on a faster machine"
        )
    return found


def is_hopeless(load: Load, samples: Samples, cpu: float, late_s: float) -> bool:
    """Whether the beginning of a run shows that it will be INVALID. `cpu` is the share of a core that the generator has
    used. It must be further from the limits than a whole run, because a beginning may be special."""
    late = _sorted(np.asarray(samples.late_s)) if load.mode == "open" else array("d")
    answered = _sorted(np.asarray(samples.latency_s)[np.asarray(samples.status) > 0])
    health = _health(samples, late)
    is_late = health.late_share >= HOPELESS * MOST_LATE and health.late_share * len(late) > HOPELESS * CHANCE
    return cpu > MOST_CPU + (1 - MOST_CPU) / 2 or (is_late and _distorts(late, latency_of(answered), late_s))


def _is_late(health: GeneratorHealth, late: Sequence[float]) -> bool:
    return health.late_share >= MOST_LATE and health.late_share * len(late) > CHANCE


def _distorts(late: Sequence[float], latency: Latency, late_s: float) -> bool:
    """Whether the lateness is a considerable part of the median latency or of the p99; both include it."""
    parts = ((0.5, latency.p50_s), (0.99, latency.p99_s or latency.max_s))
    return any(percentile(late, q) > max(late_s, MATTERS * (whole or 0.0)) for q, whole in parts)


def _late_caveats(run: Measurement, late: Sequence[float]) -> list[str]:
    """Which latencies of a valid run include lateness of the generator."""
    health, latency = run.generator, run.latency
    if run.invalid or not late:
        return []
    if _is_late(health, late):
        share, p99_ms = health.late_share, health.late_p99_s * 1e3
        return [
            f"{share:.1%} of the sends were over {LATE_S * 1e3:g} ms late (p99 {p99_ms:.1f} ms); latencies include it"
        ]
    tail = (("p99.9", 0.999, MATTERS, latency.p999_s), ("max", 1.0, MOSTLY, latency.max_s))
    names = [name for name, q, share, s in tail if s is not None and percentile(late, q) > max(LATE_S, share * s)]
    if not names:
        return []
    return [f"{' and '.join(names)} include lateness of the generator itself, up to {late[-1] * 1e3:.3g} ms"]


def _caveats(run: Measurement, samples: Samples) -> list[str]:
    found = []
    if samples.waited:
        found.append(f"{samples.waited} requests waited for a connection to open; latencies include it")
    if timed_out := samples.status.count(TIMED_OUT):
        found.append(
            f"{timed_out} requests timed out: latencies count them with the time waited, which is less than they would "
            "have taken"
        )
    if samples.ended == "cancelled":
        under_way = samples.status.count(UNDER_WAY)
        found.append(f"the run was interrupted; {under_way} requests under way are not counted")
    if not run.histogram and run.latency.max_s is not None:
        found.append(NO_HISTOGRAM)
    return found
