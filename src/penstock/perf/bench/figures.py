"""What samples come to: percentiles with their certainty, throughput, errors, and whether they say anything. Pure."""

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

from penstock.errors import ConfigError
from penstock.perf.bench.load_run import LOST, REFUSED, TIMED_OUT, UNDER_WAY, WRONG, Samples
from penstock.perf.bench.measurement import GeneratorHealth, Latency, Load, Measurement, ServerStats
from penstock.perf.bench.slo import Slo

_LEAST_US: Final = 1
_MOST_US: Final = 3_600_000_000
_DIGITS: Final = 3


def encode(latencies_s: Sequence[float]) -> str:
    """The histogram; "" without the library (the extra `bench`). What is over an hour counts as an hour."""
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
    """(seconds, how many took about so long), rising. Raises ConfigError for what is no histogram, or no library."""
    try:
        from hdrh.histogram import HdrHistogram
    except ImportError:
        raise ConfigError("histograms are read with hdrhistogram; install penstock[bench]") from None
    try:
        histogram = HdrHistogram.decode(text)
    except Exception as exc:  # the library's own, zlib's, base64's and ctypes'
        raise ConfigError(f"no HDR histogram: found {text[:20]!r}..., expected V2 in base64 ({exc})") from None
    found = ((x.value_iterated_to * 1e-6, x.count_at_value_iterated_to) for x in histogram.get_recorded_iterator())
    return [(seconds, int(count)) for seconds, count in found if math.isfinite(seconds)]


LATE_S: Final = 0.001
MOST_LATE: Final = 0.01  # of the sends
MATTERS: Final = 0.1  # of a latency: lateness beyond that is no small part of it
MOSTLY: Final = 0.5
CHANCE: Final = 3  # late sends that prove nothing
MOST_CPU: Final = 0.9  # of a core: beyond, the generator may be what is measured
CONFIDENCE: Final = 0.95
_EXACT: Final = 50_000  # samples up to which the binomial distribution is summed; beyond, a normal one is the same

Numbers = np.ndarray[Any, np.dtype[Any]]

_WORDS: Final = {
    LOST: "lost",
    TIMED_OUT: "timeout",
    REFUSED: "refused",
    WRONG: "wrong",
}
CLOSED: Final = "a closed loop sends nothing while the server stands still, so it cannot see stalls: use --mode open"
NO_HISTOGRAM: Final = "no histogram was kept: install penstock[bench]"


def percentile(ordered: Sequence[float], q: float) -> float:
    """The value that the share `q` of all do not exceed (nearest rank), of sorted values; NaN of none."""
    return ordered[max(0, math.ceil(len(ordered) * q - 1e-9) - 1)] if ordered else math.nan


def enough(count: int, q: float) -> bool:
    """Whether so many samples can tell the percentile: at least one of them lies beyond it."""
    return count * (1 - q) >= 1 - 1e-9


def interval_p99(ordered: Sequence[float]) -> tuple[float | None, float | None]:
    """Between which values the p99 lies with 95 % confidence, None where there are too few samples for a bound.

    By order statistics: how many of n samples lie below the true p99 is binomial, whatever the distribution. Holds for
    independent samples; requests that met in one stall are not, so that the repeats of a run tell more.
    """
    n = len(ordered)
    few, many = _above(n)
    low = ordered[n - 1 - many] if many < n else None
    high = ordered[n - few] if few >= 1 else None
    return low, high


def _above(n: int) -> tuple[int, int]:
    """(few, many): with 2.5 % probability each, less than `few` or more than `many` of n samples are over the p99."""
    tail, share = (1 - CONFIDENCE) / 2, 0.01
    if n > _EXACT:
        spread = statistics.NormalDist(n * share, math.sqrt(n * share * (1 - share)))
        return math.floor(spread.inv_cdf(tail)), math.ceil(spread.inv_cdf(1 - tail))
    few = many = 0
    chance = below = (1 - share) ** n
    while below <= tail:
        few += 1
        many = few
        chance *= (n - few + 1) / few * share / (1 - share)
        below += chance
    while below < 1 - tail:
        many += 1
        chance *= (n - many + 1) / many * share / (1 - share)
        below += chance
    return few, many


def latency_of(ordered: Sequence[float]) -> Latency:
    """Of sorted latencies; a percentile that they are too few for is None."""
    if not ordered:
        return Latency()

    def at(q: float) -> float | None:
        return percentile(ordered, q) if enough(len(ordered), q) else None

    low, high = interval_p99(ordered)
    return Latency(
        mean_s=math.fsum(ordered) / len(ordered),
        p50_s=at(0.5),
        p75_s=at(0.75),
        p90_s=at(0.9),
        p95_s=at(0.95),
        p99_s=at(0.99),
        p999_s=at(0.999),
        max_s=ordered[-1],
        p99_low_s=low,
        p99_high_s=high,
    )


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
    """One run as it is kept, with the verdict on the SLO, and what speaks against believing it.

    By `late_s` the generator may be late for a caveat only, however short the latencies are.
    """
    status, took = np.asarray(samples.status), np.asarray(samples.latency_s)
    good = (status >= 200) & (status < 300)
    ordered = _sorted(took[good | (status == TIMED_OUT)])
    latency = latency_of(ordered)
    late = _sorted(np.asarray(samples.late_s)) if load.mode == "open" else array("d")
    health = _health(samples, late)
    limit_s = slo.latency_s if slo else None
    histogram = encode(ordered)
    invalid = _invalid(samples, health, late, latency, late_s)
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
        latency=latency,
        histogram=histogram,
        generator=health,
        server=server,
        invalid=invalid,
        caveats=_caveats(load, samples, health, late, latency, histogram, bool(invalid)),
    )
    return structs.replace(run, slo=slo.judge(run)) if slo else run


def _sorted(values: Numbers) -> array[float]:
    """Rising; as small as they are, for a run may have ten million of them."""
    return array("d", np.sort(values).tobytes())


def _throughput(load: Load, samples: Samples, good: Numbers, limit_s: float = math.inf) -> float:
    """Good answers a second, of those within the limit.

    A closed loop is at work before and after the end of the counted time: a request that spans it counts with the part
    of its latency that lies before, and so at the beginning, which is when each client had its first answer: until
    then the server's queue only fills. In an open loop what is offered at the end is answered later: there the answers
    count that came in as long a time, beginning when the first could come.
    """
    at, took = np.asarray(samples.intended_s)[good], np.asarray(samples.latency_s)[good]
    if not len(took) or not samples.seconds:
        return 0.0
    in_time = took <= limit_s
    if load.mode == "closed":
        start, end = _first_round_s(load, samples), samples.seconds
        inside = np.maximum(0.0, np.minimum(end, at + took) - np.maximum(start, at)) / np.maximum(took, 1e-9)
        return float(inside[in_time].sum()) / (end - start)
    if limit_s < math.inf:
        return int(np.count_nonzero(in_time)) / samples.seconds
    return int(np.count_nonzero(at + took <= samples.seconds + took.min())) / samples.seconds


def _first_round_s(load: Load, samples: Samples) -> float:
    """When each client of a closed loop had its first answer; 0 where that took half of the time, or more."""
    first = zip(samples.intended_s[: load.concurrency], samples.latency_s[: load.concurrency], strict=True)
    end = max((at + took for at, took in first if took < math.inf), default=0.0)
    return end if load.seconds and end < samples.seconds / 2 else 0.0


def _errors(failed: Numbers) -> dict[str, int]:
    each = zip(*(found.tolist() for found in np.unique(failed, return_counts=True)), strict=True)
    most_first = sorted(each, key=lambda one: -one[1])
    return {_WORDS.get(status, str(status)): count for status, count in most_first}


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


def _health(samples: Samples, late: Sequence[float]) -> GeneratorHealth:
    cpu = samples.cpu_s / samples.busy_s if samples.busy_s else 0.0
    share = (len(late) - bisect_right(late, LATE_S)) / len(late) if late else 0.0
    return GeneratorHealth(cpu=cpu, late_share=share, late_p99_s=percentile(late, 0.99) if late else 0.0)


def _invalid(
    samples: Samples, health: GeneratorHealth, late: Sequence[float], latency: Latency, late_s: float
) -> list[str]:
    """Why the run says nothing about the server. Lateness that is a small part of the latencies is a caveat only."""
    found = []
    if _late(health, late) and _matters(late, latency, late_s):
        found.append(
            f"the generator was late: found {health.late_share:.1%} of the sends over {LATE_S * 1e3:g} ms after their "
            f"time (p99 {health.late_p99_s * 1e3:.3g} ms), expected under {MOST_LATE:.0%}; lower the rate, or run it "
            "on another machine or cores of its own"
        )
    if samples.starved:
        found.append(
            f"this machine had no file or port for {samples.starved} more connections, expected none; lower the rate, "
            "or have the server keep connections open"
        )
    if health.cpu > MOST_CPU:
        found.append(
            f"the generator was at its limit: found {health.cpu:.0%} of a core in use, expected at most "
            f"{MOST_CPU:.0%}; lower the rate or the concurrency, or run it on a faster machine"
        )
    return found


def _matters(late: Sequence[float], latency: Latency, late_s: float) -> bool:
    """Whether the lateness is more than a small part of the median latency, or of the p99: both include it."""
    parts = ((0.5, latency.p50_s), (0.99, latency.p99_s or latency.max_s))
    return any(percentile(late, q) > max(late_s, MATTERS * (whole or 0.0)) for q, whole in parts)


def _late(health: GeneratorHealth, late: Sequence[float]) -> bool:
    return health.late_share >= MOST_LATE and health.late_share * len(late) > CHANCE


def _own_tail(late: Sequence[float], latency: Latency) -> list[str]:
    """Which of the rarest latencies tell of the generator rather than of the server, though it was late but seldom."""
    if not late:
        return []
    parts = (("p99.9", 0.999, MATTERS, latency.p999_s), ("max", 1.0, MOSTLY, latency.max_s))
    return [
        name
        for name, q, share, whole in parts
        if whole is not None and percentile(late, q) > max(LATE_S, share * whole)
    ]


def _caveats(
    load: Load,
    samples: Samples,
    health: GeneratorHealth,
    late: Sequence[float],
    latency: Latency,
    histogram: str,
    invalid: bool,
) -> list[str]:
    found = [CLOSED] if load.mode == "closed" else []
    if _late(health, late) and not invalid:
        found.append(
            f"{health.late_share:.1%} of the sends were over {LATE_S * 1e3:g} ms late (p99 "
            f"{health.late_p99_s * 1e3:.1f} ms), which latencies include"
        )
    elif not invalid and (names := _own_tail(late, latency)):
        found.append(
            f"{' and '.join(names)}: the generator itself was up to {late[-1] * 1e3:.3g} ms late, which they include"
        )
    if samples.waited:
        found.append(f"{samples.waited} requests waited for a connection to be opened; latencies include it")
    if timed_out := samples.status.count(TIMED_OUT):
        found.append(
            f"{timed_out} requests timed out: latencies count them with the time they were waited for, which is less "
            "than they would have taken"
        )
    if samples.ended == "cancelled":
        under_way = samples.status.count(UNDER_WAY)
        found.append(f"the run was interrupted; {under_way} requests were under way and count for nothing")
    if not histogram and latency.max_s is not None:
        found.append(NO_HISTOGRAM)
    return found
