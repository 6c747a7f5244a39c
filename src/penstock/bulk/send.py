"""The sender: chunks go to the servers that bear them, are sent again when that may help, and are answered once each.

One thread with one event loop. Nothing here looks at pixels: a request is written from the block that holds them.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import logging
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Final

from penstock.bulk.answers import read_captions
from penstock.bulk.health import AGAIN, LATER, Health
from penstock.bulk.lane import Lane
from penstock.bulk.parcel import Parcel
from penstock.bulk.sending import (
    ENDS_THE_JOB,
    NotSent,
    SendOptions,
    SendStats,
    ServerStats,
    Undelivered,
    undelivered,
    window_for,
)
from penstock.bulk.servers import ServerInfo
from penstock.bulk.types import Answered, Chunk
from penstock.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, describe

log = logging.getLogger("penstock.bulk")

BUSY: Final = (QueueFull, ModelNotReady, DeadlineExceeded)  # the window halves


class Sender:
    """`start`, any number of `send`, `close`. `answered` is called once a chunk, in the sender's thread."""

    def __init__(
        self,
        servers: Sequence[ServerInfo],
        options: SendOptions,
        answered: Answered,
        *,
        seed: int | None = None,
    ) -> None:
        self._options = options
        self._answered = answered
        self._lanes = [
            Lane(info, window_for(options.mode, info, options.rows), options.connect_timeout_s) for info in servers
        ]
        self._lock = threading.Lock()
        self._inbox: list[Chunk] = []
        self._rung = False
        self._loop: asyncio.AbstractEventLoop | None = None  # None: not started, or over
        self._thread = threading.Thread(target=self._run, name="penstock-sender", daemon=True)
        self._started = threading.Event()
        # of the loop's thread from here on
        self._health = Health(options, random.Random(seed), pump=self._pump, halt=self._halt)
        self._waiting: list[Parcel] = []  # a heap, the oldest first
        self._delayed: dict[Parcel, asyncio.TimerHandle] = {}
        self._under_way: set[asyncio.Task[list[str]]] = set()
        self._stop: PenstockError | None = None  # why nothing is sent any more
        self._abandon: asyncio.TimerHandle | None = None  # set: closing
        self._order = self._n_answered = self._retries = self._sent_bytes = 0
        # A server keeps answers for a while: a job that is run once more is to be captioned, not to be told them again.
        self._job = f"{options.fingerprint[:8]}-{secrets.token_hex(4)}"

    # ---- any thread

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        self._started.wait()

    def send(self, chunk: Chunk) -> None:
        """Takes a chunk, does not block. After the end it is answered with NotSent, in the caller's thread."""
        with self._lock:
            loop = self._loop
            if loop is not None:
                self._inbox.append(chunk)
                if not self._rung:
                    self._rung = True
                    loop.call_soon_threadsafe(self._take)
                return
        self._tell(chunk, self._stop or _closed())

    def close(self, drain_s: float) -> None:
        """Ends it: what was not sent is answered with NotSent now, what is in flight after at most `drain_s`.

        Returns when all is answered and the thread has ended. A second call may shorten the time of the first.
        """
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end, drain_s)
        self._thread.join()

    def stats(self) -> SendStats:
        """How it goes; the numbers may be a moment apart."""
        servers = tuple(self._lane_stats(lane) for lane in self._lanes)
        return SendStats(
            in_flight=sum(server.in_flight for server in servers),
            window=sum(server.window for server in servers),
            waiting=len(self._inbox) + len(self._waiting) + len(self._delayed),
            answered=self._n_answered,
            retries=self._retries,
            sent_bytes=self._sent_bytes,
            servers=servers,
        )

    def _lane_stats(self, lane: Lane) -> ServerStats:
        loop = self._loop
        state = "away" if lane.away else "rests" if loop is not None and loop.time() < lane.resting_until_s else "up"
        window = lane.window
        return ServerStats(lane.info.url, state, window.in_flight, window.size, lane.answered, lane.retries)

    # ---- the sender's thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            self._loop = runner.get_loop()
            self._ended = asyncio.Event()
            self._started.set()
            runner.run(self._live())

    async def _live(self) -> None:
        await self._ended.wait()
        with self._lock:
            self._loop = None
        self._take()
        for lane in self._lanes:
            lane.close()

    def _take(self) -> None:
        with self._lock:
            chunks, self._inbox, self._rung = self._inbox, [], False
        for chunk in chunks:
            self._order += 1
            try:
                heapq.heappush(self._waiting, Parcel(chunk, self._order, self._job))
            except (ValueError, TypeError) as exc:
                self._tell(chunk, Undelivered(f"the chunk cannot be sent: {exc}"))
        self._pump()

    def _pump(self) -> None:
        """Sends what may be sent now."""
        if self._stop is not None:
            self._flush(self._stop)
            return
        while self._waiting:
            lane = self._pick(self._waiting[0])
            if lane is None:
                return
            parcel = heapq.heappop(self._waiting)
            parcel.last = lane
            now = self._time()
            lane.window.sent(now)
            task = asyncio.ensure_future(self._deliver(parcel, lane))
            self._under_way.add(task)
            task.add_done_callback(functools.partial(self._delivered, parcel, lane, now))

    def _pick(self, parcel: Parcel) -> Lane | None:
        """The least loaded server with room; not the one where the chunk failed last, if another one is up."""
        now = self._time()
        lanes = [lane for lane in self._lanes if lane.up(now)]
        if parcel.attempts and len(lanes) > 1:
            lanes = [lane for lane in lanes if lane is not parcel.last]
        return min((lane for lane in lanes if lane.window.room() > 0), key=lambda lane: lane.load, default=None)

    async def _deliver(self, parcel: Parcel, lane: Lane) -> list[str]:
        """The captions. Raises what a connection and `read_captions` do."""
        options, info = self._options, lane.info
        connection = lane.take()
        try:
            answer = await connection.request(
                "POST",
                lane.path,
                [*parcel.headers, *lane.headers],
                parcel.body,
                timeout_s=options.request_timeout_s,
                max_response_bytes=options.max_response_bytes,
            )
        finally:
            lane.give(connection)
        return read_captions(answer, info.model, info.revision, parcel.chunk.frames, info.url)

    def _delivered(self, parcel: Parcel, lane: Lane, sent_s: float, task: asyncio.Task[list[str]]) -> None:
        """The one way out of a try, however it ended."""
        self._under_way.discard(task)
        error = _closed() if task.cancelled() else task.exception()
        now = self._time()
        if error is None:
            lane.window.answered(sent_s, now, 0 if parcel.attempts else len(parcel.chunk.frames))
            lane.works()
            self._health.works()
            self._n_answered += 1
            self._sent_bytes += parcel.body_bytes
            self._tell(parcel.chunk, task.result())
        else:
            if isinstance(error, BUSY):
                lane.window.refused(sent_s, now)
            else:
                lane.window.lost()
            self._failed(parcel, lane, error)
        self._pump()
        if self._abandon is not None and not self._under_way:
            self._ended.set()

    def _failed(self, parcel: Parcel, lane: Lane, error: BaseException) -> None:
        """Another try, or the answer that there is none."""
        if not isinstance(error, PenstockError):
            log.error("server=%s a chunk is given up: the sender itself failed", lane.info.url, exc_info=error)
            error = Undelivered(f"the sender failed: {describe(error)}")
        if isinstance(error, ENDS_THE_JOB):
            self._halt(error)
        if self._stop is not None:
            self._tell(parcel.chunk, self._stop)
            return
        self._health.fails(lane, error)
        if not isinstance(error, LATER):
            parcel.attempts += 1
            if not isinstance(error, AGAIN) or parcel.attempts >= self._options.attempts:
                self._tell(parcel.chunk, undelivered(error, parcel.attempts))
                return
        self._retries += 1
        lane.retries += 1
        log.debug("server=%s frame=%d again=%s: %s", lane.info.url, parcel.chunk.frames[0], error.code, error.message)
        if isinstance(error, LATER):  # the server rests, not the chunk: others may take it now
            heapq.heappush(self._waiting, parcel)
        else:
            delay_s = self._health.backoff_s(parcel.attempts)
            self._delayed[parcel] = asyncio.get_running_loop().call_later(delay_s, self._due, parcel)

    def _due(self, parcel: Parcel) -> None:
        del self._delayed[parcel]
        heapq.heappush(self._waiting, parcel)
        self._pump()

    # ---- the end

    def _halt(self, error: PenstockError) -> None:
        """Nothing is sent from here on; what is in flight may still be answered."""
        if self._stop is None:
            self._stop = error
            if not isinstance(error, NotSent):
                log.error("code=%s nothing more is sent: %s", error.code, error.message)
        self._health.close()
        self._flush(self._stop)

    def _flush(self, error: PenstockError) -> None:
        for timer in self._delayed.values():
            timer.cancel()
        parcels = sorted([*self._waiting, *self._delayed])
        self._waiting.clear()
        self._delayed.clear()
        for parcel in parcels:
            self._tell(parcel.chunk, error)

    def _end(self, drain_s: float) -> None:
        """Closes; called again it may only shorten the time."""
        self._halt(_closed())
        loop = asyncio.get_running_loop()
        if self._abandon is None or loop.time() + drain_s < self._abandon.when():
            if self._abandon is not None:
                self._abandon.cancel()
            self._abandon = loop.call_later(drain_s, self._drop)
        if not self._under_way:
            self._ended.set()

    def _drop(self) -> None:
        for task in self._under_way:
            task.cancel()

    def _tell(self, chunk: Chunk, outcome: list[str] | PenstockError) -> None:
        try:
            self._answered(chunk, outcome)
        except Exception:
            log.exception(
                "video=%r frame=%d its answer is lost: the job failed on it", chunk.video.name, chunk.frames[0]
            )

    def _time(self) -> float:
        return asyncio.get_running_loop().time()


def _closed() -> NotSent:
    return NotSent("the sender was closed before this chunk was answered; the next run sends it")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
