"""Quarantine: the payloads that killed workers of one model version.

A payload in a worker's death becomes a suspect: until a worker survives it, its requests share no batch with others. If
another worker dies while it runs nothing else, the payload is refused for a while. Both tables are bounded. Suspects
are known by a sample of their bytes, because a request is looked up while there are any; only the payload to blame is
hashed as a whole.
"""

import logging
from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeVar

from penstock.core.wire.slabs import Slab
from penstock.errors import Quarantined
from penstock.types import Item

log = logging.getLogger("penstock.engine")

MAX_PAYLOADS = 1024  # of each table; the oldest are forgotten first
SAMPLE_BYTES = 256  # bytes of a sample, at least if the payload has as many

Sample = tuple[str, str, int, bytes]
V = TypeVar("V")


class Quarantine:
    """Pure: times are arguments. Only payloads of bytes take part; Python objects of in-process callers do not."""

    def __init__(self, model: str, seconds: float) -> None:
        self._model, self._seconds = model, seconds
        self.active = False  # there are suspects or refused payloads
        self._suspects: dict[Sample, float] = {}  # end of the suspicion, in this order
        self._refused: dict[Sample, tuple[float, bytes]] = {}  # (end, digest)

    def bucket(self, item: Item, bucket: str, now: float) -> str:
        """The bucket of a request: one for itself if it is suspect. Raises Quarantined if its payload is refused."""
        self._forget(now)
        sample = _sample(item)
        if sample in self._refused and self._refused[sample][1] == _digest(item):
            raise Quarantined("this payload killed two workers of the model; it is refused for a while")
        return f"{bucket} {hash(sample)}" if sample in self._suspects else bucket

    def died(self, items: Iterable[Item], apart: bool, now: float) -> bool:
        """Records the items that were in a worker's death. `apart`: the worker ran nothing else. True: a payload is
        refused from now on."""
        if not self._seconds:
            return False
        end = now + self._seconds
        found = {_sample(item): item for item in items}
        if apart and len(found) == 1:
            ((sample, item),) = found.items()
            if sample is not None and self._suspects.pop(sample, 0.0) > now:
                _put(self._refused, sample, (end, _digest(item)))
                log.warning(
                    "payload_refused model=%s bytes=%d for_s=%g: it killed two workers, requests with it are answered"
                    " with 422", self._model, sample[2], self._seconds
                )  # fmt: skip
                return True
        for sample in found:
            if sample is not None:
                _put(self._suspects, sample, end)
        self.active = bool(self._suspects or self._refused)
        return False

    def survived(self, items: Iterable[Item]) -> None:
        """Clears the items of a batch that a worker has answered."""
        for item in items:
            self._suspects.pop(_sample(item), None)  # type: ignore[arg-type]
        self.active = bool(self._suspects or self._refused)

    def _forget(self, now: float) -> None:
        while self._suspects and next(iter(self._suspects.values())) <= now:
            del self._suspects[next(iter(self._suspects))]
        while self._refused and next(iter(self._refused.values()))[0] <= now:
            del self._refused[next(iter(self._refused))]
        self.active = bool(self._suspects or self._refused)


def _put(table: dict[Sample, V], sample: Sample, value: V) -> None:
    """Adds the newest entry of a bounded table."""
    table.pop(sample, None)
    if len(table) >= MAX_PAYLOADS:
        del table[next(iter(table))]
    table[sample] = value


def _bytes(item: Item) -> bytes | bytearray | memoryview | None:
    payload = item.payload.view if isinstance(item.payload, Slab) else item.payload
    return payload if isinstance(payload, (bytes, bytearray, memoryview)) else None


def _sample(item: Item) -> Sample | None:
    data = _bytes(item)
    if not data:
        return None
    return (item.codec, item.content_type, len(data), bytes(data[:: max(1, len(data) // SAMPLE_BYTES)]))


def _digest(item: Item) -> bytes:
    return blake2b(_bytes(item) or b"", digest_size=16).digest()
