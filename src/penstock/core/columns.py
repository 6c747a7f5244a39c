"""Tensors of a batch in columns: one array for all requests that have the same plan.

Requests with the same plan (names, datatypes, and shapes without axis 0) are decoded by one copy of their bytes into a
`Block`, and each of them becomes a range of its rows. The results of a call are a block too, of which each request gets
its range, so that a codec encodes a whole block at once. A codec that can do this is a `ColumnCodec`. It learns the
plan of a request from its decoded form, under the bytes that say everything but the values, and recognizes these bytes
in later requests. Whatever is irregular is decoded alone, which also words all errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import Struct, field

if TYPE_CHECKING:
    import numpy as np

    Arrays = dict[str, np.ndarray[Any, Any]]

# choices: a client whose requests all differ must not fill the memory
MOST_PLANS: Final = 256  # that a codec remembers
MOST_KEY_BYTES: Final = 2048  # of what identifies a plan


class Block(Struct, eq=False):
    """Name -> array `[rows, ...]` of several requests. `forms`: what codecs have made of the whole block.
    `placed`: the arrays are memory of the model's program."""

    arrays: Arrays
    rows: int
    forms: dict[Any, Any] = field(default_factory=dict)
    placed: bool = False

    def slices(self, start: int, rows: int) -> Arrays:
        """Views of a range of rows."""
        if rows == self.rows:
            return self.arrays
        return {name: array[start : start + rows] for name, array in self.arrays.items()}


class TensorRequest(Struct, eq=False):
    """A checked request: a range of rows of a block.

    `single`: one row without a row axis; `named`: the result is a dict; `planned`: the result is `TensorRows`, because
    its codec encodes blocks.
    """

    block: Block
    start: int
    rows: int
    single: bool
    named: bool
    planned: bool = False

    @property
    def arrays(self) -> Arrays:
        """Its own arrays."""
        return self.block.slices(self.start, self.rows)


class TensorRows(Struct, eq=False):
    """The result of a request: a range of rows of a block of outputs. See `TensorRequest`."""

    block: Block
    start: int
    rows: int
    single: bool
    named: bool

    def plain(self) -> Any:
        """A dict of output name to array, or the array of the only output."""
        found: Any = self.block.slices(self.start, self.rows)
        if self.single:
            found = {name: array[0] for name, array in found.items()}
        return found if self.named or len(found) != 1 else next(iter(found.values()))


Data = bytes | bytearray | memoryview
Empty = Callable[[tuple[int, ...], Any], Any]
"""Makes an uninitialised array of a shape and a dtype."""


class Stack(Protocol):
    """A plan, and the form of its values. Codecs keep one object for all of their requests with this plan."""

    def block(self, requests: Sequence[PlannedRequest], rows: int, empty: Empty | None = None) -> Block:
        """The block of these requests, of `rows` rows in all; its values are written into arrays of `empty`, if it is
        given. Any exception: one of the requests is irregular."""


class RequestPlan(Struct, eq=False):
    """What a codec remembers of requests whose bytes differ in values and ids only.

    `sizes`: of each input, two numbers of its codec. `size`: the bytes that hold them. `context`: as of `decode`.
    `key`: what its responses depend on.
    """

    stack: Stack
    rows: int
    single: bool
    named: bool
    sizes: Sequence[tuple[int, int]]
    size: int = 0
    context: Any = None
    key: bytes = b""


class PlannedRequest(Struct, eq=False):
    """A request whose plan is known: the data of each input, the number of rows, and its own id."""

    plan: RequestPlan
    parts: Sequence[Data]
    rows: int
    id: str | None = None


class ColumnCodec(Protocol):
    """A codec that decodes and encodes in columns."""

    def recognize(self, items: Sequence[Any]) -> Sequence[PlannedRequest | None]:
        """The requests; None for one whose plan is not known. A request is also the context for `encode`, with a value
        that is `TensorRows`."""

    def learn(self, item: Any, value: Any, context: Any, check: Callable[[Any], TensorRequest]) -> None:
        """Remembers the plan of a request that `decode` read as this value and context, if `check` takes the value."""

    def encode_all(self, values: Sequence[Any], items: Sequence[Any], requests: Sequence[PlannedRequest]) -> list[Any]:
        """As of `encode`, for recognized requests. Any exception: one of the values is irregular."""


class PlanMemory(dict[Any, Any]):
    """The plans of a codec, under what identifies them; empties itself when it is full."""

    def keep(self, key: Any, plan: Any) -> None:
        """Remembers a plan."""
        if len(self) >= MOST_PLANS:
            self.clear()
        self[key] = plan
