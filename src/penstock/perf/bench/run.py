"""One run of load on a target: test requests, warm-up, the counted load, and the server's side of it."""

from __future__ import annotations

import asyncio
import gc
import math
import statistics
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import numpy as np
from msgspec import structs

from penstock.client.endpoint import Unreachable
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.document import memory
from penstock.perf.bench.figures import is_hopeless, summarise
from penstock.perf.bench.load import Check, Progress, Samples, closed_loop, open_loop
from penstock.perf.bench.load_run import WRONG
from penstock.perf.bench.measurement import Load, Measurement, Slo
from penstock.perf.bench.probe import ServerProbe
from penstock.perf.bench.target import Target
from penstock.perf.bench.workload import parse_arrival, read_trace, times

LOOKS: Final = 5  # test requests, one after another; if all fail, no load is sent
LOOKS_S: Final = 30.0  # no further test request after this time
CLOSED_S: Final = 60.0  # timeout of a request, as of the client
OPEN_S: Final = 10.0  # wait after the last request of an open loop

SLICE_S: Final = 0.5  # of warm-up
SLICE_REQUESTS: Final = 10  # the speed of fewer says nothing
LONGEST_S: Final = 10.0
STILL: Final = 1.05  # a larger gain in speed: not warm yet

PROBE_S: Final = 1.0  # of a run, after which it is stopped if it will be INVALID; at least a tenth of it
PROBED: Final = 4  # times the probe: a shorter run is not worth it

TREND_S: Final = 5.0  # a shorter run shows no trend
WINDOWS: Final = 9  # consecutive parts of a run that are compared
FEW: Final = 10 * WINDOWS  # fewer samples show no trend
SLOWER: Final = 1.25  # a choice: medians of parts of a steady run differ by less
GROWN: Final = 0.05  # of the initial memory
GROWN_BYTES: Final = 16 * 2**20  # normal fluctuation of an allocator


class TargetFailing(PenstockError, code="failing"):
    """The target returns only errors, so there is nothing to measure."""


async def measure(
    target: Target,
    requests: Sequence[bytes],
    load: Load,
    *,
    slo: Slo | None = None,
    warm_s: float | None = None,
    label: str = "",
    repeat: int = 0,
    check: Check | None = None,
    timeout_s: float | None = None,
    late_s: float = 0.0,
    on_progress: Progress | None = None,
    on_partial: Callable[[Measurement], None] | None = None,
) -> Measurement:
    """Sends the load, `requests` (complete messages) in turn, and returns its measurement.

    `check` decides which 2xx responses are good. `warm_s` None warms up until the load gets no faster, at most 10 s;
    0 skips the warm-up. `timeout_s` limits a request; in an open loop, the wait after the last one. For `label`,
    `repeat` and `late_s` see `summarise`. If the task is cancelled, `on_partial` receives the partial result. Many
    parameters: each is one option of a measurement. Raises TargetFailing if the first five responses are errors,
    Unreachable, ConfigError for impossible arrivals.
    """
    asyncio.get_running_loop().set_exception_handler(_on_loop_error)
    sender = _LoadSender(target, requests, load, check, timeout_s)
    await sender.test()
    await warm_up(sender.speed, warm_s, slice_s=sender.slice_s)
    samples = Samples()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    probe = ServerProbe(target)
    await probe.start()
    gc.collect()
    gc.freeze()  # a full collection would stop the generator for milliseconds
    interrupted: asyncio.CancelledError | None = None
    try:
        await sender.run(samples, _watch(load, samples, late_s, on_progress))
    except asyncio.CancelledError as error:
        interrupted = error
    finally:
        gc.unfreeze()
        server = await probe.stop()
    run = summarise(load, samples, slo, label=label, repeat=repeat, started=started, server=server, late_s=late_s)
    run = _with_trends(run, samples, probe)
    if interrupted is not None:
        if on_partial is not None and samples.status:
            on_partial(run)
        raise interrupted
    return run


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The default handler, without uvloop's page of output for each TLS connection aborted while data arrives."""
    if "SSL protocol" not in context["message"]:
        loop.default_exception_handler(context)


def _watch(load: Load, samples: Samples, late_s: float, show: Progress | None) -> Progress:
    """The progress of a run, which ends early if its beginning shows that it will be INVALID, as on a busy machine."""
    probe_s = max(PROBE_S, load.seconds / 10)
    at_s = probe_s if load.seconds >= PROBED * probe_s and not load.requests else math.inf
    cpu_s, clock_s = time.process_time(), time.perf_counter()

    def progress(seconds: float, answered: int) -> bool:
        nonlocal at_s
        if show is not None:
            show(seconds, answered)
        if seconds < at_s:
            return False
        at_s = math.inf
        cpu = (time.process_time() - cpu_s) / (time.perf_counter() - clock_s)
        return is_hopeless(load, samples, cpu, late_s)

    return progress


class _LoadSender:
    """The load in three forms: single test requests, a slice for the warm-up, and all of it."""

    def __init__(
        self, target: Target, requests: Sequence[bytes], load: Load, check: Check | None, timeout_s: float | None
    ) -> None:
        self._target, self._requests, self._load = target, requests, load
        self._timeout_s = timeout_s or (CLOSED_S if load.mode == "closed" else OPEN_S)
        self._times, self._whole = _arrival_times(load) if load.mode == "open" else (array("d"), False)
        endpoint, patience_s = target.endpoint, self._timeout_s
        self._closed = partial(closed_loop, endpoint, timeout_s=patience_s, check=check)
        self._open = partial(
            open_loop, endpoint, requests, connections=load.connections, patience_s=patience_s, check=check
        )
        whole_s = self._times[-1] if self._times else 0.0
        self._rate = load.rate or ((len(self._times) - 1) / whole_s if whole_s else 1.0)  # of a trace
        self.slice_s = SLICE_S if load.mode == "closed" else max(SLICE_S, min(SLICE_REQUESTS / self._rate, LONGEST_S))

    async def test(self) -> None:
        """Sends single requests until one succeeds. Raises TargetFailing with the first error, Unreachable."""
        first: Samples | None = None
        start = time.perf_counter()
        for number in range(LOOKS):
            request = self._requests[number % len(self._requests)]
            samples = Samples()
            await self._closed([request], samples=samples, concurrency=1, at_least=1)
            if 200 <= samples.status[0] < 300:
                return
            first = first or samples
            if time.perf_counter() - start > LOOKS_S:
                break
        assert first is not None
        error = summarise(self._load, first).first_error
        raise TargetFailing(f"{self._target.url} returns only errors, so the run was stopped; the first: {error}")

    async def speed(self, seconds: float) -> float:
        """Sends the load for `seconds`; returns good responses per second, in an open loop 1 / median latency."""
        samples = Samples()
        start = time.perf_counter()
        if self._load.mode == "closed":
            clients = self._load.concurrency
            await self._closed(self._requests, samples=samples, concurrency=clients, seconds=seconds)
        else:
            await self._open(times(parse_arrival("constant"), self._rate, seconds, 0), samples=samples)
        if samples.ended == "gone":
            raise Unreachable(f"{self._target.url} went away during the warm-up")
        took = _good_latencies(samples)
        if not took:
            return 0.0
        return len(took) / (time.perf_counter() - start) if self._load.mode == "closed" else 1 / statistics.median(took)

    async def run(self, samples: Samples, on_progress: Progress) -> None:
        load, seconds = self._load, 0.0 if self._whole else self._load.seconds
        if load.mode == "open":
            await self._open(self._times, seconds=seconds, samples=samples, on_progress=on_progress)
        else:
            counted = {"concurrency": load.concurrency, "seconds": load.seconds, "at_least": load.requests}
            await self._closed(self._requests, samples=samples, on_progress=on_progress, **counted)  # type: ignore[arg-type]


def _arrival_times(load: Load) -> tuple[array[float], bool]:
    """(times of an open loop, whether the last one ends it rather than `load.seconds`). Raises ConfigError."""
    arrival = parse_arrival(load.arrival)
    trace = arrival.kind == "trace"
    recorded = read_trace(arrival.path).times_s if trace else array("d")
    seconds = 2 * load.requests / load.rate if load.requests and not trace else load.seconds
    found = times(arrival, load.rate, seconds, load.seed, recorded)
    while len(found) < load.requests and not trace:
        seconds *= 2
        found = times(arrival, load.rate, seconds, load.seed, recorded)
    if load.requests:
        found = found[: load.requests]
    if not found:
        raise ConfigError(f"no request arrives at {load.label} within {load.seconds:g} s; raise the rate or the time")
    return found, bool(load.requests) or (trace and len(found) == len(recorded))  # a trace may end before the time


def _good_latencies(samples: Samples) -> array[float]:
    """The latencies of good responses, in sending order."""
    each = zip(samples.latency_s, samples.status, strict=True)
    return array("d", (took for took, status in each if 200 <= status < 300))


# ---- warm-up and trends: a run is meaningful only if its end is like its beginning


async def warm_up(
    run: Callable[[float], Awaitable[float]],
    seconds: float | None = None,
    *,
    slice_s: float = SLICE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Runs the load for `seconds`; None: in slices until the speed that `run` returns has settled, at most 10 s."""
    if seconds is not None:
        if seconds > 0:
            await run(seconds)
        return
    start = clock()
    speeds: list[float] = []
    while not settled(speeds) and clock() - start < LONGEST_S:
        speeds.append(await run(slice_s))


def settled(speeds: Sequence[float]) -> bool:
    """Whether the last speed hardly exceeds the two before it."""
    return len(speeds) >= 3 and speeds[-1] <= max(speeds[-3:-1]) * STILL


def _with_trends(run: Measurement, samples: Samples, probe: ServerProbe) -> Measurement:
    """The run with warnings about changes from its beginning to its end."""
    each = zip(samples.intended_s, samples.latency_s, samples.status, strict=True)
    last_s = max((at + took for at, took, status in each if status > 0 or status == WRONG), default=0.0)
    ended = {
        "gone": [f"the target went away {last_s:.3g} s into the run"],
        "stopped": [
            f"the run was stopped after {run.seconds:.2g} of {run.load.seconds:g} s, because it would be INVALID"
        ],
    }.get(samples.ended, [])
    after_start = _good_latencies(samples)[2 * run.load.concurrency :]
    trends = (slowdown(after_start), memory_growth(probe.memory)) if run.seconds >= TREND_S else ()
    return structs.replace(run, invalid=[*run.invalid, *ended], caveats=[*run.caveats, *filter(None, trends)])


def slowdown(latencies_s: Sequence[float]) -> str:
    """A warning if latencies, in sending order, increase through the run; else "".

    All windows of the last third must be slower than all windows of the first: a single stall is no trend.
    """
    if len(latencies_s) < FEW:
        return ""
    medians = [float(np.median(window)) for window in np.array_split(np.asarray(latencies_s), WINDOWS)]
    third = WINDOWS // 3
    first, last = statistics.median(medians[:third]), statistics.median(medians[-third:])
    if last < first * SLOWER or min(medians[-third:]) <= max(medians[:third]):
        return ""
    return (
        f"it got slower: the median latency was {first * 1e3:.4g} ms in the first third of the run and "
        f"{last * 1e3:.4g} ms in the last. Either the server falls behind under this load, or the model slows down "
        "over time; a longer run with less load shows which"
    )


def memory_growth(samples: Sequence[tuple[float, int]]) -> str:
    """A warning if the server's memory, as (seconds, bytes), grows steadily; else "".

    Growth in the second half must be at least half of the growth in the first: a cache fills up, a leak continues.
    """
    if len(samples) < WINDOWS:
        return ""
    third = len(samples) // 3
    parts = [samples[:third], samples[third:-third], samples[-third:]]
    first, middle, last = (statistics.median(b for _, b in part) for part in parts)
    grown = last - first
    if grown < max(GROWN_BYTES, first * GROWN) or last - middle < (middle - first) / 2 or middle <= first:
        return ""
    between_s = statistics.median(t for t, _ in parts[2]) - statistics.median(t for t, _ in parts[0])
    return (
        f"its memory grows steadily: by {memory(grown)} in {between_s:.3g} s "
        f"({memory(grown / between_s * 3600)} an hour), to {memory(last)}"
    )
