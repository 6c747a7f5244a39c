"""Which regions of shared memory requests in flight name, so that a region in use stays registered.

Between listeners and engine, because a request is in flight from its arrival to its answer, also while it waits.
"""

import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import Any, Final

import msgspec

from penstock.core.contracts import Backend, Ticket
from penstock.serving.protocols.oip_messages import HEADER_BYTES
from penstock.types import Item, ItemResult, Sink

_IN_JSON: Final = re.compile(rb'"shared_memory_region"\s*:\s*("(?:[^"\\]|\\.)*")', re.DOTALL)
# an entry of a map of InferParameter: its key, the size of its value, and the size of the text in that
_SIZE: Final = rb"([\0-\x7f]|[\x80-\xff]\x01)"
_IN_MESSAGE: Final = re.compile(rb"\x14shared_memory_region\x12%b\x1a%b" % (_SIZE, _SIZE), re.DOTALL)


def regions_of(item: Item) -> Sequence[str]:
    """The regions that an Open Inference request names in its JSON, or in its first 64 KiB."""
    if not item.codec.startswith("oip_"):
        return ()
    head = getattr(item.payload, "view", item.payload)[: item.head_bytes or HEADER_BYTES]
    try:
        if item.codec != "oip_grpc":
            return [msgspec.json.decode(found[1]) for found in _IN_JSON.finditer(head)]
        ends = [(m.end(), m.end() + m[2][0] % 128 + 128 * (len(m[2]) - 1)) for m in _IN_MESSAGE.finditer(head)]
        return [str(head[start:end], "utf-8") for start, end in ends]
    except (msgspec.DecodeError, UnicodeDecodeError):  # the worker reports the error
        return ()


class RegionUses:
    """A Backend before another one: it counts the uses of the `regions`, by name, in requests in flight."""

    def __init__(self, backend: Backend, regions: Callable[[], Container[str]], counts: Counter[str]) -> None:
        self._backend, self._regions, self._counts = backend, regions, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, model: str, version: str | None, item: Item, sink: Sink) -> Ticket:
        """See `Backend.submit`."""
        known = self._regions()
        used = [name for name in regions_of(item) if name in known] if known else []
        if not used:
            return self._backend.submit(model, version, item, sink)
        self._counts.update(used)

        def free() -> None:
            while used:
                self._counts[used.pop()] -= 1

        def answered(result: ItemResult) -> None:
            if result.final:
                free()  # first: a client with its answer may unregister the region
            sink(result)

        try:
            return _Use(self._backend.submit(model, version, item, answered), free)
        except BaseException:
            free()
            raise


class _Use:
    """The ticket of a request that names regions."""

    def __init__(self, ticket: Ticket, free: Callable[[], None]) -> None:
        self._ticket, self._free = ticket, free

    def cancel(self) -> None:
        self._free()
        self._ticket.cancel()
