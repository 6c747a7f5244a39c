"""Sends chunks to the servers, retries where that can help, and reports one result for each chunk.

One thread runs one event loop. A request is written directly from the block that holds its pixels.
"""

import asyncio
import functools
import heapq
import logging
import random
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Final

from penstock.bulk.endpoints import AGAIN, AWAY, ENDS_THE_JOB, LATER, EndpointHealth, NotSent, ServerEndpoint, loop_time
from penstock.bulk.limits import RateLimit
from penstock.bulk.servers import ServerInfo, UploadChunk, WrongAnswer, failed_row
from penstock.bulk.types import Answer, Answers, Chunk, ChunkResult, OnResult, SendOptions, SendStats
from penstock.client.endpoint import ResponseTimeout
from penstock.client.response import HttpResponse
from penstock.core.os_threads import new_event_loop
from penstock.errors import DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, describe
from penstock.serving.protocols.oip_messages import Buffer
from penstock.values import shorten

_logger = logging.getLogger("penstock.bulk")

OnHang = Callable[[str, str], None]
BUSY: Final = (QueueFull, ModelNotReady, DeadlineExceeded)  # halve the window


class Undelivered(PenstockError, code="undelivered"):
    """A chunk has no captions after its last attempt, whose error is the `__cause__`."""


def undelivered(cause: PenstockError, attempts: int) -> Undelivered:
    count = f" ({attempts} attempts)" if attempts > 1 else ""
    error = Undelivered(cause.message + count, detail=cause.detail)
    error.__cause__ = cause
    return error


def _closed() -> NotSent:
    return NotSent("the sender was closed before this chunk was answered; the next run sends it")


class ChunkSender:
    """`start`, any number of `send`, `close`. `on_result` is called once for each chunk, in the sender's thread.

    So is `on_hang`, with the URL and the reason, for a server with requests in flight that has answered none of them
    for the longest time that a request may take.
    """

    def __init__(
        self, servers: Sequence[ServerInfo], options: SendOptions, on_result: OnResult, *,
        on_hang: OnHang = lambda url, why: None, seed: int | None = None,
    ) -> None:  # fmt: skip
        self._on_result = on_result
        self._delivery = _Delivery(servers, options, self._report, on_hang, seed)
        self._lock = threading.Lock()
        self._inbox: list[Chunk] = []
        self._notified = False
        self._loop: asyncio.AbstractEventLoop | None = None  # None before the start and after the end
        self._thread = threading.Thread(target=self._run, name="penstock-sender", daemon=True)
        self._started = threading.Event()

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def send(self, chunk: Chunk) -> None:
        """Accepts a chunk without blocking. After the end it gets NotSent, in the caller's thread."""
        with self._lock:
            loop = self._loop
            if loop is not None:
                self._inbox.append(chunk)
                if not self._notified:
                    self._notified = True
                    loop.call_soon_threadsafe(self._take)
                return
        self._report(chunk, self._delivery.stopped or _closed())

    def close(self, drain_s: float) -> None:
        """Gives unsent chunks NotSent now, and chunks in flight after at most `drain_s`.

        Returns when every chunk has a result and the thread has ended. A second call can shorten the first one's time.
        """
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._delivery.end, drain_s)
        self._thread.join()

    def stats(self) -> SendStats:
        """The numbers may be a moment apart."""
        loop = self._loop
        return self._delivery.stats(len(self._inbox), loop.time() if loop is not None else None)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            self._loop = runner.get_loop()
            self._started.set()
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._delivery.ended.wait()
        with self._lock:
            self._loop = None
        self._take()
        self._delivery.close()

    def _take(self) -> None:
        with self._lock:
            chunks, self._inbox, self._notified = self._inbox, [], False
        self._delivery.add(chunks)

    def _report(self, chunk: Chunk, result: ChunkResult) -> None:
        try:
            self._on_result(chunk, result)
        except Exception:
            _logger.exception(
                "video=%r frame=%d its response is lost: the job failed on it", chunk.video.name, chunk.frames[0]
            )


def tokens_of(answers: Answers) -> int:
    """The tokens that answers took, if the server counts them."""
    return sum([sum(answer.tokens) for answer in answers if isinstance(answer, Answer) and answer.tokens])


class _Delivery:
    """The sender's work on its loop: chunks wait in a heap, are in flight to a server, or wait for a retry."""

    def __init__(
        self, servers: Sequence[ServerInfo], options: SendOptions, report: OnResult, on_hang: OnHang, seed: int | None
    ) -> None:
        self.stopped: PenstockError | None = None  # why nothing is sent any more
        self.ended = asyncio.Event()
        self._options = options
        self._report, self._on_hang = report, on_hang
        self._endpoints = [ServerEndpoint(info, options) for info in servers]
        self._info = servers[0]  # as the others
        self._health = EndpointHealth(options, random.Random(seed), pump=self._pump, halt=self._halt)
        self._waiting: list[UploadChunk] = []  # a heap, the oldest first
        self._delayed: dict[UploadChunk, asyncio.TimerHandle] = {}
        self._in_flight: set[asyncio.Task[Answers]] = set()
        self._abandon: asyncio.TimerHandle | None = None  # set while closing
        self._watching = False
        self._requests, self._tokens = (None if n is None else RateLimit(n) for n in (options.rpm, options.tpm))
        self._typical_tokens = 0.0  # of a request
        self._paused: asyncio.TimerHandle | None = None  # by a rate limit
        self._added = self._answered = self._retries = self._sent_bytes = 0
        # Servers remember answers for a while; a job that runs again must get new captions, not the remembered ones.
        self._job = f"{options.fingerprint[:8]}-{secrets.token_hex(4)}"

    def stats(self, inbox: int, now: float | None) -> SendStats:
        servers = tuple(endpoint.stats(now) for endpoint in self._endpoints)
        return SendStats(
            in_flight=sum(server.in_flight for server in servers),
            window=sum(server.window for server in servers),
            waiting=inbox + len(self._waiting) + len(self._delayed),
            answered=self._answered,
            retries=self._retries,
            sent_bytes=self._sent_bytes,
            servers=servers,
        )

    def add(self, chunks: list[Chunk]) -> None:
        if not self._watching and self.stopped is None:
            self._watching = True
            self._health.watch(self._endpoints)
        for chunk in chunks:
            self._added += 1
            try:
                headers, body = self._info.backend.encode(chunk, self._info, self._job)
                heapq.heappush(self._waiting, UploadChunk(chunk, self._added, headers, body))
            except Exception as exc:  # of a backend
                _logger.debug("frame=%d cannot be encoded", chunk.frames[0], exc_info=exc)
                self._report(chunk, Undelivered(f"the chunk cannot be sent: {describe(exc)}"))
        self._pump()

    def _pump(self) -> None:
        """Sends as many chunks as the windows allow."""
        if self.stopped is not None:
            self._flush(self.stopped)
            return
        while self._waiting:
            endpoint = self._pick(self._waiting[0])
            if endpoint is None or self._pauses():
                return
            upload = heapq.heappop(self._waiting)
            upload.tokens = self._typical_tokens
            self._spend(1, upload.tokens)
            upload.last_endpoint = endpoint
            now = loop_time()
            endpoint.window.sent(now)
            task = asyncio.ensure_future(self._deliver(upload, endpoint))
            self._in_flight.add(task)
            task.add_done_callback(functools.partial(self._finish, upload, endpoint, now))

    def _pauses(self) -> bool:
        """Whether a rate limit forbids the next request; then it is sent later."""
        if self._paused is None:
            now = loop_time()
            wait_s = max([0.0, *(limit.wait_s(now) for limit in (self._requests, self._tokens) if limit is not None)])
            if wait_s > 0:
                self._paused = asyncio.get_running_loop().call_later(wait_s, self._go_on)
        return self._paused is not None

    def _go_on(self) -> None:
        self._paused = None
        self._pump()

    def _spend(self, requests: float, tokens: float) -> None:
        if self._requests is not None:
            self._requests.spend(requests)
        if self._tokens is not None:
            self._tokens.spend(tokens)

    def _pick(self, upload: UploadChunk) -> ServerEndpoint | None:
        """The least loaded server with room; if possible not the one where the chunk failed last."""
        now = loop_time()
        up = [endpoint for endpoint in self._endpoints if endpoint.is_up(now)]
        if upload.attempts and len(up) > 1:
            up = [endpoint for endpoint in up if endpoint is not upload.last_endpoint]
        return min((endpoint for endpoint in up if endpoint.window.room() > 0), key=lambda e: e.load, default=None)

    async def _deliver(self, upload: UploadChunk, endpoint: ServerEndpoint) -> Answers:
        """The captions. Raises as a connection and `Backend.answers` do."""

        posted = 0

        async def post(body: Sequence[Buffer]) -> HttpResponse:
            nonlocal posted
            posted += 1
            if posted > 1:  # a repair, which is too short to wait for
                self._spend(1, 0)
            connection = endpoint.take_connection()
            try:
                return await connection.request(
                    "POST",
                    endpoint.path,
                    [*upload.headers, *endpoint.headers],
                    body,
                    timeout_s=self._options.request_timeout_s,
                    max_response_bytes=self._options.max_response_bytes,
                )
            finally:
                endpoint.return_connection(connection)

        found = await endpoint.info.backend.answers(upload.chunk, upload.body, endpoint.info, post)
        texts = [answer.caption if isinstance(answer, Answer) else answer for answer in found]
        count = len(upload.chunk.captioned)
        if len(texts) != count or not all(isinstance(text, str) for text in texts):
            raise WrongAnswer(
                f"{endpoint.info.url}: the backend found {shorten(repr(texts), 80)}, expected {count} texts or Answers"
            )
        return found

    def _finish(
        self, upload: UploadChunk, endpoint: ServerEndpoint, sent_s: float, task: asyncio.Task[Answers]
    ) -> None:
        """The only exit of an attempt, however it ended."""
        self._in_flight.discard(task)
        error = _closed() if task.cancelled() else task.exception()
        now = loop_time()
        if self._tokens is not None:
            spent = 0 if error is not None else tokens_of(task.result())
            self._tokens.spend(spent - upload.tokens)
            if spent:
                self._typical_tokens += (spent - self._typical_tokens) / (8 if self._typical_tokens else 1)
        if not isinstance(error, AWAY):
            endpoint.heard_s = now
        if error is None:
            endpoint.window.answered(sent_s, now, 0 if upload.attempts else len(upload.chunk.frames))
            endpoint.succeeded()
            self._health.succeeded()
            self._answered += 1
            self._sent_bytes += upload.body_bytes
            self._report(upload.chunk, task.result())
        else:
            if isinstance(error, BUSY):
                endpoint.window.refused(sent_s, now)
            else:
                endpoint.window.lost()
            if isinstance(error, ResponseTimeout) and endpoint.heard_s <= sent_s:
                why = f"it has answered no request for {self._options.request_timeout_s:g} s"
                self._on_hang(endpoint.info.url, why)
            self._fail(upload, endpoint, error)
        self._pump()
        if self._abandon is not None and not self._in_flight:
            self.ended.set()

    def _fail(self, upload: UploadChunk, endpoint: ServerEndpoint, error: BaseException) -> None:
        """Schedules another attempt, or reports the error."""
        url = endpoint.info.url
        if not isinstance(error, PenstockError):
            _logger.error("server=%s a chunk is given up: the sender itself failed", url, exc_info=error)
            error = Undelivered(f"the sender failed: {describe(error)}")
        if isinstance(error, ENDS_THE_JOB):
            self._halt(error)
        if self.stopped is not None:
            self._report(upload.chunk, self.stopped)
            return
        self._health.failed(endpoint, error)
        if not isinstance(error, LATER):
            upload.attempts += 1
            if not isinstance(error, AGAIN) or upload.attempts >= self._options.attempts:
                info, result = endpoint.info, undelivered(error, upload.attempts)
                rows = (
                    [failed_row(result, info)] * len(upload.chunk.captioned) if info.backend.errors_are_rows else None
                )
                self._report(upload.chunk, rows or result)
                return
        self._retries += 1
        _logger.debug("server=%s frame=%d again=%s: %s", url, upload.chunk.frames[0], error.code, error.message)
        if isinstance(error, LATER):  # the server rests, not the chunk: another server may take it now
            heapq.heappush(self._waiting, upload)
        else:
            delay_s = self._health.backoff_s(upload.attempts)
            self._delayed[upload] = asyncio.get_running_loop().call_later(delay_s, self._retry, upload)

    def _retry(self, upload: UploadChunk) -> None:
        del self._delayed[upload]
        heapq.heappush(self._waiting, upload)
        self._pump()

    def _halt(self, error: PenstockError) -> None:
        """Sends nothing more; chunks in flight may still get captions."""
        if self.stopped is None:
            self.stopped = error
            if not isinstance(error, NotSent):
                _logger.error("code=%s nothing more is sent: %s", error.code, error.message)
        self._health.close()
        self._flush(self.stopped)

    def _flush(self, error: PenstockError) -> None:
        for timer in self._delayed.values():
            timer.cancel()
        uploads = sorted([*self._waiting, *self._delayed])
        self._waiting.clear()
        self._delayed.clear()
        for upload in uploads:
            self._report(upload.chunk, error)

    def end(self, drain_s: float) -> None:
        """Sets `ended` when nothing is in flight, after at most `drain_s`. Another call can only shorten the time."""
        self._halt(_closed())
        loop = asyncio.get_running_loop()
        if self._abandon is None or loop.time() + drain_s < self._abandon.when():
            if self._abandon is not None:
                self._abandon.cancel()
            self._abandon = loop.call_later(drain_s, self._cancel_all)
        if not self._in_flight:
            self.ended.set()

    def _cancel_all(self) -> None:
        for task in self._in_flight:
            task.cancel()

    def close(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
        for endpoint in self._endpoints:
            endpoint.close()
