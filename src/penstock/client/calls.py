"""One call of a client: its options, headers and retries; and `CallWindow` for many calls at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypedDict
from uuid import uuid4

from msgspec import Struct

from penstock.backoff import doubled_s
from penstock.client.endpoint import ConnectionLost, Unreachable
from penstock.errors import BadRequest, ModelNotReady, PenstockError, QueueFull, RunTimeout, WorkerDied, nearest
from penstock.types import SequenceRequest

GRACE_S: Final = 0.25  # after a deadline, for the server's own response about it to arrive


class CallOptions(TypedDict, total=False):
    """Options of one request; all are optional.

    - `version`: of the model, by default its default version.
    - `timeout_s`: the longest wait of this client, retries included, instead of the client's `timeout_s`. For a
      stream: until its first part, and then until each next one.
    - `deadline_s`: seconds in which the server must answer. It drops the request afterwards, also in its queue.
    - `priority`: class from 0, the most urgent.
    - `request_id`: appears in the server's log and in the response.
    - `sequence`: the sequence that the request belongs to, or its id.
    - `idempotency_key`: names this request; sent again with the same key, it runs once. True makes a random key.
    - `headers`: further HTTP headers, or gRPC metadata.
    """

    version: str | int | None
    timeout_s: float | None
    deadline_s: float | None
    priority: int
    request_id: str
    sequence: SequenceRequest | str | int
    idempotency_key: str | bool
    headers: Mapping[str, str]


class Call(Struct):
    """The checked options of a call. `key` is "" without an idempotency key."""

    timeout_s: float
    version: str | None = None
    deadline_s: float | None = None
    priority: int = 0
    request_id: str = ""
    sequence: SequenceRequest | None = None
    key: str = ""
    headers: list[tuple[str, str]] = []
    deadline_at: float = math.inf  # on the loop's clock
    ends_at: float = math.inf

    def begin(self, now: float) -> None:
        """Starts the time-out and the deadline."""
        self.ends_at = now + self.timeout_s
        if self.deadline_s is not None:
            self.deadline_at = now + self.deadline_s
            self.ends_at = min(self.ends_at, self.deadline_at + GRACE_S)

    def left_s(self, now: float) -> float:
        """The time for further attempts."""
        return min(self.ends_at, self.deadline_at) - now

    def native_headers(self, now: float) -> list[tuple[str, str]]:
        """The headers of Penstock's own server."""
        found = []
        if self.deadline_s is not None:
            found.append(("x-deadline-ms", f"{max(0.0, self.deadline_at - now) * 1000:.3f}"))
        if self.priority:
            found.append(("x-priority", str(self.priority)))
        if self.request_id:
            found.append(("x-request-id", self.request_id))
        if self.key:
            found.append(("Idempotency-Key", self.key))
        if self.sequence is not None:
            found.append(("x-sequence-id", self.sequence.id))
            found += [("x-sequence-start", "true")] * bool(self.sequence.start)
            found += [("x-sequence-end", "true")] * self.sequence.end
        return found

    def triton_parameters(self) -> dict[str, Any]:
        """The parameters of Triton's extensions. Triton's priorities begin at 1, and its time-out is in
        microseconds."""
        found: dict[str, Any] = {}
        if self.deadline_s is not None:
            found["timeout"] = round(self.deadline_s * 1e6)
        if self.priority:
            found["priority"] = self.priority + 1
        if self.sequence is not None:
            id = self.sequence.id
            found["sequence_id"] = int(id) if id.isdecimal() else id
            found |= {"sequence_start": bool(self.sequence.start), "sequence_end": self.sequence.end}
        return found


def read_options(options: CallOptions, timeout_s: float, keyed: bool = False) -> Call:
    """Raises TypeError for an unknown option, and BadRequest for a value that has no meaning."""
    for name in options.keys() - CallOptions.__annotations__.keys():
        raise TypeError(f"unknown option '{name}'{nearest(name, CallOptions.__annotations__)}")
    version, sequence = options.get("version"), options.get("sequence")
    if isinstance(sequence, (str, int)):
        sequence = SequenceRequest(str(sequence))
    key = options.get("idempotency_key", keyed)
    given_s = options.get("timeout_s")
    call = Call(
        timeout_s=timeout_s if given_s is None else given_s,
        version=None if version is None else str(version),
        deadline_s=options.get("deadline_s"),
        priority=options.get("priority", 0),
        request_id=options.get("request_id", ""),
        sequence=sequence,
        key=uuid4().hex if key is True else key or "",
        headers=list(options.get("headers", {}).items()),
    )
    for name, seconds in (("timeout_s", call.timeout_s), ("deadline_s", call.deadline_s)):
        if seconds is not None and not 0 < seconds < math.inf:
            raise BadRequest(f"{name} is {seconds}, expected seconds above 0")
    if not isinstance(call.priority, int) or call.priority < 0:
        raise BadRequest(f"priority is {call.priority!r}, expected a whole number from 0")
    return call


NOT_RUN: Final = (Unreachable, QueueFull, ModelNotReady)  # the server refused the request, or never received it
PERHAPS_RUN: Final = (ConnectionLost, WorkerDied)


class RetryPolicy(Struct, frozen=True):
    """At most `retries` further attempts, with pauses that double from `backoff_s` up to `longest_pause_s`.

    A server's Retry-After is honoured up to `longest_pause_s`.
    """

    retries: int = 2
    backoff_s: float = 0.1
    longest_pause_s: float = 10.0

    def pause_s(
        self, error: PenstockError, failures: int, left_s: float, *, repeatable: bool, chance: float
    ) -> float | None:
        """Seconds before the next attempt; None: the error is final.

        `failures` counts the failed attempts, from 1. `left_s` is the time that the caller still has. `repeatable`:
        running the request twice is harmless. `chance` is a random number from 0 to 1.
        """
        if failures > self.retries or not is_safe(error, repeatable):
            return None
        jitter_s = chance * doubled_s(self.backoff_s, failures, self.longest_pause_s)
        pause_s = min(error.retry_after_s or 0.0, self.longest_pause_s) + jitter_s
        return pause_s if pause_s < left_s else None


def is_safe(error: PenstockError, repeatable: bool) -> bool:
    """Whether another attempt may help and harms nothing. A run that timed out would time out again."""
    if isinstance(error, PERHAPS_RUN):
        return repeatable and not isinstance(error, RunTimeout)
    return isinstance(error, NOT_RUN)


MAX_CONCURRENCY: Final = 10_000


class CallWindow:
    """At most `concurrency` calls run, or have a result that was not taken. Used on one event loop.

    With `ordered`, results come in the order of the values; otherwise each is (position of its value, result), as they
    complete. An error takes the place of a result if `return_exceptions`; otherwise it is raised, and ends the window.
    """

    def __init__(
        self,
        send: Callable[[Any], Awaitable[Any]],
        concurrency: int = 16,
        ordered: bool = True,
        return_exceptions: bool = False,
    ) -> None:
        if not 1 <= concurrency <= MAX_CONCURRENCY:
            raise BadRequest(f"concurrency is {concurrency}, expected a whole number from 1 to {MAX_CONCURRENCY}")
        self._send = send
        self._concurrency = concurrency
        self._ordered = ordered
        self._return_exceptions = return_exceptions
        self._running: dict[asyncio.Task[Any], int] = {}  # in the order of their values
        self._count = 0

    async def put(self, value: Any) -> list[Any]:
        """Starts a call, and returns the results that are due. Waits for one if the window is full."""
        self._running[asyncio.ensure_future(self._call(value))] = self._count
        self._count += 1
        await asyncio.sleep(0)  # the call begins even if the next value takes long
        return await self.take() if len(self._running) >= self._concurrency else self._due()

    async def take(self) -> list[Any]:
        """The next results, at least one; none if no call is left."""
        if self._running:
            waited = [next(iter(self._running))] if self._ordered else self._running
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        return self._due()

    async def close(self) -> None:
        """Cancels what runs."""
        running = list(self._running)
        self._running.clear()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _call(self, value: Any) -> Any:
        try:
            return await self._send(value)
        except PenstockError as error:
            if self._return_exceptions:
                return error
            raise

    def _due(self) -> list[Any]:
        found = []
        for task, position in list(self._running.items()):
            if not task.done():
                if self._ordered:
                    break
                continue
            del self._running[task]
            found.append(task.result() if self._ordered else (position, task.result()))
        return found
