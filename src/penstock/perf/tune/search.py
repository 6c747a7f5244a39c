"""The strategies of a search by name. Each is a function of a `Field`, in a file of its own under `searches/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from penstock.errors import ConfigError, nearest
from penstock.perf.tune.field import Field
from penstock.perf.tune.searches import tpe
from penstock.perf.tune.searches.auto import auto
from penstock.perf.tune.searches.climb import climb
from penstock.perf.tune.searches.grid import grid
from penstock.perf.tune.searches.halving import halving

Strategy = Callable[[Field], None]

STRATEGIES: Final[Mapping[str, Strategy]] = {
    "auto": auto,
    "grid": grid,
    "climb": climb,
    "halving": halving,
    "tpe": tpe.tpe,
}


def strategy(name: str) -> Strategy:
    """The strategy of that name. Raises ConfigError if there is none, or what it needs is not installed."""
    if name not in STRATEGIES:
        raise ConfigError(f"there is no search '{name}'{nearest(name, STRATEGIES)} Known: {', '.join(STRATEGIES)}")
    if name == "tpe":
        tpe.check()
    return STRATEGIES[name]
