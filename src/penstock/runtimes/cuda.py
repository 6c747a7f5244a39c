"""CUDA devices by way of PyTorch, see `device.py`. Functions import torch when they are called."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import numpy as np

from penstock.core.worker.tensor_model import Array, Arrays
from penstock.runtimes.device import Kernels
from penstock.runtimes.graphs import Replay, Tensors
from penstock.runtimes.torch_files import import_torch

COLD_RUNS: Final = 3  # as in PyTorch's documentation: libraries load, measure and allocate in the first ones
_capturing = threading.Lock()  # a process can capture one graph at a time


class CudaEvent:
    """An event of a stream."""

    def __init__(self, stream: Any) -> None:
        # blocking: a thread that waits must not spin on a core that decodes the next batch
        self.made = import_torch().cuda.Event(enable_timing=True, blocking=True)
        self.made.record(stream)

    def wait(self) -> None:
        self.made.synchronize()

    def since(self, start: CudaEvent) -> float:
        seconds: float = start.made.elapsed_time(self.made) / 1e3
        return seconds


class CudaDevice:
    """Three streams of a CUDA device, and PyTorch's pool of pinned memory."""

    def __init__(self, name: str) -> None:
        """Work that this thread has started on the device, such as copies of weights, comes before all other."""
        self._torch = torch = import_torch()
        self.name, self._device = name, torch.device(name)
        self._in, self._kernels, self._out = streams = [torch.cuda.Stream(self._device) for _ in range(3)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def stream(self) -> int:
        """The address of the stream of the kernels, for other libraries."""
        address: int = self._kernels.cuda_stream
        return address

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        kind = self._torch.from_numpy(np.empty(0, dtype)).dtype
        array: Array = self._torch.empty(shape, dtype=kind, pin_memory=True).numpy()
        return array

    def upload(self, arrays: Arrays) -> tuple[Tensors, CudaEvent]:
        with self._torch.cuda.stream(self._in):
            tensors = {
                name: self._torch.from_numpy(array).to(self._device, non_blocking=True)
                for name, array in arrays.items()
            }
            return tensors, CudaEvent(self._in)

    def launch(self, kernels: Kernels, tensors: Tensors, after: CudaEvent) -> tuple[Tensors, CudaEvent, CudaEvent]:
        with self._torch.cuda.stream(self._kernels):
            self._kernels.wait_event(after.made)
            for tensor in tensors.values():
                tensor.record_stream(self._kernels)  # its memory is of another stream, which must not reuse it before
            start = CudaEvent(self._kernels)
            found = {name: self._near(tensor) for name, tensor in kernels(tensors).items()}
            return found, start, CudaEvent(self._kernels)

    def capture(self, kernels: Replay) -> Replay:
        torch, error, found = self._torch, None, Tensors()
        graph = torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.device(self._device), torch.cuda.stream(self._kernels):
            for _ in range(COLD_RUNS):
                kernels()
            # they run one after the other, so they can use the same memory
            pool = next((other.pool() for other in self._graphs), None)
            # by default, calls such as cudaMalloc in any other thread would fail meanwhile
            mode = "thread_local"
            try:
                with torch.cuda.graph(graph, pool=pool, stream=self._kernels, capture_error_mode=mode):
                    try:
                        found = {name: self._near(tensor) for name, tensor in kernels().items()}
                    except Exception as e:
                        error = e  # the end of a broken capture raises another one, which does not say why
            except RuntimeError as e:
                error = error or e
        if error is not None:
            raise error
        self._graphs.add(graph)

        def replay() -> Tensors:
            graph.replay()
            return found

        return replay

    def held_bytes(self) -> int:
        self._torch.cuda.empty_cache()
        held: int = self._torch.cuda.memory_reserved(self._device)
        return held

    def _near(self, tensor: Any) -> Any:
        """The tensor, contiguous, on this device or on the host."""
        far = tensor.is_cuda and tensor.device != self._device
        return (tensor.to(self._device) if far else tensor).contiguous()

    def download(self, tensors: Tensors, after: CudaEvent) -> tuple[Arrays, CudaEvent]:
        arrays: Arrays = {}
        with self._torch.cuda.stream(self._out):
            self._out.wait_event(after.made)
            for name, tensor in tensors.items():
                host = tensor
                if tensor.is_cuda:
                    host = self._torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(self._out)
                arrays[name] = host.numpy()
            return arrays, CudaEvent(self._out)

    def lost(self) -> BaseException | None:
        try:
            self._torch.cuda.synchronize(self._device)
        except RuntimeError as e:
            return e
        return None
