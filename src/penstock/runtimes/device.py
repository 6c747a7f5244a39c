"""Devices with memory of their own, and programs that run on them in three phases.

A call on such a device copies its inputs there, runs kernels, and copies the results back. If one thread does this step
by step, the device idles during both copies, and while the host prepares the next batch. So a batch has three phases:

    stage    starts the copy of its inputs from pinned memory, which the device reads by itself;
    launch   starts the kernels behind that copy, and the copy of the results behind the kernels; returns at once;
    fetch    waits for the results.

The device has three queues: copies in, kernels, copies out. Each runs its work in order and waits for another one only
at an event. So while the kernels of a batch run, the next batch is copied in and the last one is copied out.

Pinned memory belongs to its arrays: its pool takes it back when the last view of it is gone. A batch that fails can
therefore be repeated from its inputs, and results stay valid for as long as someone holds them.
"""

import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from penstock.core.worker.tensor_model import Array, Arrays, Input, samples_of
from penstock.errors import DeviceLost, describe, out_of_memory
from penstock.runtimes.graphs import Graph, NotCaptured, Replay, Tensors, difference, padded
from penstock.types import Graphs, TensorSpec

Kernels = Callable[[Tensors], Tensors]


class Event(Protocol):
    """A place in a queue of the device."""

    def wait(self) -> None:
        """Blocks this thread until the device has passed it. Raises errors of the device."""
        ...

    def since(self, start: Any) -> float:
        """Seconds of the device from an earlier event to this one, both of which it has passed."""
        ...


class Device(Protocol):
    """A device with three queues. Any thread may call it, and nothing but `Event.wait` and `lost` waits for it."""

    name: str  # such as "cuda:0"

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised pinned memory. It is used again once nothing refers to it and no copy reads it.

        Raises an error of which `out_of_memory` is true if there is none.
        """
        ...

    def upload(self, arrays: Arrays) -> tuple[Tensors, Event]:
        """Starts the copy of arrays of `empty` to the device: (the tensors, the end of the copy).

        Raises errors of the device, also for out of memory.
        """
        ...

    def launch(self, kernels: Kernels, tensors: Tensors, after: Any) -> tuple[Tensors, Event, Event]:
        """Starts kernels once the device has passed `after`: (their results, their start, their end).

        Raises what `kernels` raises.
        """
        ...

    def capture(self, kernels: Replay) -> Replay:
        """Captures what `kernels` launches: a function that launches it again, within `launch`, for what its inputs
        hold by then. Its results have the same places each time.

        Raises what `kernels` raises, and errors of a device that cannot capture it.
        """
        ...

    def held_bytes(self) -> int:
        """Memory of the device that this process holds and uses."""
        ...

    def download(self, tensors: Tensors, after: Any) -> tuple[Arrays, Event]:
        """Starts the copy of results once the device has passed `after`: (arrays, the end of the copy)."""
        ...

    def lost(self) -> BaseException | None:
        """Why this process cannot use the device any more; None if it can. Waits until the device has done its work."""
        ...


class DeviceModel(Protocol):
    """A model that a runtime has loaded onto a device, with the attributes of a `Program`."""

    platform: str
    inputs: tuple[Input, ...]
    outputs: tuple[TensorSpec, ...]
    rows: tuple[int, int]
    unbatched: bool

    def forward(self, tensors: Tensors) -> Tensors:
        """Starts the kernels of one call: output name -> tensor `[rows, ...]`. Raises what the model raises."""
        ...


class Staged(Struct, eq=False):
    """The inputs of a batch on their way to the device, and the memory from which they are copied. The call has `rows`
    rows, with padding; None: as many as the inputs."""

    arrays: Arrays
    rows: int | None
    tensors: Tensors
    ready: Event


class Launched(Struct, eq=False):
    """A batch on the device. `outputs` are valid once it has passed `done`."""

    kept: tuple[Staged, Tensors]  # inputs and results, of whose memory the device may still read
    outputs: Arrays
    done: Event
    start: Event
    end: Event


class DeviceProgram:
    """The program of a model on a device. `run` is one call; its phases, in any threads, let calls overlap.

    With `graphs`, calls with a size that was captured replay its graph, see `graphs.py`.
    """

    def __init__(self, model: DeviceModel, device: Device, *, graphs: bool = False) -> None:
        self._model, self._device = model, device
        self.platform, self.inputs, self.outputs = model.platform, model.inputs, model.outputs
        self.rows, self.unbatched = model.rows, model.unbatched
        self.empty = device.empty
        self._captures, self._graphs = graphs, dict[int, Graph]()  # by the number of rows
        self._launching = threading.Lock()  # the kernels of a call stay together, and are measured alone

    def stage(self, arrays: Arrays, rows: int | None = None) -> Staged:
        """Starts the copy of `arrays`, which are memory of `empty`. Raises errors of the device, and DeviceLost."""
        with self._checked():
            return Staged(arrays, rows, *self._device.upload(arrays))

    def launch(self, staged: Staged) -> Launched:
        """Starts the kernels and the copy of their results. Raises what the model raises, and DeviceLost."""
        with self._checked():
            with self._launching:
                kernels = self._graph(staged) or partial(self._kernels, staged.rows)
                tensors, start, end = self._device.launch(kernels, staged.tensors, staged.ready)
            return Launched((staged, tensors), *self._device.download(tensors, end), start, end)

    def _graph(self, staged: Staged) -> Graph | None:
        if not self._graphs:
            return None
        graph = self._graphs.get(staged.rows or next(map(len, staged.tensors.values()), 0))
        return graph if graph is not None and graph.takes(staged.tensors) else None

    def _kernels(self, rows: int | None, tensors: Tensors) -> Tensors:
        if rows is not None:
            tensors = {name: padded(tensor, rows) for name, tensor in tensors.items()}
        return {name: _own(tensor) for name, tensor in self._model.forward(tensors).items()}

    def fetch(self, launched: Launched) -> tuple[Arrays, float]:
        """The outputs, and the seconds of the kernels on the device. Raises its errors, and DeviceLost."""
        with self._checked():
            launched.done.wait()
            return launched.outputs, launched.end.since(launched.start)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            self._check(e)
            raise

    def _check(self, error: RuntimeError) -> None:
        """Raises DeviceLost if every later call in this process would fail, too, as after some errors of kernels."""
        if not out_of_memory(error) and (why := self._device.lost()) is not None:
            raise DeviceLost(f"device {self._device.name} is lost to this process: {describe(why)}") from error

    def capture(self, sizes: Collection[int]) -> Graphs | None:
        """Captures a graph for each of these numbers of rows and drops all others; None for a program without graphs.

        Calls whose graph needs more memory than there is run without one. If any other error occurs, or a graph gives
        other results, all calls do. No call may be in progress. Raises DeviceLost.
        """
        if not self._captures:
            return None
        self._graphs = {size: graph for size, graph in self._graphs.items() if size in sizes}
        samples = samples_of(self.inputs)  # none for inputs without a fixed shape
        failed, short = "", list[int]()
        # the largest first: the others find room in the memory that it shares with them
        for size in sorted(set(sizes) - self._graphs.keys(), reverse=True) if samples else ():
            try:
                self._capture(size, samples)
            except Exception as e:
                self._graphs.pop(size, None)
                traceback.clear_frames(e.__traceback__)  # they hold the memory of the failed call
                if out_of_memory(e):
                    short.append(size)
                    continue
                if isinstance(e, RuntimeError):
                    self._check(e)
                failed = str(e) if isinstance(e, NotCaptured) else describe(e)
                self._graphs.clear()
                break
        taken = sum(graph.memory_bytes for graph in self._graphs.values())
        return Graphs(tuple(sorted(self._graphs)), taken, () if failed else tuple(sorted(short)), failed)

    def _capture(self, size: int, samples: list[Arrays]) -> None:
        """Raises NotCaptured, and what the model and the device raise."""
        first, other = (
            {name: np.resize(array, (size, *array.shape[1:])) for name, array in sample.items()} for sample in samples
        )
        expected = self.run(other)
        if difference(self.run(other), expected) is not None:
            raise NotCaptured("its results are random: the same input gives others each time")
        before = self._device.held_bytes()
        tensors, ready = self._device.upload(self._pinned(first))
        ready.wait()
        with self._launching:
            replay = self._device.capture(lambda: self._model.forward(tensors))
        self._graphs[size] = Graph(tensors, replay, max(0, self._device.held_bytes() - before))
        if (name := difference(self.run(other), expected)) is not None:
            raise NotCaptured(f"output '{name}' of its graph for {size} rows differs from what it computes without")

    def run(self, arrays: Arrays) -> Arrays:
        """See `Program`. Raises what the phases raise."""
        return self.fetch(self.launch(self.stage(self._pinned(arrays))))[0]

    def _pinned(self, arrays: Arrays) -> Arrays:
        pinned = {name: self.empty(array.shape, array.dtype) for name, array in arrays.items()}
        for name, array in arrays.items():
            pinned[name][...] = array
        return pinned


def _own(tensor: Any) -> Any:
    """The result in memory that the next call leaves alone: some models fill the same tensor each time."""
    return tensor.clone() if tensor.is_contiguous() else tensor.contiguous()
