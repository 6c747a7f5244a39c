"""Models that the benchmarks serve."""

from __future__ import annotations

from typing import Any


def echo(items: list[Any]) -> list[Any]:
    """Returns what it is given."""
    return items
