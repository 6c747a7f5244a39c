"""A bulk job on a Ray cluster: each video is a task on any node, which decodes it and asks the servers.

The job stays where it was started, with its spools, order and resume: `RayCaptions` takes the place of its decoders'
reading and of its sender. A task streams rows back, and waits while the job has not taken them. If its node is lost,
another task continues after the last row that came, so no row comes twice and little is captioned again.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

from msgspec import Struct, structs

from penstock.backoff import Backoff
from penstock.bulk.decode import BlockPool, read_chunks
from penstock.bulk.endpoints import NoServer
from penstock.bulk.job import JobParts
from penstock.bulk.options import MIN_MEMORY, JobPlan
from penstock.bulk.sender import ChunkSender
from penstock.bulk.servers import ServerInfo
from penstock.bulk.types import (
    Chunk,
    ChunkResult,
    OnResult,
    Position,
    ReadResult,
    SendOptions,
    SendStats,
    Stopped,
    Video,
)
from penstock.client.endpoint import parse_url, tls_context
from penstock.errors import PenstockError, describe
from penstock.ray.transport import check_ray, connect

log = logging.getLogger("penstock.ray")

AHEAD: Final = 8  # chunks of a task that the job has not taken: a second of captions
LOOK_S: Final = 0.2  # between two looks whether the job ends
LOOKS: Final = 25  # without a row, until one whether the cluster still has a node
ATTEMPTS: Final = 8  # tasks in a row that end without a row; as for a chunk at a server
FIRST_S, LONGEST_S = 0.5, 30.0  # pauses between them, as for a chunk


class NoNode(NoServer, code="no_node"):
    """No node of the cluster is left for tasks; the job ends."""


class TaskFailed(PenstockError, code="task_failed"):
    """A task raised an unexpected error; the video fails, the job continues."""


class TaskLost(PenstockError, code="task_lost"):
    """The cluster lost a video's tasks several times in a row; the video fails, the job continues."""

    stage = "ray"


class Rows(Struct):
    """A chunk on its way from a task to the job: without pixels, with its result and the bytes sent since the last."""

    chunk: Chunk
    result: ChunkResult
    sent_bytes: int


class NoBlock:
    """The memory of a chunk that has no pixels here."""

    def release(self) -> None: ...


class RayCaptions:
    """The parts of a job on a cluster. Connects to it; raises ConfigError, LoadFailed, NoNode."""

    def __init__(self, address: str) -> None:
        check_ray()
        connect(address)
        import ray

        self._ray = ray
        self.cpus = self._check_cpus()
        self._task = ray.remote(caption_video)
        self._lock = threading.Lock()
        self._results: dict[tuple[str, int], Rows] = {}
        self._answered = self._retries = self._sent_bytes = self._running = 0

    def parts(self) -> JobParts:
        return JobParts(read_chunks=self.read_chunks, sender=self._as_sender)

    def _check_cpus(self) -> int:
        """The CPUs of all nodes that are alive. Raises NoNode if there is none: tasks would wait for ever."""
        cpus = int(self._ray.cluster_resources().get("CPU", 0))
        if cpus < 1:
            raise NoNode("the Ray cluster has no CPU for a task: add a node, or start it with --num-cpus")
        return cpus

    # ---- in place of decoding

    def read_chunks(
        self, video: Video, plan: JobPlan, pool: BlockPool, resume: Position | None = None
    ) -> Generator[Chunk, None, ReadResult]:
        """As `decode.read_chunks`; each chunk has its result already, which `send` reports."""
        chunks = lost = 0
        pause = Backoff(FIRST_S, LONGEST_S)
        while True:
            try:
                for found in self._stream(video, plan, pool, resume):
                    if isinstance(found, ReadResult):
                        return structs.replace(found, chunks=chunks)
                    found.chunk.number, lost = chunks, 0
                    chunks += 1
                    pause.reset()
                    if plan.again is None:
                        resume = _after(found.chunk, resume)
                    else:
                        plan = structs.replace(plan, again=plan.again.without(found.chunk.captioned))
                    with self._lock:
                        self._results[video.name, found.chunk.number] = found
                    yield found.chunk
            except self._ray.exceptions.RayTaskError as e:  # what another task would raise again
                raise TaskFailed(f"a task of the Ray cluster failed: {describe(e.cause or e)}", detail=str(e)) from e
            except self._ray.exceptions.RayError as e:
                lost += 1
                if lost == ATTEMPTS:
                    error = TaskLost(f"{lost} tasks of the Ray cluster were lost in a row, the last: {describe(e)}")
                    return ReadResult(chunks, 0 if resume is None else resume.frame + 1, error)
                log.warning("video=%s a task was lost and starts again: %s", video.name, describe(e))
                with self._lock:
                    self._retries += 1
                until_s = time.monotonic() + pause.next_s()
                while time.monotonic() < until_s:
                    _check(pool)
                    time.sleep(LOOK_S)

    def _stream(
        self, video: Video, plan: JobPlan, pool: BlockPool, resume: Position | None
    ) -> Iterator[Rows | ReadResult]:
        """What a task gives, until its end. Raises RayError if it is lost, Stopped if the job ends."""
        ray = self._ray
        options = {"num_returns": "streaming", "max_retries": 0, "_generator_backpressure_num_objects": AHEAD}
        stream = self._task.options(**options).remote(video, plan, resume, self._servers, self._sending)
        with self._lock:
            self._running += 1
        try:
            while True:
                ready: list[Any] = []
                looks = 0
                while not ready:
                    _check(pool)
                    looks += 1
                    if looks % LOOKS == 0:
                        self._check_cpus()
                    ready, _ = ray.wait([stream], timeout=LOOK_S)
                try:
                    yield ray.get(next(stream))
                except StopIteration:
                    return
        finally:
            with self._lock:
                self._running -= 1
            ray.cancel(stream)

    # ---- in place of the sender

    def _as_sender(self, servers: list[ServerInfo], sending: SendOptions, on_result: OnResult) -> Any:
        # an SSL context stays in its process; the URL and `ca` make another one
        plain = [(info.url, structs.replace(info, address=structs.replace(info.address, tls=None))) for info in servers]
        self._servers, self._sending, self._on_result = plain, sending, on_result
        return self

    def start(self) -> None: ...

    def send(self, chunk: Chunk) -> None:
        with self._lock:
            found = self._results.pop((chunk.video.name, chunk.number))
            self._answered += 1
            self._sent_bytes += found.sent_bytes
        self._on_result(chunk, found.result)

    def close(self, drain_s: float) -> None: ...

    def stats(self) -> SendStats:
        return SendStats(self._running, self._running, 0, self._answered, self._retries, self._sent_bytes, ())


def _check(pool: BlockPool) -> None:
    """Raises Stopped when the job ends."""
    if pool.stopped:
        raise Stopped


def _after(chunk: Chunk, before: Position | None) -> Position:
    rows = chunk.captioned
    return Position(rows[-1].frame, rows[-1].pts, len(rows) + (0 if before is None else before.taken))


# ---- on a node of the cluster


def caption_video(
    video: Video,
    plan: JobPlan,
    resume: Position | None,
    servers: Sequence[tuple[str, ServerInfo]],
    sending: SendOptions,
) -> Iterator[Rows | ReadResult]:
    """Decodes a video and asks the servers: the rows of each chunk in order, then how reading ended."""
    pool = BlockPool(max(MIN_MEMORY, plan.pool_bytes // plan.decoders), plan.block_bytes)
    infos = [
        structs.replace(info, address=parse_url(url, tls_context(info.ca) if info.ca else None))
        for url, info in servers
    ]
    changed = threading.Condition()
    results: dict[int, ChunkResult] = {}

    def done(chunk: Chunk, result: ChunkResult) -> None:
        chunk.block.release()
        with changed:
            results[chunk.number] = result
            changed.notify()

    sender = ChunkSender(infos, sending, done)
    sender.start()
    sent: deque[Chunk] = deque()
    sent_bytes = 0

    def ready(*, wait: bool) -> Iterator[Rows]:
        nonlocal sent_bytes
        while sent:
            with changed:
                if not wait and sent[0].number not in results:
                    return
                changed.wait_for(lambda: sent[0].number in results)
                result = results.pop(sent[0].number)
            chunk = sent.popleft()
            chunk.pixels, chunk.block = [], NoBlock()
            total = sender.stats().sent_bytes
            yield Rows(chunk, result, total - sent_bytes)
            sent_bytes = total

    chunks = read_chunks(video, structs.replace(plan, threads=1), pool, resume)
    try:
        while True:
            try:
                chunk = next(chunks)
            except StopIteration as end:
                yield from ready(wait=True)
                yield end.value
                return
            sent.append(chunk)
            sender.send(chunk)
            yield from ready(wait=False)
    finally:
        pool.stop()
        chunks.close()
        sender.close(0.0)
