"""A simulated device (`runtimes/device.py`) with known times, for tests and benchmarks without a GPU."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import numpy as np

from penstock.core.worker.tensor_model import Array, Arrays
from penstock.runtimes.device import Kernels
from penstock.runtimes.graphs import Replay, Tensors
from penstock.runtimes.torch_files import import_torch

Queue = Literal["in", "kernels", "out"]
_POISON: Final = 0xA5  # in results that are read too early, and in new memory
_SET_TIMERSLACK: Final = 29  # of prctl(2)
_precise = threading.local()


def sleep_precisely(seconds: float) -> None:
    """As `time.sleep`, but Linux does not add up to 50 us for fewer wake-ups."""
    if sys.platform == "linux" and not hasattr(_precise, "set"):
        _precise.set = ctypes.CDLL(None).prctl(_SET_TIMERSLACK, 1)
    time.sleep(seconds)


class SimulatedEvent:
    """A time of the device. `arrivals` are copies to the host that end at this time."""

    def __init__(self, device: SimulatedDevice, at_s: float, arrivals: Iterable[tuple[Array, Array]] = ()) -> None:
        self.at_s = at_s
        self._device, self._arrivals = device, tuple(arrivals)

    def wait(self) -> None:
        """Raises what the device was made to raise."""
        self._device.wait_until(self.at_s)
        for host, values in self._arrivals:
            host[...] = values

    def since(self, start: SimulatedEvent) -> float:
        return self.at_s - start.at_s


class SimulatedDevice:
    """A device whose queues work one piece after the other, for the given times.

    Values are computed at once, by PyTorch on the CPU; only their times are simulated. Results that are read before
    their copy has ended are garbage. `now_s` and `sleep` may be those of a virtual clock.
    """

    name = "simulated:0"

    def __init__(
        self,
        *,
        copy_s: float = 1e-3,
        launch_s: float = 1e-4,
        replay_s: float = 1e-5,
        kernels_s: Callable[[int], float] = lambda rows: 2e-3 + 5e-5 * rows,
        most_bytes: int = 2**62,
        now_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = sleep_precisely,
    ) -> None:
        """`copy_s`: of one batch in one direction; `launch_s`: of the thread that launches, with a graph `replay_s`;
        `kernels_s`: of so many rows. Uploads of more than `most_bytes` run out of memory."""
        self._copy_s, self._launch_s, self._replay_s, self._kernels_s = copy_s, launch_s, replay_s, kernels_s
        self._most_bytes, self._now_s, self._sleep = most_bytes, now_s, sleep
        self._lock = threading.Lock()
        self._free_s: dict[Queue, float] = dict.fromkeys(("in", "kernels", "out"), 0.0)
        self.spans: list[tuple[Queue, float, float]] = []  # what the queues did: from, to
        self.fails: BaseException | None = None  # raised from now on; set by kernels, from their end on
        self._fails_from_s = 0.0
        self.capture_fails: dict[int, Exception] = {}  # raised by the first, second ... capture
        self.drift = 0.0  # of all results of graphs
        self.captures = self.replays = 0
        self._graphs: weakref.WeakSet[_SimulatedGraph] = weakref.WeakSet()

    def wait_until(self, at_s: float) -> None:
        while (left_s := at_s - self._now_s()) > 0:
            self._sleep(left_s)
        self._check(at_s)

    def _check(self, at_s: float | None = None) -> None:
        if self.fails is not None and (self._now_s() if at_s is None else at_s) >= self._fails_from_s:
            raise self.fails

    def _work(self, queue: Queue, seconds: float, after_s: float = 0.0) -> tuple[float, float]:
        """Queues a piece of work: (its start, its end)."""
        with self._lock:
            start = max(self._free_s[queue], self._now_s(), after_s)
            self._free_s[queue] = start + seconds
            self.spans.append((queue, start, start + seconds))
            return start, start + seconds

    def busy_s(self, queue: Queue) -> float:
        """How long a queue has worked."""
        return sum(end - start for name, start, end in self.spans if name == queue)

    def overlap_s(self) -> float:
        """How long two queues or more have worked at the same time."""
        changes = sorted((at, step) for _, start, end in self.spans for at, step in ((start, 1), (end, -1)))
        total = last = 0.0
        working = 0
        for at, step in changes:
            total += (at - last) * (working > 1)
            working, last = working + step, at
        return total

    # ---- see `Device`

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = _POISON
        return array

    def upload(self, arrays: Arrays) -> tuple[Tensors, SimulatedEvent]:
        self._check()
        if sum(array.nbytes for array in arrays.values()) > self._most_bytes:
            raise MemoryError(f"{self.name} has {self._most_bytes} bytes")
        torch = import_torch()
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return tensors, SimulatedEvent(self, self._work("in", self._copy_s)[1])

    def launch(
        self, kernels: Kernels, tensors: Tensors, after: SimulatedEvent
    ) -> tuple[Tensors, SimulatedEvent, SimulatedEvent]:
        self._check()
        replays, works = self.replays, self.fails is None
        found = {name: tensor.contiguous() for name, tensor in kernels(tensors).items()}
        self._sleep(self._launch_s if self.replays == replays else self._replay_s)
        rows = max((len(tensor) for tensor in found.values()), default=0)  # with padding
        start, end = self._work("kernels", self._kernels_s(rows), after.at_s)
        if works and self.fails is not None:
            self._fails_from_s = end
        return found, SimulatedEvent(self, start), SimulatedEvent(self, end)

    def capture(self, kernels: Replay) -> Replay:
        self._check()
        self.captures += 1
        if (error := self.capture_fails.get(self.captures)) is not None:
            raise error
        graph = _SimulatedGraph(self, kernels)
        self._graphs.add(graph)
        return graph

    def held_bytes(self) -> int:
        return sum(graph.nbytes for graph in self._graphs)

    def download(self, tensors: Tensors, after: SimulatedEvent) -> tuple[Arrays, SimulatedEvent]:
        values = {name: tensor.numpy() for name, tensor in tensors.items()}
        host = {name: self.empty(array.shape, array.dtype) for name, array in values.items()}
        end = self._work("out", self._copy_s, after.at_s)[1]
        return host, SimulatedEvent(self, end, [(host[name], values[name]) for name in host])

    def lost(self) -> BaseException | None:
        return self.fails


class _SimulatedGraph:
    """Computes the results again, in the places of the first ones."""

    def __init__(self, device: SimulatedDevice, kernels: Replay) -> None:
        self._device, self._kernels = device, kernels
        self._found = {name: tensor.clone() for name, tensor in kernels().items()}
        self.nbytes = sum(tensor.nbytes for tensor in self._found.values())

    def __call__(self) -> Tensors:
        self._device.replays += 1
        for name, tensor in self._kernels().items():
            self._found[name][...] = tensor
            if tensor.is_floating_point():
                self._found[name] += self._device.drift
        return self._found
