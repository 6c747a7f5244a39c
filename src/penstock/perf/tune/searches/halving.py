"""Halving: all get one short look, the better third a longer one, of those the better third a longer one still."""

from __future__ import annotations

from typing import Final

from penstock.perf.tune.field import Field
from penstock.perf.tune.meter import Unfit
from penstock.perf.tune.space import Settings

_MOST: Final = 64  # settings that begin; of larger spaces so many are drawn
_RUNGS: Final = (0.3, 0.12, 0.05)  # how well the rate is known, from rung to rung
_KEPT: Final = 3  # one in so many goes on


def halving(field: Field) -> None:
    """The first look is a closed loop, which tells how much settings can do, if not how soon."""
    found = field.open()
    if len(found) > _MOST:
        found = sorted(field.rng.sample(found, _MOST), key=field.space.cost)
    scores = {settings: _able(field, settings) for settings in found}
    for precision in _RUNGS:
        kept = sorted(scores, key=lambda s: -scores[s])[: max(3, -(-len(scores) // _KEPT))]
        scores = {settings: field.measure(settings, precision).estimate for settings in kept}


def _able(field: Field, settings: Settings) -> float:
    """Requests a second, in batches that the SLO allows."""
    try:
        found = field.meter.saturate(settings, field.effort.probe_s).throughput
    except Unfit as e:
        field.trial(settings).out = str(e)
        return 0.0
    bound = field.bound(settings)
    return found if bound is None else min(found, bound)
