"""What becomes of an item: its fields, or why it failed, and the way it took."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from penstock.errors import PenstockError


class Hop(Struct, frozen=True):
    """One node on an item's way: the batch it was in, that batch's items, seconds in the queue and in the batch."""

    node: str
    batch_id: int
    size: int
    wait_s: float
    run_s: float


class Outcome(Struct, frozen=True):
    """The end of one item.

    `fields` are those that the last node left it with, `result` among them unless a filter ended it before; if it
    failed, those that it had before. `node` is where it ended.
    """

    fields: dict[str, Any]
    error: PenstockError | None = None
    node: str = ""
    hops: tuple[Hop, ...] = ()
