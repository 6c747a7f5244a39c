"""What all connections of one listener share: limits, clock, memory queue, counters and background tasks."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from email.utils import formatdate
from typing import Any, Final, Protocol

from msgspec import Struct

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend, ListenerSnapshot
from penstock.errors import PenstockError
from penstock.serving.http.descriptors import Hangups, none_left
from penstock.serving.http.idempotency import IdempotencyCache
from penstock.serving.http.intake import BIG_BYTES, Budget, Unpacking
from penstock.serving.http.responses import ListenerFull, status_line
from penstock.serving.protocols.bodies import ACCEPT_ENCODING
from penstock.serving.protocols.oip_messages import HEADER_LENGTH
from penstock.serving.protocols.route import Route
from penstock.types import Headers

log = logging.getLogger("penstock.serving")

INF: Final = float("inf")
RECEIVE_BYTES: Final = BIG_BYTES  # so that a body that belongs in a Buffer is never read whole into this one
SWEEP_S: Final = 0.5  # a choice: the limits are seconds; see docs/decisions/connection-timers.md
SILENT_S: Final = 0.5  # silence after which a closing listener closes a connection: its client may be sending now
LINGER_S: Final = 2.0  # how long a refused client is read, so that it receives the refusal and not a reset
WARN_S: Final = 60.0  # a choice: one line a minute for a port that stays full
# from its beginning, and a body that arrives within limits.body_timeout_s has no lowest rate.
BODY_RATE: Final = 16 * 1024
STUCK_S: Final = 4.0  # while the budget is full, a client must read some of its responses within this time ...
STUCK_BYTES: Final = 2**16  # ... if so many wait
KNOWN_HEADS: Final = 512  # a choice: at most 1 MB of heads of KNOWN_HEAD_BYTES
STEADY_NAMES: Final = frozenset(
    {b"accept", b"authorization", b"connection", ACCEPT_ENCODING, HEADER_LENGTH.lower().encode()}
)
"""Special headers that clients repeat."""


class Reserving(Protocol):
    """A connection or call that waits for memory for a large body."""

    def reserve(self) -> bool:
        """Tries to get the memory; False while there is none."""


class Waiting(Protocol):
    """A connection, as the clock sees it."""

    deadline: float
    unread: int  # bytes of unread responses at the last sweep
    stuck_s: float  # how long they have not decreased

    def expire(self) -> None:
        """Handles the timeout of the current phase."""

    def check_writing(self, now: float) -> tuple[int, int]:
        """Drops a client that does not read. Returns the bytes of unread responses, and others that it occupies."""

    def close_soon(self) -> None:
        """Closes after the last response, or after a short silence."""

    def abort(self) -> None:
        """Drops the connection."""


class RequestHead(Struct, gc=False):
    """The parsed part of a request's head. `special`: the headers of SPECIAL_NAMES. `key`: the key of its route in
    `ApiFlavor.known`. `settings`: what `read_head` sets on the context, once it is known, unless the flavor is
    guarded."""

    url: bytes = b""
    key: bytes = b""
    headers: Headers = []
    content_type: bytes = b""
    length: int = 0
    special: dict[bytes, bytes] | None = None
    settings: dict[str, Any] | None = None
    request_line: str = ""  # for a log that wants it

    def is_steady(self) -> bool:
        """Whether the client may send the same head again: nothing in it belongs to one request alone."""
        return self.special is None or self.special.keys() <= STEADY_NAMES

    def without_offer(self, method: bytes, version: str) -> bytes:
        """The head without the header that offers an upgrade."""
        lines = b"".join([b"%b: %b\r\n" % header for header in self.headers if header[0].lower() != b"upgrade"])
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version.encode("ascii"), lines)

    def canonical(self) -> bytes:
        """The head of a POST or GET as clients commonly write it, with its empty line."""
        lines = b"".join([b"%b: %b\r\n" % header for header in self.headers])
        request = self.key if self.key != self.url else b"POST " + self.url
        return b"%b HTTP/1.1\r\n%b\r\n" % (request, lines)


class Clock:
    """Timers and dates of all connections, from one sweep.

    A timer is a deadline on a connection: a request sets two or three floats and no timer. Deadlines fire up to two
    sweeps late, never early. `heads` holds response heads up to the content length, until the date changes.
    `known_heads` holds request heads; a full one is cleared by the sweep, so that clients whose heads never repeat cost
    little.
    """

    def __init__(self, config: LimitsConfig, budget: Budget, on_starved: Callable[[], None]) -> None:
        timeouts = (config.header_timeout_s, config.body_timeout_s, config.idle_timeout_s, config.write_timeout_s)
        self.sweep_s = min(SWEEP_S, min(timeouts) / 4)
        self.header_at = self.body_at = self.idle_at = self.write_at = 0.0
        self.date_line = b""
        self.heads: dict[tuple[str, tuple[str, str] | None], bytes] = {}
        self.known_heads: dict[bytes, RequestHead] = {}
        self.starved = False  # the process has no descriptor left for another connection
        self._on_starved = on_starved
        self._budget = budget
        self._config = config
        self._idle_s = config.idle_timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self, connections: set[Waiting]) -> None:
        if self._timer is None:
            self.tick()
            self._timer = asyncio.get_running_loop().call_later(self.sweep_s, self._sweep, connections)

    def stop(self) -> None:
        """Ends the sweep: an idle listener costs no CPU."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.starved = False
            self._budget.sweep(0)

    def hurry(self, within_s: float) -> None:
        """Closes idle connections after a short silence: the listener closes `within_s`."""
        self._idle_s = min(SILENT_S, within_s / 2)
        self.sweep_s = max(0.001, min(self.sweep_s, self._idle_s / 4))
        self.tick()

    def tick(self) -> None:
        """Updates the date, and the deadlines of requests that begin now."""
        now = asyncio.get_running_loop().time() + self.sweep_s
        config = self._config
        self.header_at = now + config.header_timeout_s
        self.body_at = now + config.body_timeout_s
        self.idle_at = now + self._idle_s
        self.write_at = now + config.write_timeout_s
        if len(self.known_heads) >= KNOWN_HEADS:
            self.known_heads.clear()
        date_line = f"date: {formatdate(usegmt=True)}\r\n".encode("ascii")
        if date_line != self.date_line:
            self.date_line = date_line
            self.heads.clear()

    def extended(self, deadline: float, nbytes: int) -> float:
        """The deadline of a body of which `nbytes` more have arrived: their time at BODY_RATE is given back."""
        return min(deadline + nbytes / BODY_RATE, self.body_at)

    def _sweep(self, connections: set[Waiting]) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.sweep_s, self._sweep, connections)
        self.tick()
        self.starved = none_left()
        if self.starved:
            self._on_starved()
        now, full, occupied = loop.time(), self._budget.full, 0
        for connection in list(connections):
            if connection.deadline <= now:
                connection.expire()
            unread, more = connection.check_writing(now)
            occupied += unread + more
            stuck = full and unread >= max(connection.unread, STUCK_BYTES)
            connection.stuck_s = connection.stuck_s + self.sweep_s if stuck else 0.0
            connection.unread = unread
            if connection.stuck_s > STUCK_S:
                log.debug("event=slow_reader consequence=connection_dropped")
                connection.abort()
        self._budget.sweep(occupied)

    def learn_head(self, content_type: str, header: tuple[str, str] | None) -> bytes:
        """The head of a plain response up to the content length, cached until the date changes."""
        lines = [("content-type", content_type)] if content_type else []
        lines += [header] if header else []
        text = b"".join([f"{name}: {value}\r\n".encode("latin-1") for name, value in lines])
        head = self.heads[content_type, header] = status_line(200) + self.date_line + text + b"content-length: "
        if len(self.heads) > 256:  # a model that invents content types or headers
            self.heads.clear()
        return head


class MemoryQueue:
    """Connections and calls that wait for memory for a large body, first come, first served."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stalled: dict[Reserving, None] = {}
        self._notified = False  # the backend will call `_free`

    def __len__(self) -> int:
        return len(self._stalled)

    def is_next(self, waiting: Reserving) -> bool:
        """Whether nothing else waits before this one."""
        return next(iter(self._stalled), waiting) is waiting

    def add(self, waiting: Reserving) -> None:
        """Calls `waiting.reserve` when there may be memory."""
        self._stalled[waiting] = None
        self._wait()

    def discard(self, waiting: Reserving) -> None:
        """Removes a waiter that has ended; it may have blocked others."""
        if waiting in self._stalled:
            del self._stalled[waiting]
            self._feed()

    def _wait(self) -> None:
        if self._stalled and not self._notified:
            self._notified = True
            self._backend.when_free(self._free)

    def _free(self) -> None:
        self._notified = False
        self._feed()

    def _feed(self) -> None:
        while self._stalled and (first := next(iter(self._stalled))).reserve():
            self._stalled.pop(first, None)
        self._wait()


class Counters:
    """Responses by status // 100 (0: a health check's 5xx), errors by code, and refused connections."""

    def __init__(self) -> None:
        self.plain = 0  # plain responses, all with status 200
        self.other = [0] * 10  # all others; handlers invent statuses up to 999
        self.refused = 0
        self.errors: Counter[str] = Counter()
        self.write_s: dict[tuple[str, str | None], float] = defaultdict(
            float
        )  # since the last reading, see `Listener.count_unsent`

    def responses(self) -> dict[int, int]:
        """Started responses by status // 100."""
        counts = list(self.other)
        counts[2] += self.plain
        return {kind: n for kind, n in enumerate(counts) if n}


class Listener:
    """The state that connections share. All calls on one event loop's thread.

    It has more than 15 attributes because each part (budget, clock, memory, unpacking, hang-ups, counts) is an object
    of its own; the rest is the state of accepting and closing.
    """

    def __init__(self, backend: Backend, config: LimitsConfig) -> None:
        self.backend = backend
        self.config = config
        self.budget = Budget(config.max_transit_bytes)
        self.clock = Clock(config, self.budget, lambda: self.warn("no_descriptors"))
        self.memory = MemoryQueue(backend)
        self.unpacking = Unpacking(backend, self.budget)
        self.hangups = Hangups()
        self.counts = Counters()
        self.idempotency = IdempotencyCache(backend, self.now)
        self.connections: set[Waiting] = set()
        self.empty = asyncio.Event()  # set when the last connection closes
        self.closing = False  # each response is the last one of its connection
        self.closed = False
        self.small_bytes = min(BIG_BYTES, config.max_body_bytes)
        self.receive = memoryview(bytearray(RECEIVE_BYTES))
        self.tasks: set[asyncio.Task[None]] = set()
        self.port = ""  # its configuration key, for the log
        self._warn_at = self._full_at = 0.0

    def most_of(self, route: Route | None) -> int:
        """The largest body of a route; without a model, none that needs shared memory."""
        if route is None or not route.template.codec:
            return self.small_bytes
        return route.template.limit(self.config.max_body_bytes)

    def full(self, more: int = 0) -> bool:
        """Whether there is no room for another connection besides `more` that are not added yet; counts the refusal."""
        crowded = len(self.connections) + more >= self.config.max_connections
        if not (crowded or self.closed or self.clock.starved):
            return False
        self.counts.refused += 1
        if crowded and not self.closed:
            self.warn("max_connections")
        return True

    def warn(self, cause: str) -> None:
        """Reports refused connections, once a minute."""
        now = self.now()
        if now >= self._warn_at:
            self._warn_at = now + WARN_S
            log.warning(
                "event=port_full port=%s cause=%s connections=%d most=%d consequence=new_connections_are_refused"
                " hint=raise limits.max_connections and the limit of open files (ulimit -n)",
                self.port, cause, len(self.connections), self.config.max_connections,
            )  # fmt: skip

    def count_error(self, code: str) -> None:
        """Counts an error response; reports those for want of room in the budget, once a minute."""
        self.counts.errors[code] += 1
        now = self.now()
        if code == ListenerFull.code and now >= self._full_at:
            self._full_at = now + WARN_S
            log.warning(
                "event=requests_refused port=%s reason=%s count=%d hint=%r",
                *(self.port, code, self.counts.errors[code]),
                "raise limits.max_transit_bytes, or look for clients that read slowly (penstock_unsent_bytes)",
            )

    def count_unsent(self, responses: Iterable[tuple[str, str | None]]) -> None:
        """Counts the time since the last sweep for these responses, of a model and version, which are not sent yet.

        A sample costs a request nothing, and the sum over many is the time that writing takes.
        """
        for model, version in responses:
            with suppress(PenstockError):  # other names are the clients', without end
                self.backend.model_ready(model, version)
                self.counts.write_s[model, version] += self.clock.sweep_s

    def add(self, connection: Waiting) -> bool:
        """Adds a connection; False when there is no room for it."""
        if self.full():
            return False
        self.clock.start(self.connections)
        connection.deadline = self.clock.idle_at if self.closing else self.clock.header_at
        self.connections.add(connection)
        return True

    def remove(self, connection: Waiting) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self.clock.stop()
            self.hangups.close()
            self.empty.set()

    def start_closing(self, drain_s: float) -> None:
        """From now on, each response announces the end of its connection."""
        self.closing = True
        self.clock.hurry(drain_s)

    async def drain(self, drain_s: float) -> None:
        """Answers the requests that have been sent, closes silent connections, and drops the rest after `drain_s`."""
        for connection in list(self.connections):
            connection.close_soon()
        if self.connections:
            self.empty.clear()
            try:
                await asyncio.wait_for(self.empty.wait(), drain_s)
            except TimeoutError:
                log.warning("event=drain_timeout connections=%d consequence=dropped", len(self.connections))
                for connection in list(self.connections):
                    connection.abort()
                await self.empty.wait()
        self.closed = True

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a task that the server's `close` waits for; it outlives its connection."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def now(self) -> float:
        return asyncio.get_running_loop().time()


def reading_of(listeners: Iterable[Listener]) -> ListenerSnapshot:
    """The sums over the listeners of one protocol; the unread bytes are from the last sweep."""
    both = list(listeners)
    unsent_bytes = sum(connection.unread for listener in both for connection in listener.connections)
    return ListenerSnapshot(unsent_bytes, sum((listener.counts.errors for listener in both), Counter()))
