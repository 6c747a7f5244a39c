"""What every gRPC call shares: the status of an error, and the parts of an answer."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from enum import IntEnum
from typing import Final

from penstock.core.contracts import Ticket
from penstock.errors import PenstockError, QueueFull
from penstock.serving.http.intake import Budget
from penstock.serving.protocols.bodies import ERROR_CODE
from penstock.types import ItemResult, Sink

PUSHBACK: Final = "grpc-retry-pushback-ms"  # when a client should try again (gRFC A6)
UNREAD_BYTES: Final = 16 * 2**20  # parts of an answer that wait for a slow client


class Code(IntEnum):
    """gRPC's statuses."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


_CODES: Final = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    409: Code.ABORTED,
    413: Code.RESOURCE_EXHAUSTED,
    416: Code.OUT_OF_RANGE,
    422: Code.INVALID_ARGUMENT,
    429: Code.RESOURCE_EXHAUSTED,
    499: Code.CANCELLED,
    501: Code.UNIMPLEMENTED,
    503: Code.UNAVAILABLE,
    504: Code.DEADLINE_EXCEEDED,
}


class GrpcError(Exception):
    """Ends a call with this status and text."""

    def __init__(self, code: Code, details: str, retry_after_s: float | None = None, error_code: str = "") -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.retry_after_s = retry_after_s
        self.error_code = error_code  # of a PenstockError

    def trailing(self) -> list[tuple[str, str]]:
        """The metadata behind the status."""
        found = [(ERROR_CODE, self.error_code)] if self.error_code else []
        if self.retry_after_s is not None:
            found.append((PUSHBACK, str(round(self.retry_after_s * 1000))))
        return found


def refused(error: PenstockError) -> GrpcError:
    """The status of a listener or pool that is full."""
    return GrpcError(Code.RESOURCE_EXHAUSTED, error.message, error.retry_after_s, error.code)


def code_of(status: int) -> Code:
    """The gRPC code for an HTTP status of 400 or above."""
    return _CODES.get(status) or (Code.FAILED_PRECONDITION if status < 500 else Code.INTERNAL)


class AnswerParts:
    """The sink of one or more requests. It copies bodies, which may be views that are valid only during the call."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._waiting: deque[ItemResult] = deque()
        self._bytes = 0  # of the waiting parts
        self._overflow = False  # the client left too much unread: unsent parts are dropped
        self._arrival: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        """How many parts wait."""
        return len(self._waiting)

    def put(self, result: ItemResult) -> None:
        if self._overflow:
            return
        if self._waiting and (self._bytes - len(self._waiting[0].body) > UNREAD_BYTES or self._budget.full):
            self.close()
            return
        result.body = bytes(result.body)
        self._count(len(result.body))
        self._waiting.append(result)
        self.wake()

    def close(self) -> None:
        """Forgets the parts that wait, and those to come."""
        self._overflow = True
        self._waiting.clear()
        self._count(-self._bytes)

    def _count(self, more: int) -> None:
        self._bytes += more
        self._budget.count(more)

    def wake(self) -> None:
        """Ends the wait of `next`, with or without a part."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def next(self) -> ItemResult | None:
        """The next part; None if `wake` was called without one. Raises QueueFull if the client left too much unread."""
        if not self._waiting and not self._overflow:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        if self._overflow:
            raise QueueFull(f"the client left more than {UNREAD_BYTES} bytes of its answer unread, or the port is full")
        if not self._waiting:
            return None
        result = self._waiting.popleft()
        self._count(-len(result.body))
        return result


async def parts_of(submit: Callable[[Sink], Ticket], budget: Budget) -> AsyncGenerator[ItemResult, None]:
    """The results of one request, which ends if its caller leaves. Raises the errors of `submit`, and QueueFull."""
    answer = AnswerParts(budget)
    ticket = submit(answer.put)
    final = False
    try:
        while not final:
            result = await answer.next()
            if result is not None:
                final = result.final
                yield result
    finally:
        answer.close()
        if not final:
            ticket.cancel()
