"""What a wire protocol is: bytes <-> values, and nothing else."""

from __future__ import annotations

from typing import Any, Protocol

from penstock.types import Item, ItemResult


class Codec(Protocol):
    """Turns the body of an Item into what `predict` receives, and what it returned into an ItemResult.

    Lives in the worker. One object serves all requests of one model, so it keeps no state between calls.
    """

    def decode(self, item: Item) -> tuple[Any, Any]:
        """(value for `predict`, context for `encode`). Raises BadRequest; the item then fails alone."""
        ...

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The answer as it goes out. Raises BadOutput when the value cannot be serialised."""
        ...

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """One answer from the answers to the parts of a split request, in row order. Called in the front process."""
        ...
