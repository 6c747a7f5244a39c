"""Small clips: every frame shows its number as ten black or white blocks above a moving picture."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

BITS = 10  # blocks across the top quarter, the highest bit first


def picture(number: int, width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """`[height, width, 3]` uint8: the number in blocks at the top, a moving colour gradient below."""
    across = np.arange(width)
    down = np.arange(height)[:, None]
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[..., 0] = (across * 255 // width + number * 5) % 256
    pixels[..., 1] = down * 255 // height
    pixels[..., 2] = (across + down + number * 3) % 256
    bits = (number >> (BITS - 1 - across * BITS // width)) & 1
    pixels[: height // 4] = (bits * 255)[None, :, None]
    return pixels


def number_of(pixels: np.ndarray[Any, Any]) -> int:
    """The number shown by a frame `[height, width, 3]` of any size."""
    height, width = pixels.shape[:2]
    columns = (np.arange(BITS) * 2 + 1) * width // (BITS * 2)
    bits = pixels[height // 8, columns].mean(axis=-1) > 127
    return int(bits @ (1 << np.arange(BITS)[::-1]))


def make_clip(
    path: Path,
    frames: int | Iterable[int] = 10,
    *,
    size: tuple[int, int] = (160, 96),
    fps: int = 25,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    options: Mapping[str, str] | None = None,
    container_options: Mapping[str, str] | None = None,
    first_pts: int = 0,
    audio: bool = False,
    streams: int = 1,
    rotate: int | None = None,
    mirrored: bool = False,
    held: int = 1,
) -> Path:
    """Writes a clip of `size` (width, height); the suffix selects the container. Returns the path.

    `frames` is their number, or the pts of each in units of 1/fps (gaps make the rate variable). A second video stream
    shows numbers from 512. Each number is shown by `held` frames. `rotate` is the angle of the display matrix,
    counter-clockwise; `mirrored`, it also mirrors.
    """
    av: Any = importlib.import_module("av")
    width, height = size
    times = list(range(frames)) if isinstance(frames, int) else list(frames)
    with av.open(f"file:{path}", "w", container_options=dict(container_options or {})) as out:
        videos = [out.add_stream(codec, rate=fps, options=dict(options or {})) for _ in range(streams)]
        for stream in videos:
            stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
            if rotate is not None:
                stream.set_display_rotation(rotate, hflip=mirrored)
        sound = out.add_stream("aac", rate=8000) if audio else None
        out.start_encoding()  # a clip without frames also has a header
        for number, pts in enumerate(times):
            for place, stream in enumerate(videos):
                frame = av.VideoFrame.from_ndarray(picture(number // held + 512 * place, width, height), format="rgb24")
                frame.pts, frame.time_base = first_pts + pts, Fraction(1, fps)
                out.mux(stream.encode(frame))
        for stream in videos:
            out.mux(stream.encode())
        if sound is not None:
            _silence(av, out, sound)
    return path


def make_sound(path: Path) -> Path:
    """Writes a file with one second of sound and no video. Returns the path."""
    av: Any = importlib.import_module("av")
    with av.open(str(path), "w") as out:
        _silence(av, out, out.add_stream("aac", rate=8000))
    return path


def _silence(av: Any, out: Any, stream: Any) -> None:
    for start in range(0, 8000, 1000):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1000), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 8000, start, Fraction(1, 8000)
        out.mux(stream.encode(frame))
    out.mux(stream.encode())
