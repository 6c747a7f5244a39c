"""The pixels of decoded frames: scaled, upright, RGB, written once into their place; or compressed as JPEG."""

from __future__ import annotations

import functools
import importlib
import io
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.bulk.types import Pixels
from penstock.bulk.video import VideoError, av_library
from penstock.errors import ConfigError, install_hint

JPEG_QUALITY = 90

Array = np.ndarray[Any, np.dtype[np.uint8]]


class FrameConverter:
    """Converts the frames of one video as `pixels` requires. Belongs to one thread; keeps the scaler between frames."""

    def __init__(self, pixels: Pixels) -> None:
        av = av_library()
        self.pixels = pixels
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._area = av.video.reformatter.Interpolation.AREA
        self._exact = exact_kernel() if pixels.kernel == "exact" and pixels.height is not None else None
        self._rotation: int | None = None  # of the last frame
        self._orientation = 0, False  # from its display matrix

    def size(self, picture: Any) -> tuple[int, int]:
        """Height and width of the converted frame."""
        if self.pixels.height is not None and self.pixels.width is not None:
            return self.pixels.height, self.pixels.width
        height, width = picture.height, picture.width
        return (width, height) if self._oriented(picture)[0] % 2 else (height, width)

    def _oriented(self, picture: Any) -> tuple[int, bool]:
        """`_orientation_of` a frame, which reads the matrix only when the rotation changes.

        Reading side data ties a frame into a reference cycle, which would hold the decoder's memory until the garbage
        collector runs, possibly hours later. A tiny copy is read instead.
        """
        if picture.rotation != self._rotation:
            tiny = _to_rgb(av_library().video.reformatter.VideoReformatter(), picture, width=16, height=16)
            self._rotation, self._orientation = picture.rotation, _orientation_of(tiny)
        return self._orientation

    def convert(self, picture: Any, into: Array) -> None:
        """Writes a frame to `into`, `[height, width, 3]` uint8. Raises VideoError if it cannot be converted."""
        turns, mirrored = self._oriented(picture)
        height, width = into.shape[:2]
        if turns % 2:
            height, width = width, height
        if self._exact is None:
            rgb = _to_rgb(self._reformatter, picture, width=width, height=height, interpolation=self._area)
            upright = rgb_view(rgb)
        else:
            upright = self._exact(rgb_view(_to_rgb(self._reformatter, picture)), height, width)
        if mirrored:
            upright = upright[:, ::-1]
        if turns:
            upright = np.rot90(upright, turns)
        np.copyto(into, upright)


def _to_rgb(reformatter: Any, picture: Any, **how: Any) -> Any:
    """The frame as rgb24. Raises VideoError."""
    try:
        return reformatter.reformat(picture, format="rgb24", threads=1, **how)
    except (OSError, ValueError) as error:
        raise VideoError(f"its pixels ({picture.format.name}) cannot be converted: {error}") from error


def rgb_view(rgb: Any) -> Array:
    """`[height, width, 3]` uint8 over the memory of an rgb24 frame, without the padding of its rows."""
    plane = rgb.planes[0]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: rgb.height, : rgb.width * 3]
    return rows.reshape(rgb.height, rgb.width, 3)


def _orientation_of(picture: Any) -> tuple[int, bool]:
    """How to make a frame upright: quarter turns counter-clockwise, after mirroring it left to right or not."""
    matrix = picture.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0, False
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    mirrored = a * d - b * c < 0
    if mirrored:
        a, b = -a, -b
    return round(math.degrees(math.atan2(-b, a)) / 90) % 4, mirrored


def exact_kernel() -> Callable[[Array, int, int], Array]:
    """Antialiased bicubic scaling of RGB bytes, as Pillow does it. Needs torch, and runs in the calling thread."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError("the exact kernel needs torch: pip install torch, or use --kernel fast") from error
    torch.set_num_threads(1)

    def scale(rgb: Array, height: int, width: int) -> Array:
        source = torch.from_numpy(rgb).permute(2, 0, 1)[None]
        scaled = torch.nn.functional.interpolate(source, (height, width), mode="bicubic", antialias=True)
        array: Array = scaled[0].permute(1, 2, 0).numpy()
        return array

    return scale


def jpeg_encoder() -> Callable[[Array], bytes]:
    """Encodes `[height, width, 3]` uint8 as JPEG, quality 90, 4:2:0, by simplejpeg or else Pillow."""
    try:
        simplejpeg: Any = importlib.import_module("simplejpeg")
    except ImportError:
        return _pillow_encoder()
    return functools.partial(simplejpeg.encode_jpeg, quality=JPEG_QUALITY, colorspace="RGB", colorsubsampling="420")


def _pillow_encoder() -> Callable[[Array], bytes]:
    try:
        image: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(f"JPEG needs simplejpeg: {install_hint('image')}, or use other pixels") from error

    def encode(rgb: Array) -> bytes:
        file = io.BytesIO()
        image.fromarray(rgb).save(file, "jpeg", quality=JPEG_QUALITY, subsampling="4:2:0")
        return file.getvalue()

    return encode
