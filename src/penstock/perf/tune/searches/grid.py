"""Grid: every setting that is not ruled out gets a rate of its own. Slow, and misses nothing."""

from __future__ import annotations

from penstock.perf.tune.field import Field


def grid(field: Field) -> None:
    """Measures all, cheaper ones first."""
    for settings in field.open():
        field.settle(settings)
