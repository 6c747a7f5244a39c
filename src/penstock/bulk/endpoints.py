"""The servers as the sender sees them: windows, connections, and which of them rest or are away."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any, Final

from penstock.backoff import doubled_s
from penstock.bulk.servers import RevisionChanged, ServerFault, ServerInfo, WrongAnswer, revision_changed
from penstock.bulk.types import EndpointStats, SendMode, SendOptions
from penstock.client.endpoint import (
    ConnectionLost,
    MalformedResponse,
    ResponseTimeout,
    Unreachable,
    UntrustedCertificate,
    authorization,
)
from penstock.client.http import ClientConnection
from penstock.errors import (
    DeadlineExceeded,
    Forbidden,
    ModelNotFound,
    ModelNotReady,
    PenstockError,
    QueueFull,
    Unauthorized,
)

_logger = logging.getLogger("penstock.bulk")

QUEUE_S: Final = 0.5  # between two readings of a server's queue
FAULTS: Final = 3  # in a row before a failing server rests: one bad chunk does not make a bad server
STREAM_SINGLE: Final = 500  # requests in flight, as in the published clients
SINGLE_ROUND: Final = 50  # requests in a round, as in the published clients


class NoServer(PenstockError, code="no_server"):
    """No server has answered for as long as the job waits for one. The job ends."""


class NotSent(PenstockError, code="not_sent"):
    """The sender was closed before the chunk had a result; the next run sends it."""


ENDS_THE_JOB: Final = (RevisionChanged, Unauthorized, Forbidden, UntrustedCertificate, NoServer)
"""After one of these errors, every other chunk gets the same error."""
NOT_THE_VIDEOS_FAULT: Final = (*ENDS_THE_JOB, NotSent)
# A server that hangs is as good as absent: it must answer a metadata request before it gets more chunks.
AWAY: Final = (Unreachable, ConnectionLost, ResponseTimeout, ModelNotFound)
LATER: Final = (Unreachable, ModelNotFound, QueueFull, ModelNotReady)  # the server's state; costs the chunk no attempt
AGAIN: Final = (ConnectionLost, DeadlineExceeded, ServerFault, WrongAnswer, MalformedResponse)


def window_for(mode: SendMode, info: ServerInfo, rows: int | None) -> Window:
    """The window of one server.

    Two batches and one chunk for each instance keep it busy: one batch runs, one waits, one chunk is on its way.
    """
    if info.concurrent:
        return AimdWindow(info.concurrent, MAX_CONCURRENT, step=info.concurrent)
    if mode == "stream-single":
        return Window(STREAM_SINGLE)
    if mode == "single":
        return RoundWindow(SINGLE_ROUND)
    chunks_per_batch = max(1, (info.max_batch_size or 1) // rows) if rows else 1
    return AimdWindow(2 * info.instances * chunks_per_batch + 1)


class ServerEndpoint:
    """One server. Used on the sender's loop; gets no chunks while it rests or is away."""

    def __init__(self, info: ServerInfo, options: SendOptions) -> None:
        self.info = info
        self.window = window_for(options.mode, info, options.rows)
        self.path = info.backend.path(info)
        self.headers = [*info.backend.headers, *authorization(info.token)]
        self.away = False  # must answer a metadata request before it gets chunks
        self.resting_until_s = 0.0
        self.failures = 0  # since the last success
        self.answered = 0
        self.heard_s = -math.inf  # when its last response came
        self._connect_timeout_s = options.connect_timeout_s
        self._idle: list[ClientConnection] = []

    def is_up(self, now: float) -> bool:
        return not self.away and now >= self.resting_until_s

    @property
    def load(self) -> float:
        """Requests in flight relative to the window."""
        return self.window.in_flight / self.window.size

    def stats(self, now: float | None) -> EndpointStats:
        """`now` is None when the loop does not run."""
        rests = now is not None and now < self.resting_until_s
        state = "away" if self.away else "rests" if rests else "up"
        return EndpointStats(self.info.url, state, self.window.in_flight, self.window.size, self.answered)

    def take_connection(self) -> ClientConnection:
        if self._idle:
            return self._idle.pop()
        return ClientConnection(self.info.address, connect_timeout_s=self._connect_timeout_s)

    def return_connection(self, connection: ClientConnection) -> None:
        """Keeps as many idle connections as the window has requests."""
        if len(self._idle) < self.window.size:
            self._idle.append(connection)
        else:
            connection.close()

    def succeeded(self) -> None:
        self.answered += 1
        self.failures = 0

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()


class EndpointHealth:
    """Decides which servers rest or are away, and when none is left. Used on the sender's loop.

    Calls `pump` when a server can take chunks again, and `halt` to end the job.
    """

    def __init__(
        self, options: SendOptions, random: Random, *, pump: Callable[[], None], halt: Callable[[PenstockError], None]
    ) -> None:
        self._options = options
        self._random = random
        self._pump = pump
        self._halt = halt
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent_since_s: float | None = None  # since when no server has answered properly
        self._last_error = ""

    def succeeded(self) -> None:
        self._silent_since_s = None

    def failed(self, endpoint: ServerEndpoint, error: PenstockError) -> None:
        """Stops sending chunks to the server for a while, if the error calls for it."""
        if isinstance(error, AWAY):
            self._leave(endpoint, error)
            return
        if not isinstance(error, (*LATER, *AGAIN)):  # a proper answer: the fault is in the chunk
            self.succeeded()
            return
        resting = loop_time() < endpoint.resting_until_s
        endpoint.failures += not resting  # requests in flight together count once
        if isinstance(error, LATER):
            self._note_silence(error)
            if error.retry_after_s:  # 0 would repeat a refused request as fast as the server refuses it
                self._rest(endpoint, error.retry_after_s)
            elif not resting:
                self._rest(endpoint, self.backoff_s(endpoint.failures))
        elif endpoint.failures >= FAULTS and not resting:
            self._rest(endpoint, self.backoff_s(endpoint.failures - FAULTS + 1))

    def backoff_s(self, failures: int) -> float:
        """A random pause below a bound that doubles with each failure, so that clients do not return together."""
        options = self._options
        return self._random.uniform(0.0, doubled_s(options.backoff_s, failures, options.longest_backoff_s))

    def watch(self, endpoints: Iterable[ServerEndpoint]) -> None:
        """Reads the queues of servers that show them, until `close`."""
        for endpoint in endpoints:
            if endpoint.info.backend.shows_queue:
                self._keep(self._read_queue(endpoint))

    async def _read_queue(self, endpoint: ServerEndpoint) -> None:
        info, timeout_s = endpoint.info, self._options.connect_timeout_s
        connection = ClientConnection(info.address, connect_timeout_s=timeout_s)
        try:
            while True:
                await asyncio.sleep(QUEUE_S)
                try:
                    found = await connection.request("GET", "/metrics", authorization(info.token), timeout_s=timeout_s)
                except PenstockError:
                    continue
                length = info.backend.queued(found.body.decode(errors="replace")) if found.ok else None
                if length is not None:
                    endpoint.window.queue_is(length)
                elif found.status < 500:
                    return
        finally:
            connection.close()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _rest(self, endpoint: ServerEndpoint, pause_s: float) -> None:
        until_s = loop_time() + pause_s
        if until_s > endpoint.resting_until_s:
            endpoint.resting_until_s = until_s
            self._pump_after_rest(endpoint)

    def _pump_after_rest(self, endpoint: ServerEndpoint) -> None:
        """Checks the time again, because a timer may fire a millisecond early."""
        left_s = endpoint.resting_until_s - loop_time()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s + 0.001, self._pump_after_rest, endpoint)
        else:
            self._pump()

    def _leave(self, endpoint: ServerEndpoint, error: PenstockError) -> None:
        self._note_silence(error)
        if endpoint.away:
            return
        endpoint.away = True
        _logger.warning("server=%s gets no chunks before it answers again: %s", endpoint.info.url, error.message)
        self._keep(self._probe(endpoint))

    async def _probe(self, endpoint: ServerEndpoint) -> None:
        """Asks an absent server for its metadata until it answers as before."""
        info, timeout_s = endpoint.info, self._options.connect_timeout_s
        for failures in itertools.count():
            if failures:
                await asyncio.sleep(self.backoff_s(failures))
            try:
                found = await info.backend.describe(info.url, info.model, info.token, info.ca, timeout_s)
                break
            except ENDS_THE_JOB as exc:
                self._halt(exc)
                return
            except PenstockError as exc:
                self._note_silence(exc)
        if found.revision != info.revision:
            self._halt(revision_changed(info.url, info.model, info.revision, found.revision))
            return
        _logger.warning("server=%s answers again", info.url)
        endpoint.away, endpoint.failures = False, 0
        self.succeeded()
        self._pump()

    def _note_silence(self, error: PenstockError) -> None:
        """Ends the job once no server has answered for `give_up_s`."""
        self._last_error = error.message
        if self._silent_since_s is None:
            self._silent_since_s = loop_time()
            asyncio.get_running_loop().call_later(self._options.give_up_s, self._give_up, self._silent_since_s)

    def _give_up(self, since_s: float) -> None:
        if self._silent_since_s == since_s:
            waited_s = self._options.give_up_s
            self._halt(NoServer(f"no server has answered for {waited_s:g} s; the last error: {self._last_error}"))


def loop_time() -> float:
    return asyncio.get_running_loop().time()


MAX_CONCURRENT: Final = 512  # requests, each with one row, at a server that forms its batches while it runs
MAX_WINDOW: Final = 64  # requests: 4 GPUs x 2 x 8 chunks, and no more than the blocks of memory that a job has
# Below this multiple of the shortest round trip, a request waits for less than one other at the server.
SHORT: Final = 2.0
LONG: Final = 8.0  # above it a wider window only lengthens the queue, even where small chunks share a batch
HOLD: Final = 8  # epochs without another step up after one that gained nothing


class Window:
    """A fixed window. Each `sent` is followed by exactly one of `answered`, `refused` and `lost`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.in_flight = 0

    def room(self) -> int:
        """How many requests may be sent now."""
        return max(0, self.size - self.in_flight)

    def sent(self, now: float) -> None:
        self.in_flight += 1

    def answered(self, sent_s: float, now: float, rows: int) -> None:
        """A request returned captions. `rows` is 0 when its round trip is not representative, such as a retry's."""
        self.lost()

    def refused(self, sent_s: float, now: float) -> None:
        """The server had no capacity for the request, or was too late."""
        self.lost()

    def lost(self) -> None:
        """A request ended in another way."""
        self.in_flight -= 1

    def queue_is(self, length: int) -> None:
        """So many requests wait at the server."""


class RoundWindow(Window):
    """Up to `size` requests at a time; the next round starts when all of them have ended."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._started = 0

    def room(self) -> int:
        return self.size - self._started

    def sent(self, now: float) -> None:
        super().sent(now)
        self._started += 1

    def lost(self) -> None:
        super().lost()
        if self.in_flight == 0:
            self._started = 0


class AimdWindow(Window):
    """Grows by one while that raises throughput or the server's queue is short; halves on a refusal.

    An epoch lasts as many responses as two windows, and counts only if the window was full in it: a window that the
    decoders cannot fill reveals nothing about the server. A step that gains nothing is undone, and a size that was
    refused is avoided; both are tried again some epochs later.

    Steps of more than one double while they gain, and are of one request afterwards. A server that shows its queue
    decides instead of the rates: the window grows while nothing waits there, and shrinks by what waits needlessly.
    """

    def __init__(self, start: int, most: int = MAX_WINDOW, step: int = 1) -> None:
        super().__init__(max(1, min(start, most)))
        self._most, self._step = most, step
        self._follows = self._read = False  # the server's queue, and a reading that no epoch has used
        self._queued = 0
        self._best_s = math.inf  # the shortest round trip of a request with the most rows so far
        self._most_rows = 0
        self._halved_s = -math.inf
        self._previous_rate: float | None = None  # rows/s before the last step up
        self._hold = 0
        self._refused_size = math.inf
        self._start_epoch(-math.inf)

    def _start_epoch(self, now: float) -> None:
        self._since_s = now
        self._answers = self._rows = 0
        self._total_s = 0.0
        self._full = False

    def queue_is(self, length: int) -> None:
        self._follows = self._read = True
        self._queued = length

    def _follow_queue(self) -> None:
        """A short queue keeps the server busy until the next requests arrive. Each reading counts once."""
        if not self._read:
            return
        self._read = False
        spare = max(1, self.size // 8)
        if self._queued > 0:
            self._step = 1
            step = -min(max(0, self._queued - spare), self.size // 2)
        else:
            step = self.size if self._step > 1 else spare
        self.size = min(self._most, max(1, self.size + step))

    def sent(self, now: float) -> None:
        super().sent(now)
        if self._since_s == -math.inf:
            self._since_s = now
        self._full = self._full or self.in_flight >= self.size

    def answered(self, sent_s: float, now: float, rows: int) -> None:
        self.in_flight -= 1
        if rows > self._most_rows:
            self._most_rows, self._best_s = rows, math.inf
        if rows == self._most_rows:
            self._best_s = min(self._best_s, now - sent_s)
        self._answers += 1
        self._rows += rows
        self._total_s += now - sent_s
        if self._answers >= 2 * self.size:
            self._end_epoch(now)

    def refused(self, sent_s: float, now: float) -> None:
        """Halves once a round trip: refusals of requests sent before the last halving carry no new information."""
        self.in_flight -= 1
        if sent_s < self._halved_s:
            return
        self._refused_size, self._hold, self._step = self.size, HOLD, 1
        self.size = max(1, self.size // 2)
        self._halved_s = now
        self._previous_rate = None
        self._start_epoch(now)

    def _end_epoch(self, now: float) -> None:
        rate = self._rows / max(now - self._since_s, 1e-9)
        round_trip_s = self._total_s / self._answers
        full, previous = self._full, self._previous_rate
        self._start_epoch(now)
        self._previous_rate = None
        if not full:
            return
        if self._follows:
            self._follow_queue()
            return
        short = round_trip_s < SHORT * self._best_s
        # a quarter of the gain from one more request where nothing limits the rate; a smaller gain is noise
        if previous is not None and not short and rate < previous * (1 + 0.25 * self._step / self.size):
            self.size = max(1, self.size - self._step)
            self._hold, self._step = HOLD, 1
            return
        if previous is not None and self._step > 1:
            self._step = self.size
        step = self._step = min(self._step, self._most - self.size)
        risky = self.size + step >= self._refused_size
        if self._hold > 0 and (risky or not (short or previous is not None)):
            self._hold -= 1
        elif step and round_trip_s < LONG * self._best_s:
            self.size += step
            self._previous_rate = rate
            if risky:
                self._refused_size = math.inf
