"""The way to the batcher of a name: joins it, or starts it if none runs; then carries calls, with their memory.

Settings and code are the identity of a batcher, and a part of its socket's path. So a rolling restart starts a second
batcher of the same name for the new processes, and the first one ends after the last old process. A client starts a
batcher while it holds the lock of the name, and only if no process listens at the path. The batcher itself holds
PATH.alive from before it listens until its process ends. So two with one identity never run at the same time, also
when one is just ending, and a file that a dead one left is no obstacle. The client opens nothing that a process forked
in the meantime could keep: neither the listener nor the batcher's own lock. `join` blocks: a client calls it in a
thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import glob
import json
import logging
import mmap
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from penstock import tracing
from penstock.core import os_threads
from penstock.core.transports.launch import python
from penstock.core.transports.process import Channel
from penstock.core.wire import messages
from penstock.core.wire.slabs import Slab, SlabPool, map_read_only
from penstock.core.worker.nesting import may_start_workers
from penstock.errors import ConfigError, ModelNotReady
from penstock.streamer.shared.protocol import (
    READY,
    STARTER_FD,
    VERSION,
    CallMessage,
    FromBatcher,
    JoinMessage,
    LoadedMessage,
    Offer,
    SpanMessage,
    WelcomeMessage,
    close,
    connected,
    keep,
    put_values,
    socket_path,
    socket_paths,
    write_offer,
)
from penstock.types import Item, ItemResult, Sink

log = logging.getLogger("penstock.streamer")

START_S: Final = 60.0  # for a batcher to listen; it waits for the end of the previous batcher
GREET_S: Final = 10.0  # for its response to a new client
ATTEMPTS: Final = 5  # a batcher may end just when a client arrives
MAX_BATCHERS: Final = 4  # of one name: each has the model in memory
_LOCK_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Joined(Struct):
    """A socket with the welcome of a batcher, and the descriptors of the shared memory for requests and replies."""

    sock: Any
    welcome: WelcomeMessage
    fds: list[int]

    def close(self) -> None:
        close(self.sock)
        for fd in self.fds:
            os.close(fd)


def join(shared: str, offer: Offer | None) -> Joined:
    """Connects to the batcher with the identity of `offer`, which starts if none runs; without an offer, to the newest
    batcher of the name.

    Raises ConfigError for a wrong address, directory or user, or with too many batchers of this name; ModelNotReady if
    there is none, or if it does not start; LoadFailed in a worker that must not start another.
    """
    base = socket_path(shared)
    for _ in range(ATTEMPTS):
        paths = socket_paths(base) if offer is None else [f"{base}.{offer.identity}"]
        path, sock = _first_connected(paths)
        if sock is None:
            if offer is None:
                raise ModelNotReady(f"no batcher listens at {base}.*: a Streamer(..., shared={shared!r}) starts one")
            path, sock = _started(base, offer.renewed())
        joined = None if sock is None else _greeted(sock, path, offer)
        if joined is not None:
            return joined
    raise ModelNotReady(f"the batcher at {path} ended again and again before it answered; its log is {path}.log")


def _first_connected(paths: list[str]) -> tuple[str, Any]:
    """(path, socket) of the first batcher that listens; the socket is None if none does."""
    for path in paths:
        if (sock := connected(path)) is not None:
            return path, sock
    return "", None


def _started(base: str, offer: Offer) -> tuple[str, Any]:
    """(path, socket) of a new batcher, or of one that another process has started meanwhile; the socket is None if it
    has ended."""
    path = f"{base}.{offer.identity}"
    lock = os.open(f"{base}.lock", _LOCK_FILE, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sock = connected(path)
        if sock is None:
            _check_others(base, path, offer)
            _start(path, offer)
            sock = connected(path)
        return path, sock
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for the copies of processes that were forked meanwhile
        os.close(lock)


def _check_others(base: str, path: str, offer: Offer) -> None:
    """Warns of other batchers of this name that run, and removes the files of dead ones. The caller holds the lock of
    the name. Raises ConfigError if the others are too many."""
    differences = []
    for file in glob.glob(f"{glob.escape(base)}.*.alive"):
        other = file.removesuffix(".alive")
        if other == path:
            continue
        alive = os.open(file, _LOCK_FILE, 0o600)
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with suppress(ValueError):  # its starter was killed before it had written them
                differences.append(offer.differences(json.loads(os.read(alive, 2**16))))
        else:
            for each in glob.glob(f"{glob.escape(other)}*"):
                os.unlink(each)
        finally:
            os.close(alive)
    if len(differences) >= MAX_BATCHERS:
        raise ConfigError(
            f"{len(differences)} batchers of this name run with other code or settings, the most that can"
            f" ({differences[0]}): give the same in all processes, or another name"
        )
    for each in differences:
        log.warning("batcher_beside path=%s difference=%r: the other one ends after its last process", path, each)


def _start(path: str, offer: Offer) -> None:
    """Returns when the batcher listens. It outlives this process: it has its own session and no parent."""
    may_start_workers()
    offered = write_offer(offer)
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    ours, theirs = map(keep, os_threads.socketpair())
    try:
        command = [python(), "-P", "-m", "penstock.streamer.shared.batcher", path]
        os_threads.run_detached(command, {0: null, 1: log, 2: log, STARTER_FD: theirs.fileno()})
        close(theirs)
        ours.settimeout(START_S)
        found = b""
        try:
            for piece in messages.frame_of(offered):
                ours.sendall(piece)
            found = ours.recv(1)
        except TimeoutError:
            raise ModelNotReady(
                f"the batcher at {path} did not listen within {START_S:g} s: an earlier one, which holds {path}.alive,"
                f" may not end; the log is {path}.log"
            ) from None
        except OSError:
            pass
        if found != READY:
            raise ModelNotReady(f"the batcher at {path} ended before it listened; its log is {path}.log")
    finally:
        close(ours)
        close(theirs)
        os.close(log)
        os.close(null)


def _greeted(sock: Any, path: str, offer: Offer | None) -> Joined | None:
    """The welcome on a new connection; None if the batcher ended. Raises what the batcher answers, ModelNotReady."""
    fds: list[int] = []
    try:
        sock.settimeout(GREET_S)
        with suppress(BrokenPipeError, ConnectionResetError):  # it ended, or refuses more clients and says so
            sock.sendall(b"".join(messages.write(JoinMessage(VERSION, guest=offer is None))))
        message = _first_message(sock, fds)
        if message is None:
            close(sock)
            return None
        if isinstance(message, messages.WorkerFailed):
            raise message.error
        if not isinstance(message, WelcomeMessage) or len(fds) != 2:
            raise ModelNotReady(f"the process at {path} is no batcher of this version")
        sock.setblocking(False)
        return Joined(sock, message, fds)
    except BaseException as e:
        close(sock)
        for fd in fds:
            os.close(fd)
        if isinstance(e, TimeoutError):
            raise ModelNotReady(f"the batcher at {path} did not answer within {GREET_S:g} s") from None
        raise


def _first_message(sock: Any, fds: list[int]) -> Any:
    """The first message, whose descriptors are added to `fds`; None at the end of the socket."""
    decoder, reader = messages.FrameDecoder(), messages.MessageReader(FromBatcher, _no_memory)
    while True:
        try:
            data, received, _, _ = socket.recv_fds(sock, 2**16, 2)
        except (ConnectionResetError, BrokenPipeError):
            return None
        fds += received
        if not data:
            return None
        frames = decoder.feed(data)
        if frames:
            return reader.read(frames[0])


def _no_memory(offset: int, length: int, writable: bool) -> Any:
    raise ValueError("a first message refers to no shared memory")


# ---- calls as messages


MAX_FREE: Final = 16  # read reply places that wait for the next call to be reported


class SharedCall:
    """Ticket of one call. `slabs`: its memory, until the batcher has answered."""

    def __init__(self, abandon: Callable[[SharedCall], None], sink: Sink, item: Item | None, nbytes: int = 0) -> None:
        self.item, self.nbytes = item, nbytes
        self.sink: Sink | None = sink
        self.rows = 0 if item is None else item.rows
        self.asks = ""
        self.expires_s: float | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.slabs: list[Slab] = []
        self.sent = False
        self.deaths = 0
        self.id = 0
        self._abandon = abandon

    def cancel(self) -> None:
        if self.sink is not None:
            self.sink = None
            self._abandon(self)

    def settle(self, result: ItemResult) -> None:
        """Delivers the response, unless the caller left."""
        sink, self.sink = self.sink, None
        if self.timer is not None:
            self.timer.cancel()
        for slab in self.slabs:
            slab.release()
        self.slabs = []
        if sink is not None:
            sink(result)


class BatcherLink:
    """The connection to one batcher, with the memory for requests and for replies."""

    def __init__(
        self, joined: Joined, on_answer: Callable[[messages.PartMessage], None], on_end: Callable[[], None]
    ) -> None:
        self.welcome = joined.welcome
        self.loading = self.welcome.loading
        self.answered = False  # the batcher has answered a call
        self._loop = asyncio.get_running_loop()
        self._sock = joined.sock
        self._on_answer, self._on_end = on_answer, on_end
        request_fd, reply_fd = joined.fds
        self._pool = SlabPool(self.welcome.request_bytes, request_fd)
        self._replies: mmap.mmap = map_read_only(reply_fd, self.welcome.reply_bytes)
        os.close(reply_fd)
        self._free: list[int] = []
        self._reader = messages.MessageReader(FromBatcher, self._read_reply)
        self._channel = Channel(self._loop, self._sock, self._on_frame, on_end, drains=True)

    def send(self, call: SharedCall) -> None:
        """Sends a call, with its memory in `call.slabs`. Raises the errors of msgspec."""
        outbox = messages.MessageWriter(self._pool)
        item = call.item
        if item is not None:
            left_s = None if call.expires_s is None else call.expires_s - self._loop.time()
            payload = put_values(outbox, item.payload)
            item = replace(item, payload=payload, budget_s=left_s)
        call.slabs = outbox.slabs
        free, self._free = self._free, []
        self._channel.send_soon(messages.write(CallMessage(call.id, item, free, call.asks), outbox.buffers))

    def abandon(self, call_id: int) -> None:
        self._channel.send_soon(messages.write(messages.AbandonBatch(call_id)))

    def _on_frame(self, frame: messages.Frame) -> None:
        try:
            message = self._reader.read(frame)
            if not isinstance(message, messages.PartMessage):
                if isinstance(message, LoadedMessage):
                    self.loading = False
                elif isinstance(message, SpanMessage):
                    if (tracer := tracing.tracer) is not None:
                        tracer.emit(message.span)
                else:
                    raise TypeError(f"a {type(message).__name__}")
                return
        except Exception:
            log.exception("batcher_broken: its response cannot be read, and another batcher is asked")
            self._channel.close()
            self._loop.call_soon(self._on_end)
            return
        self.answered = True
        self._on_answer(message)
        if len(self._free) > MAX_FREE:
            self._channel.send_soon(messages.write(messages.FreeReplies(self._free)))
            self._free = []

    def _read_reply(self, offset: int, length: int, writable: bool) -> bytearray:
        self._free.append(offset)
        with memoryview(self._replies) as region, region[offset : offset + length] as data:
            return bytearray(data)

    def return_memory(self) -> None:
        """Acknowledges read replies now, because no later call will carry it."""
        if self._free:
            self._channel.send_soon(messages.write(messages.FreeReplies(self._free)))
            self._free = []

    def close(self) -> None:
        self._channel.flush()
        self._channel.close()
        self.forget()

    def forget(self) -> None:
        """Closes this process's copies of the descriptors, and touches nothing else."""
        close(self._sock)
        self._pool.close()
        with suppress(BufferError):
            self._replies.close()
