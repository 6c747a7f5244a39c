"""Op: one step of a pipeline's node. Rows in = rows out, and an item that fails, fails alone.

An op is made once for each instance of its node, and called in that instance's thread only. The keyword parameters of
its `__init__`, with annotations and defaults, are the keys that a node may set for it: there is no other list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

Fields = dict[str, Any]
"""What is known of one item, by name. `data` is what the op is given, `result` what it gave; others are free."""

DATA, RESULT, BOX, NODE_NAME, CONTEXT, EVENT = "data", "result", "_box", "node_name", "context", "event"
"""Names of fields with a meaning, spelled as TorchPipe's keys are."""


class Op:
    """What every op declares of itself.

    `reads` and `writes` are fields beside `data` and `result`; `writes = None` says that it may write any. `takes` and
    `gives` are kinds of `data` and `result`: "bytes" (an encoded image), "mat" (an array `[height, width, channels]`
    or `[height, width]`, uint8 or float32), "tensor" (an array whose axis 0 is rows, 1 for one item: `[1, ...]`), or
    "any".
    """

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...] | None] = ()
    takes: ClassVar[str] = "any"
    gives: ClassVar[str] = "any"
    brackets: ClassVar[str] = ""  # the parameter that text in brackets sets, as in Python[pkg.mod:Class]
    wraps: ClassVar[bool] = False  # whether ops may stand in its brackets, which are run before it: Result2Key[X]

    def load(self, device: str) -> None:
        """Called once, in the instance's thread, before the first item. `device` is "cpu", "cuda:0" ..."""

    def unload(self) -> None:
        """Called once, when the instance ends in order."""

    def note(self) -> str:
        """What a user should know of the op as it is configured, in one line for `penstock pipeline check`; or ""."""
        return ""


class ItemOp(Op):
    """An op that looks at one item. Those of a node that follow each other become one call."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        """The result of one item. It may look at and set other fields. Raises what that item fails with."""
        raise NotImplementedError


class BatchOp(Op):
    """An op that looks at many items at once: a model."""

    max_rows: int | None = None  # the most it can take, known once it is loaded; None: any number

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        """A result for each item, in their order; an exception in place of one fails that item alone. What it raises is
        every item's, unless the node may be run again in halves."""
        raise NotImplementedError
