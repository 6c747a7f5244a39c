"""Frames on their way to the device: gathered, copied, resized and normalised while another batch is captioned."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Final, Protocol

import numpy as np
import torch
from msgspec import Struct
from PIL import Image
from torch.nn.functional import interpolate

from penstock.errors import PenstockError

Array = np.ndarray[Any, Any]

RESIZE_BYTES: Final = 8 * 2**20  # of frames resized in one call: a GPU holds them as floats
_RESAMPLING: Final = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


class FrameSource(Protocol):
    """A request with `rows` frames. `pieces` yields consecutive rows of one size, uint8 `[n, height, width, 3]`."""

    rows: int

    def pieces(self) -> Iterator[Array]: ...


class ImageSpec(Struct, frozen=True):
    """The input of a network: RGB frames of one size, `(pixel / 255 - mean) / std`; `kernel` resizes other sizes."""

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kernel: str


class DeviceBatch:
    """The pixels of the requests without an error, in order, and one entry in `errors` for each request."""

    def __init__(self, pixels: torch.Tensor, errors: list[PenstockError | None], ready: Any = None) -> None:
        self._pixels, self._ready = pixels, ready
        self.rows = len(pixels)
        self.errors = errors

    def take(self) -> torch.Tensor:
        """Floats `[rows, 3, height, width]`, for the stream of the calling thread."""
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._pixels.device)
            stream.wait_event(self._ready)
            self._pixels.record_stream(stream)  # created on another stream; must not be freed before this one is done
        return self._pixels


class DeviceFeed:
    """Makes device batches from requests, in any thread, one at a time.

    Frames of the network's size are gathered in host memory. A GPU uses two pinned buffers in turn: its copy engine
    reads one while the other is filled. Frames of other sizes are resized: by Pillow for a CPU, or on the GPU.
    """

    def __init__(self, spec: ImageSpec, device: str, dtype: torch.dtype) -> None:
        self._spec, self._dtype = spec, dtype
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        # For a whole line of pixels: normalising with three numbers along the last axis takes three times as long.
        mean, std = (torch.tensor(v, device=device).repeat(spec.width) for v in (spec.mean, spec.std))
        self._scale, self._shift = 1 / (255 * std), -mean / std
        self._lock = threading.Lock()
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(self._device) if self._cuda else None
        if self._stream is not None:  # otherwise it might read scale and shift before they are computed
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._buffers: list[torch.Tensor] = [torch.empty((0, spec.height, spec.width, 3))] * (2 if self._cuda else 1)
        self._copied: list[Any] = [cuda.Event() if self._cuda else None for _ in self._buffers]
        self._turn = 0

    def __call__(self, requests: Sequence[FrameSource | PenstockError]) -> DeviceBatch:
        """One batch, with an error for each request that cannot be decoded. Raises errors of the device."""
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with self._lock, torch.inference_mode(), on_stream:
            self._turn = (self._turn + 1) % len(self._buffers)
            host = self._buffer(sum(r.rows for r in requests if not isinstance(r, PenstockError)))
            rows, resized, errors = self._gather(requests, host.numpy())
            pixels = host[:rows].to(self._device, non_blocking=True)
            if self._stream is not None:
                self._copied[self._turn].record(self._stream)
            for start, frames in resized:
                pixels[start : start + len(frames)] = frames
            lines = pixels.view(rows, self._spec.height, 3 * self._spec.width).float()
            lines = lines.mul_(self._scale).add_(self._shift)
            pixels = lines.to(self._dtype).view(pixels.shape).permute(0, 3, 1, 2)
            ready = None if self._stream is None else self._stream.record_event()
        return DeviceBatch(pixels, errors, ready)

    def _buffer(self, rows: int) -> torch.Tensor:
        """uint8 `[rows, height, width, 3]`, after any copy from it has ended."""
        if self._cuda:
            self._copied[self._turn].synchronize()
        if len(self._buffers[self._turn]) < rows:
            shape = (rows, self._spec.height, self._spec.width, 3)
            self._buffers[self._turn] = torch.empty(shape, dtype=torch.uint8, pin_memory=self._cuda)
        return self._buffers[self._turn][:rows]

    def _gather(
        self, requests: Sequence[FrameSource | PenstockError], host: Array
    ) -> tuple[int, list[tuple[int, torch.Tensor]], list[PenstockError | None]]:
        """The number of rows in `host`, the resized frames with their first row, and the error of each request."""
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
                    elif self._cuda:
                        resized.append((at, resized_by_torch(piece, self._spec, self._device)))
                    else:
                        host[at : at + len(piece)] = resized_by_pillow(piece, self._spec)
                    at += len(piece)
            except PenstockError as e:
                at = start
                del resized[known:]
                errors.append(e)
            else:
                errors.append(None)
        return at, resized, errors


def resized_by_pillow(frames: Array, spec: ImageSpec) -> Array:
    """uint8 `[n, height, width, 3]` in the size of `spec`.

    torch has a kernel for integers, but its weights are coarse: on some CPUs it is 8 levels away.
    """
    size, resampling = (spec.width, spec.height), _RESAMPLING[spec.kernel]
    return np.stack([np.asarray(Image.fromarray(frame).resize(size, resampling)) for frame in frames])


def resized_by_torch(frames: Array, spec: ImageSpec, device: torch.device) -> torch.Tensor:
    """uint8 `[n, height, width, 3]` in the size of `spec`, on the device.

    Equal to Pillow's within one level. But Pillow also rounds and clips between the two directions, which shows where
    a bicubic kernel overshoots at hard edges of black and white.
    """
    step = max(1, RESIZE_BYTES // frames[0].nbytes)
    parts = []
    for start in range(0, len(frames), step):
        part = torch.from_numpy(np.array(frames[start : start + step])).to(device).permute(0, 3, 1, 2)
        size = (spec.height, spec.width)
        floats = interpolate(part.float(), size, mode=spec.kernel, antialias=True, align_corners=False)
        parts.append(floats.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
