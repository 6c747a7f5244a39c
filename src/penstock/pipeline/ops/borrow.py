"""BorrowReplay: rows that wait in a pool until another item's batch has room for them."""

from typing import Any

import numpy as np
from msgspec import Struct

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.ops.base import Array, Fields, ItemOp, found

TYPES = ("borrow_or_insert", "borrow_all", "set_replay", "get_replay", "reset")


class _Part(Struct):
    """Rows `start` to `end` of the tensors of item `owner`, and their replay."""

    owner: Any
    tensors: list[Array]
    start: int
    end: int
    replay: Any = None


class BorrowReplay(ItemOp):
    """Lends rows of waiting items to others, and returns their results: TorchPipe's pool, one for each instance.

    The field `borrow_type` is one of:
    - "borrow_or_insert": puts the data, a list of tensors with equal rows, into the pool if it has room, without a
      result. Otherwise the result is the rows that fill the batch, as a list of lists of tensors.
    - "borrow_all": the result is all rows of the pool, which is empty then.
    - "set_replay": the data has the results of the parts that the item `id` borrowed, in their order. No result.
    - "get_replay": the result is those of the rows of the item `id`, in their order.
    - "reset": empties the pool. No result.

    - `max_batch_size`: rows of a full batch.
    """

    reads = ("borrow_type", "id")

    def __init__(self, max_batch_size: int) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size = {max_batch_size}, expected 1 or more")
        self.most = max_batch_size
        self._pool: list[_Part] = []
        self._borrowed: dict[Any, list[_Part]] = {}

    def __call__(self, data: Any, fields: Fields) -> Any:
        """The result, or None for no result. Raises BadRequest."""
        kind, owner = fields.get("borrow_type"), fields.get("id")
        if kind not in TYPES or not isinstance(owner, int | str | None):
            raise BadRequest(f"BorrowReplay found borrow_type {kind!r} and id {owner!r}, expected {', '.join(TYPES)}")
        if kind == "reset":
            self._pool, self._borrowed = [], {}
        elif kind == "borrow_all":
            return self._borrow(owner, sum(part.end - part.start for part in self._pool))
        elif kind == "get_replay":
            return self._replays(owner)
        elif kind == "set_replay":
            parts = self._borrowed.get(owner, [])
            if not isinstance(data, list | tuple) or len(data) != len(parts):
                raise BadRequest(f"BorrowReplay found {found(data)}, expected a result for each of {len(parts)} parts")
            for part, replay in zip(parts, data, strict=True):
                part.replay = replay
        else:
            return self._borrow_or_insert(data, owner)
        return None

    def _borrow_or_insert(self, data: Any, owner: Any) -> list[list[Array]] | None:
        tensors = list(data) if isinstance(data, list | tuple) else []
        rows = {len(one) if isinstance(one, np.ndarray) and one.ndim else -1 for one in tensors}
        count = rows.pop() if len(rows) == 1 else -1
        if not 0 < count < self.most:
            raise BadRequest(f"BorrowReplay found {found(data)}, expected tensors with 1 to {self.most - 1} rows each")
        if sum(part.end - part.start for part in self._pool) + count >= self.most:
            return self._borrow(owner, self.most - count)
        self._pool.append(_Part(owner, tensors, 0, count))
        return None

    def _borrow(self, owner: Any, rows: int) -> list[list[Array]]:
        """Takes rows from the pool, oldest first."""
        taken: list[_Part] = []
        while rows and self._pool:
            part = self._pool[0]
            end = min(part.end, part.start + rows)
            taken.append(_Part(part.owner, part.tensors, part.start, end))
            rows -= end - part.start
            part.start = end
            if part.start == part.end:
                del self._pool[0]
        self._borrowed[owner] = taken
        return [[tensor[part.start : part.end] for tensor in part.tensors] for part in taken]

    def _replays(self, owner: Any) -> list[Any]:
        parts = [part for parts in self._borrowed.values() for part in parts if part.owner == owner]
        if not parts or any(part.replay is None for part in parts):
            raise BadRequest(f"BorrowReplay has no replay of the rows of item {owner!r} yet")
        return [part.replay for part in sorted(parts, key=lambda part: part.start)]
