"""Messages through Ray: the head as bytes, large buffers as arrays, which Ray keeps out of band in its object store."""

from typing import Any, NoReturn

import msgspec
import numpy as np

from penstock.core.wire.messages import Buffer, Frame, MessageReader, MessageWriter, PartMessage, head_of, sendable
from penstock.core.wire.slabs import Slab
from penstock.types import Item

Message = tuple[bytes, list[Any]]
"""(head, buffers): one message as an argument or a result of an actor's method."""


class RayWriter(MessageWriter):
    """The payloads of a message through Ray, which copies them once, into its object store."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None)

    def keep(self, data: Buffer) -> Buffer:
        return data

    def message(self, head: bytes) -> Message:
        return head, [np.frombuffer(data, np.uint8) for data in self.buffers]


def with_views(items: list[Item]) -> list[Item]:
    """The items with the memory of their slabs, which workers on a cluster do not share."""
    return [
        msgspec.structs.replace(item, payload=item.payload.view) if type(item.payload) is Slab else item
        for item in items
    ]


def of_part(message: PartMessage, outbox: RayWriter) -> Message:
    """The form of a part whose results `outbox` has packed."""
    try:
        return outbox.message(head_of(message))
    except Exception as e:  # a codec or a model made a value that cannot be encoded
        sendable(message.part, e)
        return outbox.message(head_of(message))


class RayReader:
    """Reads messages of one kind. The memory of what they hold belongs to the reader and is writable."""

    def __init__(self, kind: Any) -> None:
        self._reader = MessageReader(kind, _not_shared)

    def read(self, message: Message) -> Any:
        """Raises msgspec.DecodeError or ValueError if the peer is broken."""
        head, buffers = message
        return self._reader.read(Frame(head, [bytearray(buffer) for buffer in buffers]))


def _not_shared(offset: int, length: int, writable: bool) -> NoReturn:
    raise ValueError("a message through Ray refers to shared memory")
