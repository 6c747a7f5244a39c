"""Climb: from a good start to a better neighbour, until none is. Beside it, a look at what is promising elsewhere."""

from __future__ import annotations

from typing import Final

from penstock.tune.field import Field
from penstock.tune.space import Settings, Value

_MOVES: Final = 200  # more only go in circles, by noise
_LOSSES: Final = 6  # in a row: then what is promising has been seen


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
    """To better neighbours. A long run tells what won by a lucky probe; then those that it beat are asked again."""
    settled = set[Settings]()
    for _ in range(_MOVES):
        best = field.best
        if best is None:
            return
        near = sorted(field.space.neighbours(best.settings), key=field.guess, reverse=True)
        if any(field.challenge(settings) for settings in near):
            continue
        if best.settings in settled:
            return
        settled.add(best.settings)
        field.settle(best.settings)


def _number(value: Value | None) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
