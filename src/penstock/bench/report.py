"""The report of a folder of results, as text: the verdict first, then what it rests on."""

from __future__ import annotations

from msgspec import Struct, field


class RunnerUp(Struct, frozen=True, kw_only=True):
    """Settings that were not chosen, and why not: in words, with numbers."""

    settings: str
    why: str


class Step(Struct, frozen=True, kw_only=True):
    """One look of a search: settings, what they were found to bear (good answers a second; None when they were ruled
    out without), whether that was within the SLO, and how long the search had measured when it knew."""

    settings: str
    goodput: float | None = None
    met: bool | None = None
    elapsed_s: float = 0.0


class Verdict(Struct, frozen=True, kw_only=True):
    """What tuning came to. Settings are their canonical text, "batch=8,instances=2", as in `Measurement.label`.

    `met` False: nothing tried keeps the SLO, and `chosen` is only what comes nearest. `gain` is goodput over that of
    `default`, less one (0.4: 40 % more), within `interval` with 95 % confidence; None where the default has none.
    `command` reproduces the search, `cost_per_million` is the price of a million requests, in the unit of --price.
    """

    slo: str
    chosen: str
    default: str
    met: bool = True
    goodput: float | None = None
    default_goodput: float | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    command: str = ""
    cost_per_million: float | None = None
    runners_up: list[RunnerUp] = field(default_factory=list)
    trajectory: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
