"""Frames on their way to the device: gathered, copied, resized and normalised while another batch is captioned."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import torch
from msgspec import Struct
from PIL import Image
from torch.nn.functional import interpolate

from penstock.errors import PenstockError
from penstock.runtimes.cuda import CudaDevice
from penstock.runtimes.device import Device
from penstock.runtimes.graphs import Tensors

T = TypeVar("T")
Array = np.ndarray[Any, Any]
Network = Callable[[torch.Tensor], T]

RESIZE_BYTES: Final = 8 * 2**20  # of frames resized in one call: a GPU holds them as floats
_RESAMPLING: Final = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class FrameSource(Protocol):
    """A request with `rows` frames. `pieces` yields consecutive rows of one size, uint8 `[n, height, width, 3]`."""

    rows: int

    def pieces(self) -> Iterator[Array]: ...


class ImageSpec(Struct, frozen=True):
    """The input of a network: RGB frames of one size, `(pixel / 255 - mean) / std`; `kernel` resizes other sizes.

    Without `mean` and `std`, pixels stay bytes.
    """

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kernel: str


class DeviceBatch:
    """The pixels of the requests without an error, in order, and one entry in `errors` for each request."""

    def __init__(self, rows: int, errors: list[PenstockError | None], run: Callable[[Network[Any]], None]) -> None:
        self.rows, self.errors, self._run = rows, errors, run

    def through(self, network: Network[T]) -> T:
        """What a network makes of the pixels, floats or bytes `[rows, 3, height, width]`. Raises errors of both."""
        found: list[T] = []
        self._run(lambda pixels: found.append(network(pixels)))
        return found[0]


class DeviceFeed:
    """Makes device batches from requests, in any threads.

    Frames of the network's size are gathered in host memory, which a GPU copies while it captions another batch. Frames
    of other sizes are resized: by Pillow for a CPU, or on the GPU.
    """

    def __init__(self, spec: ImageSpec, device: str, dtype: torch.dtype, on: Device | None = None) -> None:
        """`on`: the device, if it is not that of the name."""
        self._spec, self._dtype = spec, dtype
        # For a whole line of pixels: normalising with three numbers along the last axis takes three times as long.
        mean, std = (torch.tensor(v or 1.0, device=device).repeat(spec.width) for v in (spec.mean, spec.std))
        self._scale, self._shift = 1 / (255 * std), -mean / std
        # made last: its queues wait for scale and shift
        self._on: Device | None = CudaDevice(device) if on is None and device.startswith("cuda") else on

    def __call__(self, requests: Sequence[FrameSource | PenstockError]) -> DeviceBatch:
        """One batch, with an error for each request that cannot be decoded. Raises errors of the device."""
        on = self._on
        most = sum(r.rows for r in requests if not isinstance(r, PenstockError))
        host = (np.empty if on is None else on.empty)((most, self._spec.height, self._spec.width, 3), np.uint8)
        rows, resized, errors = self._gather(requests, host)
        if on is None:
            pixels = self._normalised(torch.from_numpy(host[:rows]), resized)
            return DeviceBatch(rows, errors, lambda network: network(pixels))
        tensors, ready = on.upload({"frames": host[:rows]})

        def run(network: Network[Any]) -> None:
            def kernels(tensors: Tensors) -> Tensors:
                network(self._normalised(tensors["frames"], resized))
                return {}

            on.launch(kernels, tensors, ready)

        return DeviceBatch(rows, errors, run)

    @torch.inference_mode()
    def _normalised(self, pixels: torch.Tensor, resized: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        for start, frames in resized:
            pixels[start : start + len(frames)] = frames
        if not self._spec.mean:
            return pixels.permute(0, 3, 1, 2)
        lines = pixels.view(len(pixels), self._spec.height, 3 * self._spec.width).float()
        lines = lines.mul_(self._scale).add_(self._shift)
        return lines.to(self._dtype).view(pixels.shape).permute(0, 3, 1, 2)

    def _gather(
        self, requests: Sequence[FrameSource | PenstockError], host: Array
    ) -> tuple[int, list[tuple[int, torch.Tensor]], list[PenstockError | None]]:
        """The number of rows in `host`, the frames resized on the GPU with their first row, and the error of each
        request."""
        size = (self._spec.height, self._spec.width)
        at = 0
        resized: list[tuple[int, torch.Tensor]] = []
        errors: list[PenstockError | None] = []
        for request in requests:
            if isinstance(request, PenstockError):
                errors.append(request)
                continue
            start, known = at, len(resized)
            try:
                for piece in request.pieces():
                    if piece.shape[1:3] == size:
                        host[at : at + len(piece)] = piece
                    elif self._on is None:
                        host[at : at + len(piece)] = resized_by_pillow(piece, self._spec)
                    else:
                        resized += self._resized(self._on, at, piece)
                    at += len(piece)
            except PenstockError as e:
                at = start
                del resized[known:]
                errors.append(e)
            else:
                errors.append(None)
        return at, resized, errors

    def _resized(self, on: Device, at: int, frames: Array) -> Iterator[tuple[int, torch.Tensor]]:
        """The frames from row `at` on, resized on the device: (first row, uint8 `[n, height, width, 3]`)."""
        step = max(1, RESIZE_BYTES // frames[0].nbytes)
        for start in range(0, len(frames), step):
            part = frames[start : start + step]
            host = on.empty(part.shape, part.dtype)
            host[...] = part
            tensors, ready = on.upload({"frames": host})
            found, _, _ = on.launch(lambda t: {"frames": resized_by_torch(t["frames"], self._spec)}, tensors, ready)
            yield at + start, found["frames"]


def resized_by_pillow(frames: Array, spec: ImageSpec) -> Array:
    """uint8 `[n, height, width, 3]` in the size of `spec`.

    torch has a kernel for integers, but its weights are coarse: on some CPUs it is 8 levels away.
    """
    size, resampling = (spec.width, spec.height), _RESAMPLING[spec.kernel]
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, resampling)) for frame in frames])


def resized_by_torch(frames: torch.Tensor, spec: ImageSpec) -> torch.Tensor:
    """uint8 `[n, height, width, 3]` in the size of `spec`.

    Equal to Pillow's within one level. But Pillow also rounds and clips between the two directions, which shows where
    a bicubic kernel overshoots at hard edges of black and white.
    """
    size, floats = (spec.height, spec.width), frames.permute(0, 3, 1, 2).float()
    floats = interpolate(floats, size, mode=spec.kernel, antialias=True, align_corners=False)
    return floats.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
