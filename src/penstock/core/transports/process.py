"""The process transport, parent's end: one child process per slot, one message per batch over a socketpair.

The pidfd (or the end of the socket) reports a death at once. The other end is `child.py`.
"""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import Any

from penstock.core.contracts import TransportListener
from penstock.core.os_threads import usable_cores
from penstock.core.transports.launch import Child, PackedSpec, launch, pack_spec
from penstock.core.transports.output import Output
from penstock.core.transports.slot import Sent, SlotTransport, WorkerSlot, unpin, within
from penstock.core.wire import messages
from penstock.core.wire.lending import LENT_BYTES, Lender
from penstock.core.wire.slabs import Slab, SlabPool
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import BadOutput, ItemFailed, LoadFailed, PenstockError, WorkerDied
from penstock.types import Batch, BatchPart, ItemResult

log = logging.getLogger("penstock.transports")

END_GRACE_S = 0.03  # from the end of the socket to the exit of the process; then it is killed
DUMP_S = 1.0  # for the stack dump of a hanging worker
STOP_S = 5.0  # for `unload`
RECEIVE_BYTES = 256 * 2**10
MAX_READS = 16  # more than a socket holds
MAX_PIECES = 64  # per system call, far below IOV_MAX
SHORT_S = 0.0003  # a choice: longer rounds are waited for in sleep, whose cost they hide
LONGEST_PAUSE = 63  # rounds; a choice: a trial every 64 rounds then costs less than 2 % of a core
MAX_FREE = 16  # read reply places that wait for the next batch to be reported


class ActiveWait:
    """Decides whether to wait actively for the response to a lone request.

    An interrupt of another core wakes a process that sleeps. It costs both sides more than a short run: on a virtual
    machine with two cores, a lone request to a small model took 0.35 ms with sleep and 0.12 to 0.26 ms without. So
    while rounds are short, the loop looks for the response instead of sleeping. After a longer round, from a slow model
    or beside a busy neighbour, it sleeps, and tries again after a pause, which doubles up to LONGEST_PAUSE rounds: the
    sleep itself may be what makes the rounds long. It never waits actively with one core, which the worker needs; with
    several slots, which other requests could use; nor outside the main thread, where it would take the interpreter from
    a program's other threads.
    """

    def __init__(self) -> None:
        self._able = usable_cores() > 1 and threading.current_thread() is threading.main_thread()
        self._sent_s = 0.0  # of the lone request that is on its way
        self.end_s = 0.0  # until when the loop waits actively for its response
        self._pause = self._left = 0  # rounds of the present pause, and those that are left

    def begin(self) -> bool:
        """Whether to wait actively for the request that was just sent, until `end_s`."""
        if not self._able:
            return False
        self._sent_s = now = time.perf_counter()
        self.end_s = 0.0 if self._left else now + SHORT_S
        self._left = max(0, self._left - 1)
        return self.end_s > 0.0

    def end(self) -> None:
        """A response came."""
        if self._sent_s:
            round_s, self._sent_s = time.perf_counter() - self._sent_s, 0.0
            waited, self.end_s = self.end_s > 0.0, 0.0
            if round_s < SHORT_S:
                self._pause = self._left = 0
            elif waited:
                self._pause = self._left = min(2 * self._pause + 1, LONGEST_PAUSE)


class Channel:
    """One end of a socket: frames in and out on the event loop, without a task or a copy.

    Sends at once, and the rest when the socket is writable again. Calls `on_end` once, at EOF or a broken frame. With
    `patient`, reads nothing while a peer that reads too slowly has left something unsent. `drains`: for a peer whose
    end nothing else reports. If it ends without having read all, libuv reports its last data and that error as one
    event, the last one. `buffer`: memory for one read, which channels of one thread may share. `on_block`: called when
    the socket is full."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[messages.Frame], None],
        on_end: Callable[[], None],
        patient: bool = False,
        drains: bool = False,
        buffer: bytearray | None = None,
        on_block: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_end, self._on_block = on_end, on_block
        self.decoder = messages.FrameDecoder()
        self._buffer = memoryview(buffer or bytearray(RECEIVE_BYTES))
        self._unsent: deque[memoryview] = deque()
        self._open, self._flush_due = True, False
        self._patient = patient
        self._reads = MAX_READS if drains else 1  # of one event
        self.blocked = False  # the socket is full: `_writable` is called when it takes more
        self.sent_bytes = 0
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, pieces: list[messages.Buffer], more: bool = False) -> None:
        """Sends one frame; with `more`, waits for the next one or `flush`. Does nothing after the end of the stream."""
        if self._open:
            self._unsent.extend(map(memoryview, pieces))
            if not more:
                self.flush()

    def send_soon(self, pieces: list[messages.Buffer]) -> None:
        """Sends one frame, together with the others of this pass of the loop."""
        self.send(pieces, more=True)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._flush_due = False
        if self._open and not self.blocked:
            self._flush()
            if self._unsent:
                self._block()

    def _block(self) -> None:
        self.blocked = True
        self._on_block()
        self._loop.add_writer(self._sock.fileno(), self._writable)
        if self._patient:
            self._loop.remove_reader(self._sock.fileno())

    def drain(self) -> None:
        """Reads everything that has arrived: the responses of a worker before its death."""
        while self._open and self._receive():
            pass

    def stop_reading(self) -> None:
        """Stops reading: what the peer sends from now on stays in the socket."""
        self._patient = False
        if self._open:
            self._loop.remove_reader(self._sock.fileno())

    def close(self) -> None:
        """Leaves the loop; the owner closes the socket."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._unsent.clear()

    def _writable(self) -> None:
        self._flush()
        if not self._unsent and self._open:
            self.blocked = False
            self._loop.remove_writer(self._sock.fileno())
            if self._patient:
                self._loop.add_reader(self._sock.fileno(), self._readable)

    def _flush(self) -> None:
        unsent = self._unsent
        while unsent:
            try:
                one = len(unsent) == 1  # as of most batches
                count = self._sock.send(unsent[0]) if one else self._sock.sendmsg(list(islice(unsent, MAX_PIECES)))
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                unsent.clear()  # broken pipe: the reader sees the end
                return
            self.sent_bytes += count
            while unsent and count >= len(unsent[0]):
                count -= len(unsent.popleft())
            if count:
                unsent[0] = unsent[0][count:]

    def poll(self, wait: ActiveWait) -> None:
        """Looks for the response, without sleeping, until it came, perhaps before this call, or the time has passed."""
        while self._open and time.perf_counter() < wait.end_s and not self._receive():
            os.sched_yield()  # to the worker, which the system may have woken on this core

    def _readable(self) -> None:
        for _ in range(self._reads):
            if not (self._open and self._receive()):
                break

    def _receive(self) -> bool:
        """Handles the data of one read; False if there is none."""
        try:
            count = self._sock.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            count = 0
        frames: list[messages.Frame] = []
        try:
            frames = self.decoder.feed(self._buffer[:count])
        except messages.FrameError as e:
            log.error("channel_broken error=%s: it is closed", e)
            count = 0
        if count == 0:
            self.close()
            self._on_end()
            return False
        for frame in frames:
            self._on_frame(frame)
        return True


class PackingTransport(SlotTransport):
    """A transport that packs its spec once, for workers in other processes."""

    @cached_property
    def packed(self) -> PackedSpec:
        """Raises LoadFailed when the target cannot be sent to another process."""
        return pack_spec(self._spec)


class ProcessTransport(PackingTransport):
    """One worker process per slot."""

    def _make(self, number: int, device: str) -> WorkerSlot:
        return _ProcessSlot(self, self._spec, number, device, self._pool, self._reply_bytes)

    async def start(self, listener: TransportListener) -> None:
        """See `Transport.start`. Raises LoadFailed when the target cannot be sent to another process."""
        _ = self.packed
        await super().start(listener)


class _ProcessSlot(WorkerSlot):
    """One place for a worker process."""

    def __init__(
        self,
        transport: PackingTransport,
        spec: WorkerSpec,
        number: int,
        device: str,
        pool: SlabPool | None,
        reply_bytes: int,
    ) -> None:
        super().__init__(spec, number, device)
        self._transport = transport
        self._pool = pool
        self._reply_bytes = reply_bytes
        self._child: Child | None = None
        self._output: Output | None = None
        self._error: PenstockError | None = None  # the worker's error, or the reason for killing it
        self._held: dict[int, Slab] = {}  # by offset: pinned because the model still refers to them
        self._free: list[int] = []  # offsets of the reply region to free
        self._finisher: asyncio.TimerHandle | None = None
        self._inbox = messages.MessageReader(messages.FromWorker, self._read_reply)
        self._wait = ActiveWait()

    # ---- start and end

    def launch(self) -> None:
        """Raises LoadFailed."""
        self._error, self._free = None, []
        try:
            child, hello = launch(self.spec, self._transport.packed, self.device, self._pool, self._reply_bytes)
        except OSError as e:
            raise LoadFailed(f"a worker process could not be started: {e}") from e
        self._child = child
        self._gone = asyncio.Event()
        self._channel = Channel(self.loop, child.sock, self._on_frame, self._on_end)
        if child.pidfd is not None:
            self.loop.add_reader(child.pidfd, self._on_exit)
        if child.output_fd is not None:
            self._output = Output(self.loop, child.output_fd, self.spec.name, self.spec.version, self.number)
        self._channel.send(hello)

    def abandon(self, batch_id: int) -> None:
        if self._child is not None:
            self._channel.send(messages.write(messages.AbandonBatch(batch_id)))

    def kill(self, why: PenstockError) -> None:
        """Requests a dump of all stacks, and kills the worker a second later."""
        if self._child is not None:
            self._error = why
            with suppress(ProcessLookupError):  # not `send_signal`: it would reap a worker that just ended
                os.kill(self._child.process.pid, signal.SIGABRT)
            self._finish_in(DUMP_S)

    async def stop(self, idle: bool) -> None:
        if self._child is None:
            return
        gone = self._gone
        if idle and self.up:
            self._channel.send(messages.write(messages.StopWorker()))
            if await within(gone, STOP_S):
                return
        self._error = WorkerDied("the workers were stopped before the batch was answered")
        self._finish()
        await gone.wait()

    def forget(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.forget()

    def _on_end(self) -> None:
        """The socket ended: the process is exiting, or broke the stream and is killed."""
        if self._child is not None and self._finisher is None:
            self._finish_in(END_GRACE_S)

    def _finish_in(self, seconds: float) -> None:
        if self._finisher is not None:
            self._finisher.cancel()
        self._finisher = self.loop.call_later(seconds, self._finish)

    def _finish(self) -> None:
        child = self._child
        if child is not None:
            child.kill()
            if child.pidfd is None:
                self._on_exit()

    def _on_exit(self) -> None:
        child = self._child
        if child is None:
            return
        self._channel.drain()  # its responses before the death count
        self._channel.close()
        self._child = None
        how = child.ended()
        # A worker that we killed is to blame for the batch we waited for, not for the one it predicted.
        predicted = messages.PREDICTED.unpack_from(child.replies)[0] if self._error is None else 0
        if child.pidfd is not None:
            self.loop.remove_reader(child.pidfd)
        child.close()
        if self._output is not None:
            self._output.close()
            self._output = None
        if self._finisher is not None:
            self._finisher.cancel()
            self._finisher = None
        unpin(list(self._held.values()))
        self._held.clear()
        self._gone.set()
        if self._error is None:
            dead = WorkerDied(f"the worker {how}")
            self._error = dead if self.up else LoadFailed(f"the worker {how} while it loaded the model")
        self.down(self._error, predicted)

    # ---- batches

    def submit(self, batch: Batch) -> list[Slab] | BatchPart:
        outbox = messages.MessageWriter(
            self._pool, LENT_BYTES if self.spec.lends else messages.LARGE_BYTES, lends=self.spec.lends
        )
        try:
            items = outbox.items(batch.items, self.spec.wants_headers, self.asks_requests)
            pieces = messages.write(messages.RunBatch(batch.id, items, self._free), outbox.buffers)
        except Exception as e:
            log.exception("batch_not_sent model=%s: its callers get an error", self.spec.name)
            for slab in outbox.slabs:
                slab.release()
            self._channel.flush()
            error = ItemFailed(f"the batch cannot be sent to a worker: {type(e).__name__}", detail=repr(e))
            return BatchPart(batch.id, [ItemResult(error=error) for _ in batch.items])
        self._free = []
        self._channel.send(pieces, batch.more)
        alone = len(batch.items) == 1 and not self.sent and self._transport.single
        if alone and self._wait.begin():
            self.loop.call_soon(self._channel.poll, self._wait)
        slabs = outbox.given + outbox.slabs
        for slab in slabs:
            slab.pin()
        for slab in outbox.slabs:
            slab.release()  # created here: freed with the pin
        return slabs

    def _on_frame(self, frame: messages.Frame) -> None:
        try:
            message = self._inbox.read(frame)
            if isinstance(message, messages.PartMessage):
                self._on_part(message)
            elif isinstance(message, messages.WorkerNews):
                for offset in message.let_go:
                    self._held.pop(offset).unpin()
                if message.metrics:
                    self.listener.slot_metrics(self.number, message.metrics)
            elif isinstance(message, messages.WorkerUp):
                self.is_up(message.ready)
            elif isinstance(message, messages.WorkerFailed):
                self._error = message.error
        except Exception as e:  # a worker with invalid messages is treated as dead
            log.exception("worker_broken model=%s slot=%d: it is killed", self.spec.name, self.number)
            self._error = self._error or WorkerDied(f"the worker's answer cannot be read: {type(e).__name__}")
            self._finish_in(0)

    def _on_part(self, message: messages.PartMessage) -> None:
        part = message.part
        sent = self.answered(part)
        self._wait.end()
        unpickle(part.results)
        if part.final and (sent.slabs or message.let_go):
            self._let_go(sent, message)
        if self._free and (len(self._free) > MAX_FREE or not (self.sent or self.spec.lends)):
            self._channel.send(messages.write(messages.FreeReplies(self._free)))
            self._free = []
        self.deliver(sent.on_part, part)

    def _let_go(self, sent: Sent, message: messages.PartMessage) -> None:
        """Unpins the slabs of an answered batch, except those that the model still refers to."""
        for offset in message.let_go:
            self._held.pop(offset).unpin()
        held = set(message.held)
        for slab in sent.slabs:
            if slab.offset in held and slab.offset not in self._held:
                self._held[slab.offset] = slab
            else:
                slab.unpin()

    def _read_reply(self, offset: int, length: int, writable: bool) -> messages.Buffer:
        assert self._child is not None
        self._free.append(offset)
        if not writable:
            return self._child.replies[offset : offset + length]
        with memoryview(self._child.replies) as region, region[offset : offset + length] as data:
            return bytearray(data)


class LendingTransport(ProcessTransport):
    """Worker processes whose results of Python objects stay in their memory, and are not copied, until the last
    reference to them is gone. Another worker of such a transport that receives one reads it there."""

    def __init__(self, spec: WorkerSpec, *args: Any, **keys: Any) -> None:
        spec.lends = True
        super().__init__(spec, *args, **keys)

    def _make(self, number: int, device: str) -> WorkerSlot:
        return _LendingSlot(self, self._spec, number, device, self._pool, self._reply_bytes)


class _LendingSlot(_ProcessSlot):
    """One place for a worker process that lends its results, and reads in place what other processes have lent."""

    _lender: Lender | None = None

    def launch(self) -> None:
        super().launch()
        assert self._child is not None
        self._lender = Lender(self._child.replies, os.dup(self._child.reply_fd))

    def forget(self) -> None:
        if self._lender is not None:
            self._lender.close()
        super().forget()

    def down(self, error: PenstockError, predicted: int = 0) -> None:
        if self._lender is not None:
            self._lender.close()
            self._lender = None
        super().down(error, predicted)

    def submit(self, batch: Batch) -> list[Slab] | BatchPart:
        assert self._lender is not None
        self._free += self._lender.returned()
        return super().submit(batch)

    def _read_reply(self, offset: int, length: int, writable: bool) -> messages.Buffer:
        assert self._lender is not None
        self._free += self._lender.returned()
        lent = self._lender.lend(offset, length) if writable else None
        return super()._read_reply(offset, length, writable) if lent is None else lent


def unpickle(results: list[ItemResult | None]) -> None:
    """Loads the Python objects among the results of a worker; one that cannot be loaded fails alone."""
    for i, result in enumerate(results):
        if result is None or type(result.body) is not messages.Pickled:
            continue
        try:
            result.body = result.body.load()
        except Exception as e:
            text = f"the result cannot be unpickled in the serving process: {type(e).__name__}"
            results[i] = ItemResult(error=BadOutput(text, detail=repr(e)), final=result.final)
