"""The strategies of a search by name. Each is a function of a `Field`, in a file of its own under `searches/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from penstock.errors import ConfigError, nearest
from penstock.tune.field import Field
from penstock.tune.searches import tpe
from penstock.tune.searches.auto import auto
from penstock.tune.searches.climb import climb
from penstock.tune.searches.grid import grid
from penstock.tune.searches.halving import halving

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
