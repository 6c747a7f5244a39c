"""One run of load on a target: a first look, the warm-up, what counts, and the server's side of it."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from msgspec import structs

from penstock.client.errors import Unreachable
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.arrivals import parse_arrival, read_trace, times
from penstock.perf.bench.figures import summarise
from penstock.perf.bench.load import Check, Progress, Samples, closed_loop, open_loop
from penstock.perf.bench.load_run import WRONG
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.probe import ServerProbe
from penstock.perf.bench.slo import Slo
from penstock.perf.bench.target import Target

SLICE_S: Final = 0.5
LONGEST_S: Final = 10.0
STILL: Final = 1.05  # faster by more than this: not warm yet

TREND_S: Final = 5.0  # a shorter run tells nothing of time
WINDOWS: Final = 9  # a run is looked at in so many, one after the other
FEW: Final = 10 * WINDOWS  # samples of fewer answers tell nothing
SLOWER: Final = 1.25
GROWN: Final = 0.05  # of the memory at the beginning
GROWN_BYTES: Final = 16 * 2**20  # less is how any allocator breathes


async def warm_up(
    run: Callable[[float], Awaitable[float]],
    seconds: float | None = None,
    *,
    slice_s: float = SLICE_S,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Has the load `run` for so many seconds; None: by slices until it is settled, at most ten seconds.

    `run(seconds)` gives the speed that it saw: more is faster.
    """
    if seconds is not None:
        if seconds > 0:
            await run(seconds)
        return
    start = clock()
    speeds: list[float] = []
    while not settled(speeds) and clock() - start < LONGEST_S:
        speeds.append(await run(slice_s))


def settled(speeds: Sequence[float]) -> bool:
    """Whether the last is hardly faster than the two before it."""
    return len(speeds) >= 3 and speeds[-1] <= max(speeds[-3:-1]) * STILL


def slower(latencies_s: Sequence[float]) -> str:
    """What to tell of good answers, in the order of their sending, that took ever longer; "" when they did not.

    All windows of the last third must be slower than all of the first: one stall, wherever it is, is no trend.
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
        f"{last * 1e3:.4g} ms in the last; either the server falls behind under this load, or the model slows down "
        "with time: run longer with less load to tell them apart"
    )


def leaking(memory: Sequence[tuple[float, int]]) -> str:
    """What to tell of a server whose memory, as (seconds, bytes), grows steadily; "" when it does not.

    It must grow in the second half of the run by at least half of what it did in the first: a cache fills, a leak
    goes on.
    """
    if len(memory) < WINDOWS:
        return ""
    third = len(memory) // 3
    parts = [memory[:third], memory[third:-third], memory[-third:]]
    first, middle, last = (statistics.median(b for _, b in part) for part in parts)
    grown = last - first
    if grown < max(GROWN_BYTES, first * GROWN) or last - middle < (middle - first) / 2 or middle <= first:
        return ""
    between_s = statistics.median(t for t, _ in parts[2]) - statistics.median(t for t, _ in parts[0])
    return (
        f"its memory grows steadily: by {grown / 2**20:,.0f} MiB in {between_s:.3g} s "
        f"({grown / between_s * 3600 / 2**30:.3g} GiB an hour), to {last / 2**20:,.0f} MiB"
    )


LOOKS: Final = 5  # requests, one after the other, that must not all fail before a load is sent
LOOKS_S: Final = 30.0  # no further one after so long
CLOSED_S: Final = 60.0  # patience with a request
OPEN_S: Final = 10.0  # and after the last of an open loop
SLICE_REQUESTS: Final = 10  # requests that a slice of the warm-up is to have


class TargetFailing(PenstockError):
    """The target answers nothing but errors: there is nothing to measure."""

    code = "failing"


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
    """What the load saw. `requests` are whole messages, sent in turn; `check` tells good answers of 2xx from others.

    `warm_s` None warms up until the load gets no faster, 10 s at most; 0 not at all. `timeout_s` is the patience with a
    request, in an open loop after the last. `late_s`: see `summarise`. When the task is cancelled, `on_partial` gets
    what there is. Raises TargetFailing if the first five answers are errors, Unreachable, ConfigError for arrivals that
    cannot be.
    """
    asyncio.get_running_loop().set_exception_handler(_told)
    loops = _Loops(target, requests, load, check, timeout_s)
    await loops.look()
    await warm_up(loops.speed, warm_s, slice_s=loops.slice_s)
    samples = Samples()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    probe = ServerProbe(target)
    await probe.start()
    gc.collect()
    gc.freeze()  # a look through all of it would stop the generator for milliseconds
    interrupted: asyncio.CancelledError | None = None
    try:
        await loops.run(samples, on_progress)
    except asyncio.CancelledError as error:
        interrupted = error
    finally:
        gc.unfreeze()
        side = await probe.stop()
    run = summarise(load, samples, slo, label=label, repeat=repeat, started=started, server=side, late_s=late_s)
    run = _doubted(run, samples, probe)
    if interrupted is not None:
        if on_partial is not None and samples.status:
            on_partial(run)
        raise interrupted
    return run


def _told(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """As ever, but for what uvloop says of each TLS connection that is given up while something comes: a page each."""
    if "SSL protocol" not in context["message"]:
        loop.default_exception_handler(context)


def _doubted(run: Measurement, samples: Samples, probe: ServerProbe) -> Measurement:
    """The run with what makes its end another than its beginning."""
    gone = [f"the target went away {_last_s(samples):.3g} s into the run"] if samples.ended == "gone" else []
    trends = (slower(_good(samples)[2 * run.load.concurrency :]), leaking(probe.memory))  # after the clients' start
    found = [text for text in trends if text and run.seconds >= TREND_S]
    return structs.replace(run, invalid=[*run.invalid, *gone], caveats=[*run.caveats, *found])


def _good(samples: Samples) -> array[float]:
    """The latencies of good answers, in the order of their sending."""
    each = zip(samples.latency_s, samples.status, strict=True)
    return array("d", (took for took, status in each if 200 <= status < 300))


def _last_s(samples: Samples) -> float:
    """When the last answer came, whatever it said."""
    each = zip(samples.intended_s, samples.latency_s, samples.status, strict=True)
    return max((at + took for at, took, status in each if status > 0 or status == WRONG), default=0.0)


def _rate(times_s: Sequence[float]) -> float:
    """Of a trace, a second; 1 where that says nothing."""
    return (len(times_s) - 1) / times_s[-1] if times_s and times_s[-1] else 1.0


class _Loops:
    """The load in its three forms: one request, a slice to warm up, all of it."""

    def __init__(
        self, target: Target, requests: Sequence[bytes], load: Load, check: Check | None, timeout_s: float | None
    ) -> None:
        self._target, self._requests, self._load, self._check = target, requests, load, check
        self._timeout_s = timeout_s or (CLOSED_S if load.mode == "closed" else OPEN_S)
        self._arrival = parse_arrival(load.arrival)
        self._trace = read_trace(self._arrival.path).times_s if self._arrival.kind == "trace" else array("d")
        self._times = self._whole() if load.mode == "open" else array("d")
        self._rate = load.rate or _rate(self._times)
        self.slice_s = SLICE_S if load.mode == "closed" else max(SLICE_S, min(SLICE_REQUESTS / self._rate, LONGEST_S))

    async def look(self) -> None:
        """Sends single requests until one is answered well. Raises TargetFailing with the first error, Unreachable."""
        first: Samples | None = None
        start = time.perf_counter()
        for number in range(LOOKS):
            request = self._requests[number % len(self._requests)]
            samples = Samples()
            await self._closed([request], samples, concurrency=1, at_least=1)
            if 200 <= samples.status[0] < 300:
                return
            first = first or samples
            if time.perf_counter() - start > LOOKS_S:
                break
        assert first is not None
        error = summarise(self._load, first).first_error
        raise TargetFailing(
            f"{self._target.url} answers nothing but errors, so the run was stopped; the first: {error}"
        )

    async def speed(self, seconds: float) -> float:
        """Sends the load for so long; gives good answers a second, of an open loop what is told by its latency."""
        samples = Samples()
        start = time.perf_counter()
        if self._load.mode == "closed":
            await self._closed(self._requests, samples, concurrency=self._load.concurrency, seconds=seconds)
        else:
            arrivals = times(parse_arrival("constant"), self._rate, seconds, 0)
            await self._open(arrivals, 0.0, samples, None)
        if samples.ended == "gone":
            raise Unreachable(f"{self._target.url} went away while it was warmed up")
        took = _good(samples)
        if not took:
            return 0.0
        if self._load.mode == "closed":
            return len(took) / (time.perf_counter() - start)
        return 1 / statistics.median(took)

    async def run(self, samples: Samples, on_progress: Progress | None) -> None:
        """Sends all of it."""
        load = self._load
        if load.mode == "open":
            whole = load.requests or len(self._times) == len(self._trace)
            seconds = 0.0 if whole else load.seconds  # a trace may be over before
            await self._open(self._times, seconds, samples, on_progress)
        else:
            await self._closed(
                self._requests,
                samples,
                concurrency=load.concurrency,
                seconds=load.seconds,
                at_least=load.requests,
                on_progress=on_progress,
            )

    async def _closed(
        self,
        requests: Sequence[bytes],
        samples: Samples,
        *,
        concurrency: int,
        seconds: float = 0.0,
        at_least: int = 0,
        on_progress: Progress | None = None,
    ) -> None:
        await closed_loop(
            self._target.endpoint,
            requests,
            concurrency=concurrency,
            seconds=seconds,
            at_least=at_least,
            timeout_s=self._timeout_s,
            check=self._check,
            on_progress=on_progress,
            samples=samples,
        )

    async def _open(
        self, arrivals: Sequence[float], seconds: float, samples: Samples, on_progress: Progress | None
    ) -> None:
        await open_loop(
            self._target.endpoint,
            self._requests,
            arrivals,
            seconds=seconds,
            connections=self._load.connections,
            patience_s=self._timeout_s,
            check=self._check,
            on_progress=on_progress,
            samples=samples,
        )

    def _whole(self) -> array[float]:
        """The times of an open loop. Raises ConfigError when there are none."""
        load = self._load
        seconds = load.seconds
        if load.requests and self._arrival.kind != "trace":
            seconds = 2 * load.requests / load.rate
        found = times(self._arrival, load.rate, seconds, load.seed, self._trace)
        while len(found) < load.requests and self._arrival.kind != "trace":
            seconds *= 2
            found = times(self._arrival, load.rate, seconds, load.seed, self._trace)
        if load.requests:
            found = found[: load.requests]
        if not found:
            raise ConfigError(f"no request comes at {load.label} within {load.seconds:g} s; raise the rate or the time")
        return found
