"""Auto: all settings when they are few; else a climb, and a look at what is promising elsewhere."""

from __future__ import annotations

from typing import Final

from penstock.perf.tune.field import Field
from penstock.perf.tune.searches.climb import climb, look
from penstock.perf.tune.searches.grid import grid

_FEW: Final = 6


def auto(field: Field) -> None:
    """What is best when nothing is known of the model."""
    if len(field.open()) <= _FEW:
        grid(field)
    else:
        climb(field)
        look(field)
