"""What a batch costs: read from numbers, a folder of `penstock tune` or `penstock bench`, or a running server."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.client.endpoint import read_token
from penstock.core.batching.cost import rising
from penstock.errors import ConfigError
from penstock.perf.bench.document import seconds
from penstock.perf.bench.measurement import ServerStats, Verdict
from penstock.perf.bench.report import VERDICT
from penstock.perf.bench.results import read
from penstock.perf.bench.server import fetch
from penstock.perf.bench.target import open_target
from penstock.perf.simulate.replay import parse_cost, parse_duration
from penstock.perf.simulate.simulator import ServiceTime
from penstock.perf.tune.runner import JOURNAL, BatchCurve, curves, single_instance
from penstock.perf.tune.space import parse_settings
from penstock.serving.observe.text import samples
from penstock.values import SIZE_UNITS, quantity

Points = Sequence[tuple[float, float]]

FORMS: Final = "A,B (5ms,0.2ms), ROWS:TIME,... (1:5.2ms,32:11ms), a folder of tune or bench, or a server's URL"
_FALL: Final = 0.2  # a larger batch may be faster by this share: noise, which is averaged out
_WIDE: Final = 4.0  # sizes this far apart leave a gap that is worth a note
_SAME: Final = 1.1  # mean batches of two runs whose sizes differ by less are one size
_FETCH_S: Final = 5.0


class CostCurve(BatchCurve, frozen=True, kw_only=True):
    """A curve that ascends in both, from any source.

    `largest` is the largest measured batch, None if the cost is a formula. `source` says where the curve is from,
    `notes` what to know about it.
    """

    source: str
    largest: int | None = None
    notes: tuple[str, ...] = ()

    def service(self, most_rows: int, jitter: float) -> ServiceTime:
        """The service time of batches of up to `most_rows` rows."""
        return CurveTime(0.0, 0.0, jitter, 0.0, tuple(self.seconds(n) for n in range(1, most_rows + 1)))


class CurveTime(ServiceTime, frozen=True):
    """A service time by size: `times[n - 1]` seconds for n rows. `a` and `b` are not used."""

    times: tuple[float, ...] = ()

    def t(self, rows: float) -> float:
        return self.times[math.ceil(rows) - 1]


def read_cost(text: str, flags: dict[str, Any]) -> CostCurve:
    """The curve that `--cost` names. `flags` has `model`, `token_file` and `lengths`, with which it counts tokens.
    Raises ConfigError, Unreachable."""
    if flags["lengths"] and ("," not in text or "://" in text):
        raise ConfigError(f'cost "{text}": with --lengths it counts tokens; expected A,B (5ms,1us) or TOKENS:TIME,...')
    if "://" in text or text.startswith("unix:"):
        return _of_server(text, flags)
    if (folder := Path(text)).exists():
        if not folder.is_dir():
            raise ConfigError(f'cost "{text}" is a file; expected {FORMS}')
        return _of_tuning(folder) if (folder / JOURNAL).exists() else _of_bench(folder)
    if ":" in text:
        return checked(_points(text), source=f"the given times {text}")
    if "," not in text:
        raise ConfigError(f'cost "{text}" is no folder, and no cost; expected {FORMS}')
    return _line(*parse_cost(text), source=f"the given cost {text}")


def _line(a: float, b: float, *, source: str, memory_bytes: int | None = None) -> CostCurve:
    return CostCurve(points=((1, a + b), (2, a + 2 * b)), source=source, memory_bytes=memory_bytes)


def _points(text: str) -> Points:
    found = []
    for part in text.split(","):
        rows, _, time = part.strip().partition(":")
        if not rows.isdecimal() or not int(rows):
            raise ConfigError(f'cost "{text}": "{part}" is no ROWS:TIME; expected for instance 1:5.2ms,8:6.6ms,32:11ms')
        found.append((int(rows), parse_duration(time)))
    return found


def checked(points: Points, *, source: str, memory_bytes: int | None = None) -> CostCurve:
    """The curve through measured points, with a note on each of its weaknesses. Raises ConfigError if it is none."""
    points = sorted(points)
    for (rows, _), (after, _) in pairwise(points):
        if rows == after:
            raise ConfigError(f"{source}: batches of {rows:g} rows have two times; expected one for each size")
    if bad := next((rows for rows, time in points if not 0 < time < math.inf), None):
        raise ConfigError(f"{source}: a batch of {bad:g} rows takes no time; expected a time over 0")
    notes = []
    for (rows, time), (more, less) in pairwise(points):
        if less < time * (1 - _FALL):
            raise ConfigError(
                f"{source}: the cost falls: a batch of {more:g} rows takes {seconds(less)}, one of {rows:g} takes"
                f" {seconds(time)}; measure again on a quiet machine, or leave out the wrong size"
            )
        if less < time:
            notes.append(
                f"a batch of {more:g} rows was measured faster than one of {rows:g}: both count with their mean"
            )
        if more > _WIDE * rows:
            notes.append(f"no size between {rows:g} and {more:g} rows was measured: times between are interpolated")
    first, last = points[0][0], points[-1][0]
    if first > 1:
        notes.append(f"no batch below {first:.3g} rows was measured: smaller ones count with its time")
    if len(points) == 1:
        notes.append(f"only batches of {first:.3g} rows were measured, so every batch counts with their time")
    times = rising(time for _, time in points)
    return CostCurve(
        points=tuple((rows, time) for (rows, _), time in zip(points, times, strict=True)),
        source=source,
        largest=max(1, int(last)),
        memory_bytes=memory_bytes,
        notes=tuple(notes),
    )


# ---- folders


def _of_tuning(folder: Path) -> CostCurve:
    """The curve of the chosen settings, or the first one."""
    found = curves(folder)
    if not found:
        raise ConfigError(f"{folder} has no batch times: its tuning ended before; expected a finished `penstock tune`")
    name, notes = "", list[str]()
    try:
        chosen = msgspec.json.decode((folder / VERDICT).read_bytes(), type=Verdict).chosen
        name = str(single_instance(parse_settings(chosen)))
    except (OSError, msgspec.MsgspecError):
        pass  # the search was interrupted
    if name not in found:
        name = next(iter(found))
        notes.append(f"{folder} names no chosen settings with batch times: these are of {name}")
    source = f"{folder} (one instance alone)"
    curve = checked(found[name].points, source=source, memory_bytes=found[name].memory_bytes)
    return msgspec.structs.replace(curve, notes=(*notes, *curve.notes))


def _of_bench(folder: Path) -> CostCurve:
    """A point for each mean batch of the runs, from the times that the server reports."""
    _, measurements = read(folder)
    # also of INVALID runs: a late load generator makes wrong latencies, not wrong batch times
    known = sorted(_point(m.server) for m in measurements if m.server and _point(m.server)[0])
    if not known:
        raise ConfigError(
            f"{folder} has no run with the server's batches and their times; expected results of `penstock bench` on a"
            " server whose metrics it can read"
        )
    groups: list[list[tuple[float, float]]] = []
    for point in known:
        if groups and point[0] < groups[-1][0][0] * _SAME:
            groups[-1].append(point)
        else:
            groups.append([point])
    means = [(statistics.fmean(n for n, _ in group), statistics.fmean(t for _, t in group)) for group in groups]
    return checked(means, source=f"{folder} (mean batches under load)")


def _point(server: ServerStats) -> tuple[float, float]:
    """(mean rows, seconds) of the batches of a run; zeros if unknown. Decoding overlaps with the run before."""
    if not server.mean_batch or not server.run_s:
        return 0.0, 0.0
    return server.mean_batch, server.run_s + (server.postprocess_s or 0.0)


# ---- a running server


def _of_server(url: str, flags: dict[str, Any]) -> CostCurve:
    """The cost that the server has learned, with the memory of its largest worker."""
    with open_target(url, model=flags["model"] or None, token=read_token(flags["token_file"])) as target:
        if target.metrics is None:
            raise ConfigError(f"{url} shows no metrics; give the cost as {FORMS}")
        reply = fetch(target.metrics, "GET", "/metrics", token=target.token, timeout_s=_FETCH_S)
    found: dict[str, list[float]] = {}
    for name, _, value in samples(reply.body.decode(errors="replace"), target.model):
        found.setdefault(name, []).append(value)
    try:
        a, b = found["penstock_cost_fixed_seconds"][-1], found["penstock_cost_row_seconds"][-1]
    except KeyError:
        raise ConfigError(
            f"{url} has not learned what a batch of {target.model} costs, which takes batches of different sizes; send"
            f" load that varies, for instance `penstock bench {url} --concurrency 1,8,64`, and plan again"
        ) from None
    source = f"{target.model} at {url}: {seconds(a)} + {seconds(b)} x rows"
    memory = found.get("penstock_worker_resident_bytes")
    return _line(a, b, source=source, memory_bytes=int(max(memory)) if memory else None)


# ---- memory


def parse_memory(text: str) -> int:
    """Bytes of "800MiB", "2GiB" or "1.5GB". Raises ConfigError."""
    found = int(quantity(text, SIZE_UNITS) or 0)
    if found < 1:
        raise ConfigError(f'memory "{text}": expected a size over 0 with GiB, MiB, GB or MB, for instance 2GiB')
    return found
