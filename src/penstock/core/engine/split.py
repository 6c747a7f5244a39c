"""TrafficSplit: which version answers the next request that names none, by smooth weighted round robin: no lots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct


class Choice(Protocol):
    """One version."""

    @property
    def ready(self) -> bool:
        """True while a worker is up to answer."""
        ...


T = TypeVar("T", bound=Choice)


class _Share(Struct, eq=False):
    handle: Any
    weight: float
    credit: float = 0.0


class TrafficSplit(Generic[T]):
    """Shares of versions, by weight. Of any n requests in a row each version gets its part, give or take one or two.

    Every turn gives each version its weight as credit; the richest is taken, and pays for all.
    """

    def __init__(self, weights: Mapping[str, float], handles: Mapping[str, T]) -> None:
        self.weights = dict(weights)
        self._shares = [_Share(handles[version], weight) for version, weight in weights.items() if weight > 0]

    def next(self) -> T:
        """The version for one request. One that has no worker up is passed over while another has."""
        shares = [s for s in self._shares if s.handle.ready] or self._shares
        total = 0.0
        best = shares[0]
        for share in shares:
            share.credit += share.weight
            total += share.weight
            if share.credit > best.credit:
                best = share
        best.credit -= total
        found: T = best.handle
        return found

    def replace(self, old: T, new: T) -> None:
        """`new` goes on in the place of `old`."""
        for share in self._shares:
            if share.handle is old:
                share.handle = new
