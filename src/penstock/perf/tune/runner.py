"""The system under test, and the runner that measures it through a journal.

Each measurement is on disk before the search sees it and is never repeated. A search depends only on its seed and its
measurements: one that was killed replays the journal in no time, continues where it stopped, and ends as if it had
never been interrupted.
"""

import io
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec
from msgspec import Struct, field

from penstock._version import __version__
from penstock.errors import ConfigError, LoadFailed
from penstock.perf.bench.compare import student_at
from penstock.perf.bench.document import value_text
from penstock.perf.bench.measurement import SCHEMA, Measurement, Objective, Slo, measured_value
from penstock.perf.bench.results import append_line, open_locked, writing
from penstock.perf.tune.space import CandidateSettings

log = logging.getLogger("penstock.perf")

LOAD_PARAMETERS: Final = ("batch", "instances", "hold", "policy")  # have no effect on one batch of one instance
JOURNAL: Final = "journal.jsonl"
TELL_P99: Final = 299  # timely responses that prove with 95 % confidence that at most 1 % are late
_CHANCE: Final = 0.05  # probability that the true value is above its bound
_CURVE: Final = "curve "
_HEAD: Final = {"penstock": __version__, "schema": str(SCHEMA)}


# ---- the system


class MeasuredRun(Struct, frozen=True, kw_only=True):
    """One run under load. `cost_s` is the time it took, including warm-up and the change of settings."""

    run: Measurement
    cost_s: float

    @property
    def rate(self) -> float:
        """The offered requests per second."""
        return self.run.load.rate

    @property
    def throughput(self) -> float:
        """Good responses per second."""
        return self.run.throughput

    @property
    def late_share(self) -> float | None:
        """The share of latencies over the SLO's, among responses and timed-out requests, which percentiles count too.

        None if the SLO has no latency; 1 if there are no responses.
        """
        if self.run.too_slow is None:
            return None
        timed_out = self.run.errors.get("timeout", 0)
        counted = self.run.answered + timed_out
        return (self.run.too_slow + timed_out) / counted if counted else 1.0

    @property
    def invalid(self) -> str | None:
        """Why the run is INVALID; None if it is valid."""
        return "; ".join(self.run.invalid) or None

    def value(self, name: str) -> float | None:
        """The measured value of the SLO part `name`. A percentile with too few samples is replaced by the largest
        latency, which is an upper bound of it."""
        found = measured_value(name, self.run)
        return self.run.latency.max_s if found is None and name != "error" else found

    def violation(self, slo: Slo) -> str | None:
        """Which part of the SLO the run violates, as "p99 140 ms (wanted p99<=100ms)"; None if it meets the SLO."""
        if self.run.invalid:
            return f"invalid: {self.invalid}"
        for part in slo.bounds:
            value = self.value(part.name)
            if value is None or not part.met_by(value):
                return f"{part.name} {value_text(part.name, value)} (wanted {part.text})"
        return None

    def excess(self, slo: Slo) -> float:
        """The largest ratio of a measured value to its limit, ignoring throughput; infinite if invalid."""
        if self.invalid:
            return math.inf
        values = [(self.value(part.name), max(part.limit, 1e-9)) for part in slo.bounds]
        return max((math.inf if value is None else value / limit for value, limit in values), default=0.0)


def violated(slo: Slo, runs: Sequence[MeasuredRun], side: int) -> str | None:
    """Which part of the SLO the repeats violate together; None if they meet it.

    `side` 0 judges by the mean of the repeats; 1 and -1 by its upper and lower bound, each with 95 % confidence.

    The p99 of all repeats together is within the limit exactly if at most 1 % of all responses are late. The mean of
    the p99s is larger: a rare slow batch may dominate the p99 of one repeat and be absent from another.
    """
    which = {-1: "at least ", 0: "", 1: "up to "}[side]
    for part in slo.bounds:
        late = [share for r in runs if (share := r.late_share) is not None]
        if part.name == "p99" and part.limit == slo.latency_s and len(late) == len(runs):
            over = _bounded(late, math.sqrt(0.01 / max(1, runs[0].run.requests)), side)
            if over > 0.01:
                return f"{which}{over * 100:.2g} % of all responses are late (wanted {part.text})"
            if side > 0 and (count := sum(r.run.answered for r in runs)) < TELL_P99:
                return f"{count} responses are too few to decide (wanted {part.text}, which takes {TELL_P99})"
            continue
        value = _together(part, runs, side)
        if value is None or not part.met_by(value):
            return f"{part.name} {which}{value_text(part.name, value)} (wanted {part.text})"
    return None


def _together(part: Objective, runs: Sequence[MeasuredRun], side: int) -> float | None:
    """The value of the part over all repeats, or a bound of its mean."""
    if part.name == "error":
        requests = sum(r.run.requests for r in runs)
        return sum(sum(r.run.errors.values()) for r in runs) / requests if requests else None
    values = [value for r in runs if (value := r.value(part.name)) is not None]
    return _bounded(values, 0.0, side) if len(values) == len(runs) else None


def _bounded(values: Sequence[float], least: float, side: int) -> float:
    """The mean, or its bound with 95 % confidence by Student's t. The deviation is at least `least`, because a few
    values may agree by chance better than each is known."""
    mean = statistics.fmean(values)
    if side == 0:
        return mean
    deviation = max(statistics.stdev(values), least if mean else 0.0)
    return mean + side * student_at(2 * _CHANCE, len(values) - 1) * deviation / math.sqrt(len(values))


class BatchCurve(Struct, frozen=True, kw_only=True):
    """Batch times of one instance alone: (rows, seconds per batch), smallest first.

    `memory_bytes` is the memory of one instance after its largest batch, `limit_bytes` the memory for all instances.
    `cost_s` is the time that the measurement took.
    """

    points: tuple[tuple[float, float], ...]
    memory_bytes: int | None = None
    limit_bytes: int | None = None
    cost_s: float = 0.0

    def seconds(self, rows: float) -> float:
        """The time of a batch: interpolated between points, extrapolated beyond the last one."""
        points = self.points
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        at = next((i for i in range(1, len(points)) if rows <= points[i][0]), len(points) - 1)
        (n, t), (m, u) = points[at - 1], points[at]
        return t + (rows - n) * (u - t) / (m - n)

    def per_second(self, batch: float, within_s: float | None = None) -> float:
        """The most rows per second of one instance, in batches of at most `batch` rows that take at most `within_s`;
        0 if even one row takes longer."""
        sizes = {batch, *(n for n, _ in self.points if n < batch)}
        able = [n for n in sizes if within_s is None or self.seconds(n) <= within_s]
        return max((n / self.seconds(n) for n in able), default=0.0)


class SystemUnderTest(Protocol):
    """A server that runs under candidate settings. One thread calls it, calls may take long, and a PenstockError ends
    the tuning."""

    def refusal(self, settings: CandidateSettings) -> str | None:
        """Why these settings must not be used, before any load: different outputs, a missing device. None if they may.
        The same result each time."""

    def curve(self, settings: CandidateSettings) -> BatchCurve | None:
        """Batch times with these settings, whatever their `batch` and `instances`; None if unknown."""

    def prepare(self, settings: CandidateSettings) -> None:
        """Applies settings to the server, reloading only what they require.

        Raises LoadFailed if the model cannot run with them: the search rules them out and goes on.
        """

    def measure(self, settings: CandidateSettings, rate: float, seconds: float, seed: int) -> MeasuredRun:
        """An open loop of `rate` requests per second, after a warm-up. The same seed gives the same arrivals."""

    def saturate(self, settings: CandidateSettings, seconds: float, seed: int) -> MeasuredRun:
        """A closed loop with enough clients to fill every batch: `throughput` is the maximum."""

    def close(self) -> None:
        """Stops the server."""


# ---- the journal


class JournalEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measurement. `key` says what was asked for; `failed` is the reason for having no result."""

    key: str
    measured: MeasuredRun | None = field(default=None, name="reading")
    curve: BatchCurve | None = None
    failed: str = ""
    cost_s: float = 0.0


class _Head(Struct):
    run: dict[str, str]


class Journal:
    """Measurements by key. Without a file they are in memory only."""

    def __init__(self, path: Path = Path(), file: io.FileIO | None = None) -> None:
        self._path, self._file = path, file
        self._entries: dict[str, JournalEntry] = {}

    @classmethod
    @contextmanager
    def open(cls, path: Path, run: Mapping[str, str]) -> Iterator[Self]:
        """The journal at `path` of the search that `run` describes (target, space, slo, seed ...), open in the block.

        Raises ConfigError if the file belongs to another search or version, is not a journal, or is in use; NotWritten.
        """
        head = _HEAD | dict(run)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open_locked(path)
        with file:
            journal = cls(path, file)
            journal._entries, whole = _read(path, path.read_bytes(), head)
            with writing(path):
                file.truncate(whole)
                file.seek(whole)
            if not whole:
                journal._append(msgspec.json.encode(_Head(head)))
            yield journal

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> JournalEntry | None:
        """The measurement of this key, if there is one."""
        return self._entries.get(key)

    def add(self, entry: JournalEntry) -> None:
        """Keeps a measurement; it is on disk when this returns. Raises NotWritten."""
        self._append(msgspec.json.encode(entry))
        self._entries[entry.key] = entry

    def _append(self, line: bytes) -> None:
        if self._file is not None:
            with writing(self._path):
                append_line(self._file, line)


def _read(path: Path, content: bytes, head: Mapping[str, str]) -> tuple[dict[str, JournalEntry], int]:
    """All complete entries, and the bytes they take with the head. An incomplete last line is dropped. So are INVALID
    runs after the last valid one, because the cause may be gone."""
    entries: dict[str, JournalEntry] = {}
    invalid: dict[str, JournalEntry] = {}  # since the last valid entry
    start = kept = number = 0
    while (end := content.find(b"\n", start)) >= 0:
        number += 1
        line = content[start:end]
        try:
            if number == 1:
                _check_head(path, msgspec.json.decode(line, type=_Head).run, head)
            else:
                entry = msgspec.json.decode(line, type=JournalEntry)
                invalid[entry.key] = entry
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}, line {number}: not a line of a journal ({e}); name another folder") from None
        start = end + 1
        if number == 1 or entry.measured is None or not entry.measured.invalid:
            entries.update(invalid)
            invalid.clear()
            kept = start
    if start < len(content):
        log.warning("file=%s bytes=%d dropped=true reason=the last line was cut short", path, len(content) - start)
    return entries, kept


def curves(folder: Path) -> dict[str, BatchCurve]:
    """The batch curves that a search has measured, by their settings ("" for none). Raises ConfigError."""
    path = folder / JOURNAL
    try:
        lines = path.read_bytes().split(b"\n")[1:-1]
        entries = [msgspec.json.decode(line, type=JournalEntry) for line in lines]
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror or e}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not a journal of `penstock tune`: {e}") from None
    return {e.key.removeprefix(_CURVE): e.curve for e in entries if e.curve is not None and e.key.startswith(_CURVE)}


def _check_head(path: Path, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for name in dict.fromkeys([*expected, *found]):
        was, now = found.get(name, ""), expected.get(name, "")
        if was != now:
            raise ConfigError(
                f'{path} belongs to another run: its {name} is "{was}", now it is "{now}"; name another folder, or'
                " start over with --no-resume"
            )


# ---- the runner

RunObserver = Callable[[CandidateSettings, MeasuredRun, bool, float], None]
"""Receives each run, whether it is replayed from the journal, and the seconds spent so far."""


def single_instance(settings: CandidateSettings) -> CandidateSettings:
    """The part of the settings that affects one instance alone."""
    kept = [item for item in settings.items if item[0] not in LOAD_PARAMETERS and not item[0].startswith("batching.")]
    return CandidateSettings(tuple(kept))


class BudgetExhausted(Exception):
    """The time for measuring is used up."""


class Infeasible(Exception):
    """The model cannot run with these settings; the text is the reason."""


class TrialRunner:
    """A search's only access to the system under test: it replays the journal, counts the time and ends at the budget.

    `spent_s` is the cost of all measurements, replayed ones included, so a resumed search makes the same decisions.
    `limit_s` may change; `reserved_s` returns the part of it to reserve, as far as is known now.
    """

    def __init__(
        self,
        system: SystemUnderTest,
        journal: Journal,
        *,
        seed: int = 0,
        limit_s: float = math.inf,
        observer: RunObserver | None = None,
    ) -> None:
        self.system, self.limit_s, self.spent_s = system, limit_s, 0.0
        self._journal, self._seed, self._observer = journal, seed, observer
        self.reserved_s: Callable[[], float] = lambda: 0.0
        self._asked = 0
        self._last: CandidateSettings | None = None
        self._changes: list[float] = []
        self._curves: dict[CandidateSettings, BatchCurve | None] = {}

    @property
    def change_s(self) -> float:
        """The mean time that a run takes beyond its own seconds after a change of settings; 0 without a change."""
        return statistics.fmean(self._changes) if self._changes else 0.0

    def curve(self, settings: CandidateSettings) -> BatchCurve | None:
        """The batch curve of one instance with these settings. Raises BudgetExhausted."""
        family = single_instance(settings)
        if family not in self._curves:
            self._check_budget()
            entry = self._journal.get(key := f"{_CURVE}{family}")
            if entry is None:
                found = self.system.curve(family)
                entry = JournalEntry(key=key, curve=found, cost_s=found.cost_s if found else 0.0)
                self._journal.add(entry)
            self.spent_s += entry.cost_s
            self._curves[family] = entry.curve
        return self._curves[family]

    def measure(self, settings: CandidateSettings, rate: float, seconds: float) -> MeasuredRun:
        """One open loop, repeated once if it was INVALID. Raises BudgetExhausted, Infeasible."""
        what = f"open {settings} rate={rate:g} seconds={seconds:g}"

        def measure(seed: int) -> MeasuredRun:
            return self.system.measure(settings, rate, seconds, seed)

        measured = self._ask(what, settings, measure)
        return self._ask(what, settings, measure) if measured.invalid else measured

    def saturate(self, settings: CandidateSettings, seconds: float) -> MeasuredRun:
        """One closed loop. Raises BudgetExhausted, Infeasible."""
        what = f"closed {settings} seconds={seconds:g}"
        return self._ask(what, settings, lambda seed: self.system.saturate(settings, seconds, seed))

    def _ask(self, what: str, settings: CandidateSettings, measure: Callable[[int], MeasuredRun]) -> MeasuredRun:
        self._check_budget()
        self._asked += 1
        seed = self._seed * 100_003 + self._asked
        entry = self._journal.get(key := f"{self._asked} {what} seed={seed}")
        replayed = entry is not None
        if entry is None:
            entry = self._measured(key, settings, seed, measure)
            self._journal.add(entry)
        self.spent_s += entry.cost_s
        if entry.measured is None:
            raise Infeasible(entry.failed)
        if settings != self._last:
            self._last = settings
            self._changes.append(entry.cost_s - entry.measured.run.load.seconds)
        if self._observer is not None:
            self._observer(settings, entry.measured, replayed, self.spent_s)
        return entry.measured

    def _check_budget(self) -> None:
        if self.spent_s >= self.limit_s - self.reserved_s():
            raise BudgetExhausted

    def _measured(
        self, key: str, settings: CandidateSettings, seed: int, measure: Callable[[int], MeasuredRun]
    ) -> JournalEntry:
        started = time.monotonic()
        try:
            self.system.prepare(settings)
            measured = measure(seed)
        except LoadFailed as e:
            return JournalEntry(key=key, failed=e.message, cost_s=round(time.monotonic() - started, 1))
        return JournalEntry(key=key, measured=measured, cost_s=measured.cost_s)
