"""Filters that a program registers for its nodes: each decides for an item whether the node runs it."""

from collections.abc import Callable
from typing import Any

Filter = Callable[[dict[str, Any]], str]
"""Takes a copy of an item's fields, which it may change for the node, and returns one of OUTCOMES."""

OUTCOMES = ("run", "skip", "serial_skip", "subgraph_skip", "break", "error")
"""The item runs; passes the node unchanged, or all nodes of its chain, or of its sub-graph; ends here; or fails."""

_registered: dict[str, Callable[[], Filter]] = {}


def register(name: str, make: Callable[[], Filter]) -> None:
    """Registers a filter in this process, replacing any other of the name. Each node makes its own."""
    _registered[name] = make


def is_known(name: str) -> bool:
    """Whether a filter of this name is registered."""
    return name in _registered


def made(name: str) -> Filter | None:
    """A filter of this name; None for a built-in one."""
    return _registered[name]() if name in _registered else None
