"""Arrivals as a planner sees them: their busiest part, their holes, and a plan over the whole of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from penstock.config.schema import AutoscaleConfig, BatchingConfig
from penstock.core.engine.autoscaling import limits_of
from penstock.perf.bench.figures import enough, latency_of, percentile
from penstock.perf.bench.measurement import Latency
from penstock.perf.simulate.simulator import (
    WARM,
    OpenLoop,
    ServiceTime,
    Simulation,
    SimulationSettings,
    simulate_scaling,
)

PEAK: Final = 40_000  # requests of the busiest part: 340 of them are slower than the p99,
LONG: Final = 20  # and the time of so many of the largest batches: with many instances, requests are soon many
BINS: Final = 96  # of all arrivals: quarters of an hour of a day
HOLE: Final = 50.0  # times the mean gap,
HOLE_SHARE: Final = 0.01  # and a share of the whole time: a longer gap is hardly chance
SPARE: Final = 1.25  # times the planned instances, that an autoscaler may start: it follows the load with a delay
_TINY: Final = 1e-9


class DayProfile(Struct, frozen=True, kw_only=True):
    """The chosen plan over all arrivals: for each of the bins of `bin_s` seconds the requests per second, the share of
    the instances' time that is busy, and the p99 in seconds (None with too few requests)."""

    bin_s: float
    seconds: float
    requests: int
    latency: Latency
    rates: list[float]
    busy: list[float]
    p99_s: list[float | None]


class ScalingProfile(Struct, frozen=True, kw_only=True):
    """All arrivals on instances that follow the load, `fewest` to `most` of them, each up `start_s` after its decision.

    `instance_s` are the seconds of all instances together, `fixed_s` those of the plan's fixed number; `late` is the
    share of requests over the SLO; `numbers` has each (second, number)."""

    fewest: int
    most: int
    start_s: float
    instance_s: float
    fixed_s: float
    late: float
    numbers: list[tuple[float, int]]


def busiest(load: OpenLoop, most: int = PEAK) -> OpenLoop:
    """The part of the load with the most rows per second, of `most` requests, from time 0. The part before it, which a
    simulation excludes as its warm-up, comes with it."""
    arrivals, rows = load.arrivals, load.rows
    if len(arrivals) <= most:
        return load
    t = np.frombuffer(arrivals, float) if isinstance(arrivals, array) else np.asarray(arrivals, float)
    total = np.arange(len(t) + 1) if not rows else np.concatenate(([0], np.cumsum(np.asarray(rows))))
    counted = round(most * (1 - WARM))
    spans = np.maximum(t[counted - 1 :] - t[: len(t) - counted + 1], _TINY)
    start = int(np.argmax((total[counted:] - total[:-counted]) / spans))
    end, before_s = start + counted, spans[start] * WARM / (1 - WARM)
    begin = max(int(np.searchsorted(t, t[start] - before_s)), end - most, 0)
    origin = t[begin]
    return OpenLoop([float(x - origin) for x in t[begin:end]], list(rows[begin:end]) if rows else ())


def holes(arrivals: Sequence[float]) -> tuple[float, float, int]:
    """(seconds and start of the longest gap, number of gaps) of gaps that are too long to be chance."""
    if len(arrivals) < 2 or arrivals[-1] <= arrivals[0]:
        return 0.0, 0.0, 0
    t = np.asarray(arrivals, float)
    gaps = np.diff(t)
    found = int(np.count_nonzero(gaps > max(HOLE * gaps.mean(), HOLE_SHARE * (t[-1] - t[0]))))
    at = int(np.argmax(gaps))
    return float(gaps[at]), float(t[at]), found


def profile(simulation: Simulation) -> DayProfile:
    """The simulation by time of arrival and of run."""
    done = np.asarray(simulation.done, float).reshape(-1, 2)
    end = max(float(done[:, 0].max()), _TINY)
    bin_s, bins = end / BINS, range(BINS)
    places = np.minimum((done[:, 0] / bin_s).astype(int), BINS - 1)
    took = done[:, 1] - done[:, 0]
    busy = np.zeros(BINS + 1)
    for start, _, run_s in simulation.batches:  # a batch may last over several bins
        for k in range(min(int(start / bin_s), BINS), min(int((start + run_s) / bin_s), BINS) + 1):
            busy[k] += min(start + run_s, (k + 1) * bin_s) - max(start, k * bin_s)
    tails = [np.sort(took[places == k]).tolist() for k in bins]
    return DayProfile(
        bin_s=bin_s,
        seconds=end,
        requests=len(done),
        latency=latency_of(np.sort(took).tolist()),
        rates=[len(tail) / bin_s for tail in tails],
        busy=[float(min(1.0, share / bin_s / simulation.settings.slots)) for share in busy[:BINS]],
        p99_s=[percentile(tail, 0.99) if enough(len(tail), 0.99) else None for tail in tails],
    )


def scaled(load: OpenLoop, service: ServiceTime, settings: SimulationSettings, start_s: float) -> ScalingProfile:
    """The load on instances that `[models.NAME.autoscale]` with `max` and `slo_s` starts and ends; `settings.slots`,
    the planned number, are up at its beginning."""
    config = AutoscaleConfig(max=math.ceil(SPARE * settings.slots), slo_s=settings.slo_s)
    limits = limits_of(config, BatchingConfig())
    found = simulate_scaling(service, load, settings, limits, start_s=start_s)
    assert settings.slo_s is not None
    return ScalingProfile(
        fewest=limits.fewest,
        most=limits.most,
        start_s=start_s,
        instance_s=found.worker_s,
        fixed_s=settings.slots * load.arrivals[-1],
        late=found.late(settings.slo_s),
        numbers=list(found.numbers),
    )
