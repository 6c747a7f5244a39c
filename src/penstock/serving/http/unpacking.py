"""Bodies in a content coding, unpacked before they wait in a queue.

A packed body may become a thousand times as long. It is unpacked in the server process, because only then does every
bound count what it really takes: `limits.max_body_bytes`, the pool of shared memory, and the bytes of a queue. The
worker, the codecs and whatever looks at bodies know nothing of codings. A piece takes the event loop microseconds: all
but the first are unpacked in a thread, without the interpreter. Few bodies are unpacked at once; the others wait as
they came. A body that unpacks to more than `MOST_RATIO` times its size is refused.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any, Final

from penstock.core.contracts import Backend
from penstock.errors import BadRequest, Cancelled, PayloadTooLarge
from penstock.serving.http.intake import BIG_BYTES, Intake
from penstock.serving.protocols.codings import CONTENT_ENCODING, unpacker
from penstock.types import Headers

MOST_RATIO: Final = 200  # as Apache's DeflateInflateRatioLimit; text and tensors of data have 2 to 20
FREE_BYTES: Final = 2**20  # any ratio is fine up to here
PIECE_BYTES: Final = 256 * 1024  # 0.5 to 1 ms of a core
AT_ONCE: Final = 2
_TOO_DENSE: Final = f"the body unpacks to more than {MOST_RATIO} times its size; send it without Content-Encoding"
PACKED: Final = (CONTENT_ENCODING, b"content-length")  # headers that describe a packed body


class Unpacking:
    """Unpacks bodies into the memory of `backend`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def unpack(self, payload: Any, coding: str, most: int, left: Callable[[], bool] = lambda: False) -> Any:
        """The body of at most `most` bytes: `bytes` or a Buffer, as `payload`, which is freed.

        Raises BadRequest if the stream is damaged or truncated, or if anything follows it, PayloadTooLarge, QueueFull
        while the pool is full, and Cancelled once the client has `left`.
        """
        data = payload if isinstance(payload, bytes) else payload.view
        intake = Intake(self._backend, most)
        intake.begin(0, most)
        try:
            await self._fill(intake, data, coding, left)
            return intake.take()
        except zlib.error as error:
            raise BadRequest(f"the body is not a valid {coding} stream: {error}") from None
        finally:
            intake.release()
            if not isinstance(payload, bytes):
                payload.release()

    async def _fill(self, intake: Intake, data: bytes | memoryview, coding: str, left: Callable[[], bool]) -> None:
        stream, loop = unpacker(data[:2], coding), asyncio.get_running_loop()
        free, at = max(FREE_BYTES, MOST_RATIO * len(data)), BIG_BYTES
        rest = bytes(data[:at])  # a thread never reads memory that may be freed
        piece = stream.decompress(rest, BIG_BYTES)
        if stream.eof:
            intake.add(piece)
        else:
            async with self._turns:
                while True:
                    free -= len(piece)
                    if free < 0:
                        raise PayloadTooLarge(_TOO_DENSE)
                    intake.add(piece)
                    if stream.eof or left():
                        break
                    rest = stream.unconsumed_tail
                    if not rest:
                        rest, at = bytes(data[at : at + BIG_BYTES]), at + BIG_BYTES
                    piece = await loop.run_in_executor(None, stream.decompress, rest, PIECE_BYTES)
                    if not (rest or piece or stream.eof):
                        raise BadRequest(
                            f"the {coding} stream of the body is truncated: it ends after {len(data)} bytes"
                        )
        if left():
            raise Cancelled("the client has left")
        if extra := len(stream.unused_data) + max(0, len(data) - at):
            raise BadRequest(f"{extra} bytes follow the {coding} stream; send exactly one")


def unpacked_headers(headers: Headers) -> Headers:
    """The headers without those that describe a packed body."""
    return [header for header in headers if header[0].lower() not in PACKED]
