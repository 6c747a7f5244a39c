"""Penstock on Ray: `deployment` for Ray Serve. Workers on a cluster need no import: `transport = "ray"`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.ray.deploy import deployment as deployment

__all__ = ["deployment"]


def __getattr__(name: str) -> object:
    """Loads what only a program with a deployment needs, and no worker."""
    if name not in __all__:
        raise AttributeError(f"module 'penstock.ray' has no attribute {name!r}")
    from penstock.ray.deploy import deployment

    return deployment
