"""One call of a client: its options, and its headers or parameters at the time of an attempt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypedDict
from uuid import uuid4

from msgspec import Struct

from penstock.errors import BadRequest, nearest
from penstock.types import SequenceRequest

GRACE_S: Final = 0.25  # after a deadline, for the server's own answer about it to arrive


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
