"""TrafficSplit: which version answers the next request that names none, by smooth weighted round robin: no lots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from penstock.engine.handle import ModelHandle


class _Share(Struct, eq=False):
    handle: ModelHandle
    weight: float
    credit: float = 0.0


class TrafficSplit:
    """Shares of versions, by weight. Of any n requests in a row each version gets its part, give or take one or two.

    Every turn gives each version its weight as credit; the richest is taken, and pays for all.
    """

    def __init__(self, weights: Mapping[str, float], handles: Mapping[str, ModelHandle]) -> None:
        self.weights = dict(weights)
        self._shares = [_Share(handles[version], weight) for version, weight in weights.items() if weight > 0]

    def next(self) -> ModelHandle:
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
        return best.handle

    def replace(self, old: ModelHandle, new: ModelHandle) -> None:
        """`new` goes on in the place of `old`."""
        for share in self._shares:
            if share.handle is old:
                share.handle = new
