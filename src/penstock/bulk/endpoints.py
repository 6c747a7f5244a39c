"""The servers as the sender sees them: windows, connections, and which of them rest or are away."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from random import Random
from typing import Final

from penstock.bulk.protocol import RevisionChanged, ServerFault, WrongAnswer, revision_changed
from penstock.bulk.servers import ServerInfo, authorization, fetch
from penstock.bulk.types import EndpointStats, SendMode, SendOptions
from penstock.bulk.window import AimdWindow, RoundWindow, Window
from penstock.client.endpoint import (
    ConnectionLost,
    MalformedResponse,
    ResponseTimeout,
    Unreachable,
    UntrustedCertificate,
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

FAULTS: Final = 3  # in a row before a failing server rests: one bad chunk does not make a bad server
STREAM_SINGLE: Final = 500  # requests in flight, as in the published clients
SINGLE_ROUND: Final = 50  # requests in a round, as in the published clients


class NoServer(PenstockError):
    """No server has answered for as long as the job waits for one. The job ends."""

    code = "no_server"


class NotSent(PenstockError):
    """The sender was closed before the chunk had a result; the next run sends it."""

    code = "not_sent"


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
        self.path = f"{info.path}/infer"
        self.headers = [("x-priority", "1"), *authorization(info.token)]
        self.away = False  # must answer a metadata request before it gets chunks
        self.resting_until_s = 0.0
        self.failures = 0  # since the last success
        self.answered = 0
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
        """A connection for one request."""
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
        self._probes: set[asyncio.Task[None]] = set()
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
            if error.retry_after_s is not None:
                self._rest(endpoint, error.retry_after_s)
            elif not resting:
                self._rest(endpoint, self.backoff_s(endpoint.failures))
        elif endpoint.failures >= FAULTS and not resting:
            self._rest(endpoint, self.backoff_s(endpoint.failures - FAULTS + 1))

    def backoff_s(self, failures: int) -> float:
        """A random pause below a bound that doubles with each failure, so that clients do not return together."""
        options = self._options
        bound = options.backoff_s * 2.0 ** min(failures - 1, 30)
        return self._random.uniform(0.0, min(options.longest_backoff_s, bound))

    def close(self) -> None:
        for probe in self._probes:
            probe.cancel()

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
        probe = asyncio.ensure_future(self._probe(endpoint))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, endpoint: ServerEndpoint) -> None:
        """Asks an absent server for its metadata until it answers as before."""
        info = endpoint.info
        for failures in itertools.count():
            if failures:
                await asyncio.sleep(self.backoff_s(failures))
            try:
                found = await fetch(info.address, info.model, info.token, self._options.connect_timeout_s)
            except ENDS_THE_JOB as exc:
                self._halt(exc)
                return
            except PenstockError as exc:
                self._note_silence(exc)
                continue
            if found.revision != info.revision:
                self._halt(revision_changed(info.url, info.model, info.revision, found.revision))
                return
            _logger.warning("server=%s answers again", info.url)
            endpoint.away, endpoint.failures = False, 0
            self.succeeded()
            self._pump()
            return

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
