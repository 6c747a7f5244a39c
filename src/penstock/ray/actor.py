"""The worker's end of the Ray transport, an actor that holds one loaded model, and the messages of both ends.

The head of a message travels as bytes, large buffers as arrays, which Ray keeps out of band in its object store."""

import gc
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NoReturn

import msgspec
import numpy as np
from msgspec import Struct

from penstock.core.transports.child import unpack_spec
from penstock.core.transports.launch import PackedSpec
from penstock.core.wire import messages
from penstock.core.wire.slabs import Slab
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.main import open_model
from penstock.errors import Cancelled, LoadFailed, PenstockError, TargetNotFound
from penstock.types import BatchPart, Item

Message = tuple[bytes, list[Any]]
"""(head, buffers): one message as an argument or a result of an actor's method."""


class RayWriter(messages.MessageWriter):
    """The payloads of a message through Ray, which copies them once, into its object store."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(None)

    def keep(self, data: messages.Buffer) -> messages.Buffer:
        return data

    def message(self, head: bytes) -> Message:
        return head, [np.frombuffer(data, np.uint8) for data in self.buffers]


def with_views(items: list[Item]) -> list[Item]:
    """The items with the memory of their slabs, which workers on a cluster do not share."""
    return [
        msgspec.structs.replace(item, payload=item.payload.view) if type(item.payload) is Slab else item
        for item in items
    ]


def of_part(message: messages.PartMessage, outbox: RayWriter) -> Message:
    """The form of a part whose results `outbox` has packed."""
    try:
        return outbox.message(messages.head_of(message))
    except Exception as e:  # a codec or a model made a value that cannot be encoded
        messages.sendable(message.part, e)
        return outbox.message(messages.head_of(message))


class RayReader:
    """Reads messages of one kind. The memory of what they hold belongs to the reader and is writable."""

    def __init__(self, kind: Any) -> None:
        self._reader = messages.MessageReader(kind, _not_shared)

    def read(self, message: Message) -> Any:
        """Raises msgspec.DecodeError or ValueError if the peer is broken."""
        head, buffers = message
        return self._reader.read(messages.Frame(head, [bytearray(buffer) for buffer in buffers]))


def _not_shared(offset: int, length: int, writable: bool) -> NoReturn:
    raise ValueError("a message through Ray refers to shared memory")


Send = Callable[[Message], None]


class Place(Struct, frozen=True):
    """The working folder and the module paths of a program, for processes that load what its target names."""

    folder: str
    paths: list[str]


def here() -> Place:
    folder = os.getcwd()
    return Place(folder, [path or folder for path in sys.path])


def enter(place: Place) -> None:
    """Adopts the folder and the paths. A node without the folder keeps its own, such as a `working_dir` of Ray's."""
    if os.path.isdir(place.folder):
        os.chdir(place.folder)
    sys.path += [path for path in place.paths if path not in sys.path]


class RayWorker:
    """One loaded model in an actor's process.

    The model has a thread of its own. Ray calls `load`, `run`, `stream` and `unload` one after the other, `abandon` at
    any time, and `watch` once.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "penstock-model")
        self._inbox = RayReader(messages.ToWorker)
        self._abandoned = 0  # the last abandoned batch
        self._runner: BatchRunner | None = None

    def load(self, packed: PackedSpec, place: Place, device: str, shown_device: str) -> Message:
        """WorkerUp or WorkerFailed."""
        message: Message = self._result(self._thread.submit(self._load, packed, place, device, shown_device))
        return message

    def run(self, message: Message) -> list[Message]:
        """The parts of a batch, the final one last."""
        parts: list[Message] = []
        self._result(self._thread.submit(self._run, message, parts.append))
        return parts

    def stream(self, message: Message) -> Iterator[Message]:
        """The parts of a batch, each as soon as the model has made it."""
        parts: SimpleQueue[Message | None] = SimpleQueue()
        running = self._thread.submit(self._run, message, parts.put)
        running.add_done_callback(lambda _: parts.put(None))
        while (part := parts.get()) is not None:
            yield part
        self._result(running)

    def abandon(self, batch_id: int) -> None:
        """A streaming batch ends at its next part."""
        self._abandoned = batch_id

    def unload(self) -> None:
        if self._runner is not None:
            self._result(self._thread.submit(self._runner.close))

    def watch(self) -> None:
        """Never returns: its caller learns at once when the actor dies."""
        threading.Event().wait()

    # ---- the model's thread

    def _load(self, packed: PackedSpec, place: Place, device: str, shown_device: str) -> Message:
        enter(place)
        del sys.argv[1:]  # those of Ray: a model that parses options has none
        try:
            spec = unpack_spec(packed.data, packed.files, packed.main)
            self._runner, ready = open_model(spec, device, shown_device)
        except PenstockError as e:
            error = e if isinstance(e, (LoadFailed, TargetNotFound)) else LoadFailed(e.message, detail=e.detail)
            return messages.head_of(messages.WorkerFailed(error)), []
        ready.pid = 0  # on another machine
        gc.collect()
        gc.freeze()  # loaded objects stay: later collections can skip them
        return messages.head_of(messages.WorkerUp(ready)), []

    def _run(self, message: Message, send: Send) -> None:
        run: messages.RunBatch = self._inbox.read(message)
        del message
        assert self._runner is not None

        def emit(part: BatchPart) -> None:
            if not part.final and self._abandoned == run.id:
                raise Cancelled("the caller no longer waits for this stream")
            outbox = RayWriter()
            outbox.results(run.items, part.results)
            send(of_part(messages.PartMessage(part, [], []), outbox))

        self._runner.run(run.id, self._runner.decode(run.items), emit)

    def _result(self, call: Future[Any]) -> Any:
        """The result of a call in the model's thread. An exception ends the worker, as in a process."""
        try:
            return call.result()
        except SystemExit as e:
            _end(e.code if isinstance(e.code, int) else int(e.code is not None))
        except BaseException:
            traceback.print_exc()
            _end(1)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # an exception would end the call, not the worker
