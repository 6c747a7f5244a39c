"""The process of a shared batcher: `python -m penstock.streamer.shared.batcher`, started by `start.py` alone.

It has the backend of an ordinary streamer, one session per client, and no parent. It ends `linger_s` after its last
client has left. What a client held ends with its connection: waiting calls, their memory, and unread answers.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from typing import Any, Final

from penstock.core.transports.process import RECEIVE_BYTES
from penstock.core.wire.messages import FrameDecoder, WorkerFailed, write
from penstock.errors import ConfigError, PenstockError, QueueFull, describe
from penstock.serving.lifetime import runner
from penstock.serving.logs import TextFormatter
from penstock.streamer.backend import LocalBackend
from penstock.streamer.shared.address import check_peer, listening
from penstock.streamer.shared.messages import VERSION, JoinMessage, Offer, WelcomeMessage, read_offer
from penstock.streamer.shared.session import REPLY_BYTES, REQUEST_BYTES, Session
from penstock.streamer.shared.start import READY, STARTER_FD

log = logging.getLogger("penstock.streamer")

MAX_CLIENTS: Final = 1024
DRAIN_S: Final = 10.0  # for accepted calls, after a signal
END_S: Final = 60  # then the kernel ends the process
RUNNING_ROWS: Final = 256  # of one client that may run besides two batches per worker
LOG_BYTES: Final = 2**20  # of each of the two log files


class SharedBatcher:
    """The clients of one model, and the backend that answers them. Sets `stop` when it is no longer needed."""

    def __init__(self, offer: Offer, listener: Any, stop: asyncio.Event) -> None:
        self._offer = offer
        self.model = str(offer.config.target)
        self._listener = listener
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        instances, size = offer.config.instances, offer.config.batching.max_batch_size
        max_queue = offer.config.batching.max_queue
        assert isinstance(instances, int)
        assert isinstance(size, int)
        assert max_queue is not None
        target = offer.packed_target()
        self.backend = LocalBackend(
            self.model, offer.config, target, offer.sys_path, max_queue, offer.limits, log_level="INFO"
        )
        self.max_rows = max_queue + 2 * instances * size + RUNNING_ROWS
        self.sessions: set[Session] = set()
        self.buffer = bytearray(RECEIVE_BYTES)
        self._linger = self._loop.call_later(offer.linger_s, self._end_if_unused)
        self._loaded = self._loop.create_task(self._tell_when_loaded())
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # none is left
                return
            try:
                check_peer(sock)
                sock.setblocking(False)
                if len(self.sessions) >= MAX_CLIENTS:
                    full = QueueFull(f"{MAX_CLIENTS} processes share this batcher, the most that can")
                    sock.send(b"".join(write(WorkerFailed(full))))
                    sock.close()
                    continue
                self._linger.cancel()
                self.sessions.add(Session(self, sock))
            except (ConfigError, OSError) as e:
                log.warning("client_refused error=%s", e)
                sock.close()

    def left(self, session: Session) -> None:
        self.sessions.discard(session)
        if not self.sessions:
            self._linger.cancel()
            self._linger = self._loop.call_later(self._offer.linger_s, self._end_if_unused)

    def _end_if_unused(self) -> None:
        self._accept()  # a client may have come just now
        if not self.sessions:
            self._stop.set()

    def refusal(self, message: JoinMessage) -> PenstockError | None:
        """Why a client may not join; None if it may."""
        if message.version != VERSION:
            return ConfigError(f"the batcher runs Penstock {VERSION}, this process {message.version}: restart all")
        conflict = "" if message.settings is None else self._offer.conflict(message.settings)
        if conflict:
            text = f"the batcher of this name has other settings: {conflict}; give the same, or use another name"
            return ConfigError(text)
        return None

    def welcome(self) -> WelcomeMessage:
        offer = self._offer
        most = 2 * offer.limits.max_queue_bytes
        idempotent = offer.config.batching.idempotent
        loading = not self._loaded.done()
        return WelcomeMessage(os.getpid(), REQUEST_BYTES, REPLY_BYTES, self.max_rows, most, idempotent, loading)

    async def _tell_when_loaded(self) -> None:
        """Once: a client that waits too long for an answer then knows whether the model was still loading."""
        with suppress(PenstockError):  # callers get it
            await self.backend.ready()
        for session in self.sessions:
            session.send_loaded()

    async def statistics(self) -> dict[str, object]:
        """Those of the model, and the number of clients."""
        return {**self.backend.statistics(self.model), "clients": len(self.sessions), "pid": os.getpid()}

    async def close(self) -> None:
        """Answers accepted calls for a while, and ends the workers. Clients send what it did not read to another.
        Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._linger.cancel()
        self._loaded.cancel()
        for session in self.sessions:
            session.pause()
        await self.backend.close(DRAIN_S if self.sessions else 0.0)
        await asyncio.sleep(0)  # the last answers are sent
        for session in list(self.sessions):
            session.close()


async def _serve(offer: Offer, listener: Any, path: str) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    batcher = SharedBatcher(offer, listener, stop)
    log.info("batcher_ready path=%s pid=%d", path, os.getpid())
    await stop.wait()
    signal.alarm(END_S)  # whatever hangs, the next batcher need not wait longer
    with suppress(FileNotFoundError):
        os.unlink(path)
    await batcher.close()
    log.info("batcher_ended path=%s pid=%d", path, os.getpid())


class _LogFile(RotatingFileHandler):
    """The log, to which the process itself writes too."""

    def doRollover(self) -> None:
        super().doRollover()
        assert self.stream is not None
        for fd in (1, 2):
            os.dup2(self.stream.fileno(), fd)


def _received_offer(sock: socket.socket) -> Offer:
    decoder = FrameDecoder()
    while data := sock.recv(2**16):
        for frame in decoder.feed(data):
            return read_offer(frame.head)
    sys.exit("the process that started this batcher has ended")


def main(arguments: list[str]) -> None:
    """Argument: path of the socket."""
    (path,) = arguments
    if os.fork():
        os._exit(0)  # no client is its parent: a web server that counts its children would miscount
    os.setsid()
    os.closerange(STARTER_FD + 1, os.sysconf("SC_OPEN_MAX"))  # such as the listener of a web server
    os.set_inheritable(STARTER_FD, False)
    with socket.socket(fileno=STARTER_FD) as starter:
        offer = _received_offer(starter)
        alive = os.open(f"{path}.alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(alive, fcntl.LOCK_EX)  # until this process ends
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        handler = _LogFile(f"{path}.log", maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
        handler.setFormatter(TextFormatter("%(asctime)s %(process)d %(levelname)s %(name)s %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        try:
            listener = listening(path)
        except ConfigError as e:
            log.error("not_listening error=%s", describe(e))
            raise
        starter.sendall(READY)
    runner()(_serve(offer, listener, path))


if __name__ == "__main__":
    main(sys.argv[1:])
