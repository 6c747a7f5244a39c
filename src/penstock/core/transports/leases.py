"""What a worker knows of the request slabs that its model may look at: who still does, after the answer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

Lease = tuple[int, "weakref.ref[Any]"]
"""Offset of a request slab, and whether somebody looks at it."""


class Held:
    """The slabs that a model kept beyond its answer."""

    def __init__(self) -> None:
        self._held: list[Lease] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    @property
    def offsets(self) -> set[int]:
        """Those that were held when it was looked at last."""
        return {offset for offset, _ in self._held}

    def after(self, leases: list[Lease], collect: bool = True) -> tuple[list[int], list[int]]:
        """An answer was made, of a batch with these leases: the offsets that are held of them, and those that were held
        and are no more. `collect`: what only the garbage collector can free is not held."""
        held = _alive(leases)
        if held and collect:
            gc.collect(1)
            held = _alive(held)
        kept = _alive(self._held)
        let_go = {offset for offset, _ in self._held} - {offset for offset, _ in kept}
        self._held = kept + held
        return [offset for offset, _ in held], list(let_go)


def _alive(leases: list[Lease]) -> list[Lease]:
    return [(offset, ref) for offset, ref in leases if ref() is not None]
