"""Climb: from a good start to a better neighbour, until none is. Beside it, a look at what is promising elsewhere."""

from __future__ import annotations

from typing import Final

from penstock.perf.tune.field import Field
from penstock.perf.tune.space import Settings, Value

_MOVES: Final = 200  # more only go in circles, by noise
_LOSSES: Final = 6  # in a row: then what is promising has been seen
_CLOSE: Final = 0.9  # of the best rate: from there the way may go on, too
_OTHERS: Final = 1  # of those that close


def climb(field: Field) -> None:
    """From the settings that promise most with a middling number of instances, by steps in one knob."""
    for start in _starts(field):
        if not field.measure(start).out:  # an SLO may be out of reach here and not elsewhere
            break
    _ascend(field)


def look(field: Field) -> None:
    """Challengers from anywhere, the most promising first, until some in a row lose; who wins is climbed from."""
    losses, tried = 0, set[Settings]()
    while losses < _LOSSES:
        left = [settings for settings in field.open() if settings not in tried and field.can_win(settings)]
        if not left:
            return
        tried.add(found := max(left, key=field.guess))
        won = field.challenge(found)
        losses = 0 if won else losses + 1
        if won:
            _ascend(field)


def _starts(field: Field) -> list[Settings]:
    """Where to begin, the best place first: the middle of all numbers of instances, and the most promising there."""
    found = field.open()
    counts = sorted({_number(settings.get("instances", 1)) for settings in found})
    if not counts:
        return []
    middle = counts[len(counts) // 2]

    def merit(settings: Settings) -> tuple[bool, float]:
        return _number(settings.get("instances", 1)) == middle, field.promise(settings) or 0.0

    return sorted(found, key=merit, reverse=True)


def _ascend(field: Field) -> None:
    """To better neighbours. A long run tells what won by a lucky probe; then those that it beat are asked again, and at
    last the neighbours of those that it passed on its way and are nearly as good."""
    settled = set[Settings]()
    for _ in range(_MOVES):
        best = field.best
        if best is None:
            return
        if _beaten(field, best.settings):
            continue
        if best.settings not in settled:
            settled.add(best.settings)
            field.settle(best.settings)
            continue
        close = [t.settings for t in field.ranked() if t is not best and t.estimate >= _CLOSE * best.rate]
        if not any(_beaten(field, other) for other in close[:_OTHERS]):
            return


def _beaten(field: Field, settings: Settings) -> bool:
    """Whether a neighbour of these is the best now, the most promising asked first."""
    near = sorted(field.space.neighbours(settings), key=field.guess, reverse=True)
    return any(field.challenge(other) for other in near)


def _number(value: Value | None) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
