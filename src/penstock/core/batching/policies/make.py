"""The policy of a name."""

from __future__ import annotations

from penstock.core.batching.policies.adaptive import Adaptive
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.fixed import DEFAULT_DELAY_S, Fixed
from penstock.core.batching.policies.none import Unbatched
from penstock.errors import ConfigError, nearest


def make_policy(name: str, *, max_hold_s: float | None, slo_s: float | None, timeout_s: float) -> BatchPolicy:
    """The policy of that name; `max_hold_s` None is "auto". Raises ConfigError for an unknown name."""
    if name == "adaptive":
        return Adaptive(max_hold_s)
    if name == "fixed":  # a delay as long as the target would only produce late answers
        return Fixed(min(DEFAULT_DELAY_S, (slo_s or timeout_s) / 2) if max_hold_s is None else max_hold_s)
    if name == "none":
        return Unbatched()
    known = ("adaptive", "fixed", "none")
    raise ConfigError(f"unknown batching policy '{name}', expected one of {', '.join(known)}{nearest(name, known)}")
