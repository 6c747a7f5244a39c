"""CUDA devices by way of PyTorch, see `device.py`. Functions import torch when they are called."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.core.worker.tensor_model import Array, Arrays
from penstock.runtimes.device import Kernels, Tensors
from penstock.runtimes.torch import import_torch


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
