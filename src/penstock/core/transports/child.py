"""The worker's end of the process transport: `python -m penstock.core.transports.child`, started by `launch.py` alone.

The main thread runs the model and sends the responses; a reader thread receives and decodes the next batch. Between
short batches the main thread receives, because a change of threads would cost more than it hides. Models that run
batches concurrently use `concurrent.py`. The child ends when its socket closes, and with its parent.
"""

import faulthandler
import gc
import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NoReturn

from penstock import tracing
from penstock.core.transports.concurrent import ConcurrentBatches
from penstock.core.transports.turns import Turns
from penstock.core.wire import messages
from penstock.core.wire.lending import LENT_BYTES, Region
from penstock.core.wire.slabs import HeldSlabs, Lease, Slab, SlabPool, lease, map_read_only
from penstock.core.worker import nesting
from penstock.core.worker.batch import Decoded
from penstock.core.worker.logs import forward
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.main import open_model
from penstock.core.worker.phases import Finisher
from penstock.core.worker.spec import WorkerSpec
from penstock.core.worker.step_loop import StepLoop
from penstock.errors import Cancelled, DeviceLost, LoadFailed, PenstockError, TargetNotFound, describe
from penstock.plugins import load_object
from penstock.types import BatchPart, Ready

ORPHAN_GRACE_S = 1.0
RECEIVE_BYTES = 256 * 2**10
BRIEF_S = 0.0005  # of running: during a shorter batch, a reader hides less than its wake-up costs

Work = tuple[messages.RunBatch, Decoded, list[Lease]]
Finishing = tuple[messages.RunBatch, list[Lease], Callable[[], BatchPart]]


class Inbox:
    """Receives and decodes messages. The reader thread does it, or the main thread between short batches."""

    def __init__(self, sock: socket.socket, pool: tuple[int, int] | None) -> None:
        self._pool = pool
        self._requests = map_read_only(*pool) if pool else None
        if pool is not None and self._requests is not None:
            Region(self._requests, pool[0])  # workers of the model may read it too
        self._borrowed: dict[int, Region] = {}  # memory that the parent has lent, by its descriptor there
        self._objects: mmap.mmap | None = None  # the same memory, writable; mapped for the first object that needs it
        self._leases: list[Lease] = []  # of the message being read
        self._frames = _receive(sock)
        self._messages = messages.MessageReader(messages.ToWorker, self._lease, self._borrow)
        self.turns: Turns[Work] = Turns(self._receive)
        self.sent: dict[int, Slab] = {}  # in the reply region, until the parent has read them
        self.abandoned = 0  # the last abandoned batch
        # set once the model is loaded; no batch arrives earlier
        self.runner: BatchRunner | None = None
        self.concurrent: ConcurrentBatches | None = None

    def hello(self) -> messages.Frame:
        """The first message."""
        return next(self._frames)

    def read(self) -> None:
        """The reader thread."""
        try:
            self.turns.read()
        except BaseException:
            traceback.print_exc()
            _end(1)
        # The parent is gone. An idle model unloads orderly; a busy or loading one gets a moment.
        self._stop()
        threading.Event().wait(ORPHAN_GRACE_S)
        _end(0)

    def _receive(self) -> bool | None:
        """Receives one message: True if it was a batch, None at the end of the socket."""
        frame = next(self._frames, None)
        if frame is None:
            return None
        message = self._messages.read(frame)
        del frame  # it refers to the payloads
        self._take(message)
        return isinstance(message, messages.RunBatch)

    def _take(self, message: messages.ToWorker) -> None:
        if isinstance(message, (messages.RunBatch, messages.FreeReplies)):
            for offset in message.free:
                self.sent.pop(offset).release()
        if isinstance(message, messages.RunBatch):
            assert self.runner is not None
            leases, self._leases = self._leases, []
            decoded = self.runner.decode(message.items)
            if self.concurrent is None:
                self.turns.put((message, decoded, leases))
            else:
                self.concurrent.run(message, decoded, leases)
        elif isinstance(message, messages.AbandonBatch):
            if self.concurrent is None:
                self.abandoned = message.id
            else:
                self.concurrent.abandon(message.id)
        elif isinstance(message, messages.StopWorker):
            self._stop()

    def _stop(self) -> None:
        if self.concurrent is None:
            self.turns.put(None)
        else:
            self.concurrent.stop()

    def _lease(self, offset: int, length: int, writable: bool) -> memoryview:
        """A view of the parent's pool; writable for objects, whose memory belongs to this message alone."""
        assert self._pool is not None
        assert self._requests is not None
        memory = self._requests
        if writable:
            memory = self._objects = self._objects or mmap.mmap(*self._pool)
        view, alive = lease(memory, offset, length, writable)
        self._leases.append((offset, alive))
        return view

    def _borrow(self, number: int, fd: int, serial: int, offset: int, length: int) -> memoryview:
        """A writable view of memory that the parent has lent for this message."""
        region = self._borrowed.get(fd)
        if region is None or region.serial != serial:
            if region is not None:
                region.forget()
            own = os.open(f"/proc/{os.getppid()}/fd/{fd}", os.O_RDWR)
            try:
                region = self._borrowed[fd] = Region(mmap.mmap(own, 0), serial=serial)
            finally:
                os.close(own)
        view, alive = lease(region.memory, offset, length, True)
        self._leases.append((number, alive))
        return view


def _receive(sock: socket.socket) -> Iterator[messages.Frame]:
    decoder = messages.FrameDecoder()
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    while True:
        try:
            count = sock.recv_into(buffer)
        except OSError:
            count = 0
        if count == 0:
            return
        yield from decoder.feed(buffer[:count])


class Worker:
    """One loaded model at the end of a socket."""

    def __init__(self, sock: socket.socket, pool: tuple[int, int] | None, replies: SlabPool) -> None:
        """`pool`: descriptor and size of the parent's."""
        self._sock = sock
        predicted = replies.allocate(messages.PREDICTED.size)
        assert predicted is not None
        assert not predicted.offset, "the parent reads it at the start of the region"
        self._predicted = predicted
        self._replies = replies
        self._held = HeldSlabs()
        self._large_bytes = messages.LARGE_BYTES
        self._inbox = Inbox(sock, pool)
        self._finisher: Finisher[Finishing] | None = None
        self._runner: BatchRunner | None = None

    def main(self) -> None:
        """Loads the model, then runs batches until the parent sends StopWorker or its socket closes."""
        inbox = self._inbox
        hello = inbox.hello()
        threading.Thread(target=inbox.read, name="penstock-reader", daemon=True).start()
        try:
            self._runner, ready, lends = _open(hello)
            self._large_bytes = LENT_BYTES if lends else messages.LARGE_BYTES
            inbox.runner = self._runner
        except PenstockError as e:
            error = e if isinstance(e, (LoadFailed, TargetNotFound)) else LoadFailed(e.message, detail=e.detail)
            self._send(messages.write(messages.WorkerFailed(error)))
            _end(1)
        gc.collect()
        gc.freeze()  # loaded objects stay: later collections can skip them
        if self._runner.model.concurrency > 1:
            ready.concurrency = self._runner.model.concurrency
            ready.mode = "continuous" if isinstance(self._runner.model.loop, StepLoop) else "batch"
            inbox.concurrent = ConcurrentBatches(self._runner, self._replies, self._pack, self._send)
        self._send(messages.write(messages.WorkerUp(ready)))
        if inbox.concurrent is not None:
            self._attend(inbox.concurrent)
        else:
            self._run_all()
        self._runner.close()
        if inbox.concurrent is not None:
            inbox.concurrent.send_news()  # metrics that the model recorded while it unloaded

    # ---- main thread

    def _attend(self, batches: ConcurrentBatches) -> None:
        """Returns once the last batch is answered. The model's loop runs meanwhile, in the thread that loaded it."""
        assert self._runner is not None
        loop = self._runner.model.loop
        if loop is None:
            batches.attend()
            return

        def attend() -> None:
            batches.attend()
            loop.stop()

        attending = threading.Thread(target=attend, name="penstock-news", daemon=True)
        attending.start()
        loop.run()
        attending.join()

    def _run_all(self) -> None:
        assert self._runner is not None
        if self._runner.model.overlaps:
            self._finisher = Finisher(self._finish, "penstock-finisher")
        while self._run_one():
            pass
        if self._finisher is not None:
            self._finisher.close()

    def _run_one(self) -> bool:
        """Runs the next batch; False if no more will come."""
        work = self._inbox.turns.next()
        if work is None:
            return False
        assert self._runner is not None
        if self._finisher is not None:
            box = [work]
            del work
            self._finisher.run(partial(self._begun, box))
            return True
        run, decoded, leases = work
        del work
        final: list[BatchPart] = []
        self._runner.run(run.id, decoded, partial(self._emit, run, final))
        # We no longer refer to the payloads: references that still live are the model's.
        del decoded
        self._answer(run, leases, final[0])
        model = self._runner.model
        self._inbox.turns.brief = final[0].run_s < BRIEF_S and model.collate is None and model.helpers is None
        return True

    def _begun(self, box: list[Work]) -> Finishing:
        """Launches or predicts the batch in the box; returns what the finisher needs."""
        run, decoded, leases = box.pop()  # this thread must not refer to the payloads once the finisher does
        messages.PREDICTED.pack_into(self._predicted.view, 0, run.id)
        assert self._runner is not None
        return run, leases, self._runner.begin(run.id, decoded, partial(self._emit, run, None))

    def _emit(self, run: messages.RunBatch, final: list[BatchPart] | None, part: BatchPart) -> None:
        """Sends a part of a stream; keeps the final one in `final`, which is None if the finisher makes it."""
        if final is None:
            assert self._finisher is not None
            self._finisher.wait()  # the parent expects answers in the order of batches
        elif part.final:
            final.append(part)
            return
        self._inbox.turns.give()  # the parent may abandon the stream
        if self._inbox.abandoned == run.id:
            raise Cancelled("the caller no longer waits for this stream")
        outbox = messages.MessageWriter(self._replies, self._large_bytes)
        outbox.results(run.items, part.results)
        self._send(self._pack(messages.PartMessage(part, [], []), outbox))

    def _answer(self, run: messages.RunBatch, leases: list[Lease], part: BatchPart) -> None:
        outbox = messages.MessageWriter(self._replies, self._large_bytes)
        outbox.results(run.items, part.results)
        held: list[int] = []
        let_go: list[int] = []
        if leases or self._held:
            for item in run.items:
                item.payload = None
            held, let_go = self._held.after(leases)
        self._send(self._pack(messages.PartMessage(part, held, let_go), outbox))

    def _finish(self, box: list[Finishing]) -> None:
        """In the finisher's thread: makes the final part of the batch in the box, while the next one is predicted."""
        run, leases, finish = box.pop()
        try:
            part = finish()
            del finish  # it refers to the payloads
            self._answer(run, leases, part)
        except SystemExit as e:
            messages.PREDICTED.pack_into(self._predicted.view, 0, run.id)  # this batch ends the worker
            _exit(e)
        except BaseException:
            traceback.print_exc()
            _end(1)

    def _pack(self, message: messages.PartMessage, outbox: messages.MessageWriter) -> list[messages.Buffer]:
        for slab in outbox.slabs:
            self._inbox.sent[slab.offset] = slab
        try:
            return messages.write(message, outbox.buffers)
        except Exception as e:  # a codec or a model made a value that cannot be encoded
            messages.sendable(message.part, e)
            return messages.write(message, outbox.buffers)

    def _send(self, pieces: list[messages.Buffer]) -> None:
        try:
            for piece in pieces:
                self._sock.sendall(piece)
        except OSError:
            _end(0)  # the parent is gone


def _open(hello: messages.Frame) -> tuple[BatchRunner, Ready, bool]:
    """Loads the target of the first message. The last value: `lends` of its spec."""
    paths, device, shown_device, files, main = pickle.loads(hello.head)  # from our own parent
    sys.path[:] = [each for path in paths for each in (sys.path if path is None else (path,))]
    spec = unpack_spec(hello.buffers[0], files, main)
    if spec.log_level:
        forward(spec.log_level)
    return *open_model(spec, device, shown_device), spec.lends


def unpack_spec(data: messages.Buffer, files: Sequence[tuple[str, str]], main: str) -> WorkerSpec:
    """The spec that `launch.pack_spec` packed: its files and script first, because unpickling it may need them.

    Raises LoadFailed, TargetNotFound.
    """
    nesting.importing = threading.get_ident()
    for where, name in files:  # objects of the parent's script, pickled as `__main__.X`, are found there
        load_object(f"{where}:__name__", name)
    if main:
        script = sys.modules["__main__"] = sys.modules["__mp_main__"] = sys.modules[main]
        script.__spec__ = None  # as for a script: multiprocessing children look for its file
    try:
        spec: WorkerSpec = pickle.loads(data)
    except Exception as e:
        text = "".join(traceback.format_exception(e))
        raise LoadFailed(f"the target cannot be unpickled in the worker: {describe(e)}", detail=text) from e
    if spec.traced:
        tracing.relay()
    return spec


def _end(code: int) -> NoReturn:
    """Ends the process from any thread, skipping finalizers of native libraries, which may hang or crash."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(code)


def _exit(end: SystemExit) -> NoReturn:
    """Ends the process as the model's `sys.exit` asks; a reason in place of a status goes to stderr, as in Python."""
    if isinstance(end.code, int | None):
        _end(end.code or 0)
    print(end.code if isinstance(end, DeviceLost) else f"the model called sys.exit({end.code})", file=sys.stderr)
    _end(1)


def _default_signals() -> None:
    """Restores signals in processes that a model forks, so that `Process.terminate` works."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _end_with_parent(parent: int) -> None:
    """Asks Linux to kill this process with its parent, even if the model holds the GIL for ever."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before the call
        _end(0)


def main(arguments: list[str]) -> None:
    """Arguments: pid of the parent; socket; request pool and its size; reply region and its size. -1: no pool."""
    parent, sock_fd, pool_fd, pool_bytes, reply_fd, reply_bytes = map(int, arguments)
    faulthandler.enable()  # dumps all stacks to stderr on SIGABRT or a segmentation fault
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the parent decides; children of the model get the default back
    os.register_at_fork(after_in_child=_default_signals)
    _end_with_parent(parent)
    for fd in (sock_fd, pool_fd, reply_fd):
        if fd >= 0:
            os.set_inheritable(fd, False)
    pool = (pool_fd, pool_bytes) if pool_fd >= 0 else None
    worker = Worker(socket.socket(fileno=sock_fd), pool, SlabPool(reply_bytes, reply_fd))
    try:
        worker.main()
    except SystemExit as e:
        _exit(e)
    except BaseException:
        traceback.print_exc()
        _end(1)
    _end(0)


if __name__ == "__main__":
    arguments, sys.argv[1:] = sys.argv[1:], []  # a model that parses options has none
    main(arguments)
