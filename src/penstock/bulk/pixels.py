"""Decoded frames as the pixels that travel: scaled, turned upright, RGB, written once into their place."""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.bulk.types import Pixels
from penstock.bulk.video import VideoError, library
from penstock.errors import ConfigError

JPEG_QUALITY = 90

Array = np.ndarray[Any, np.dtype[np.uint8]]


class Painter:
    """Writes the frames of one video as `pixels` says. One thread's; it keeps the scaler between frames."""

    def __init__(self, pixels: Pixels) -> None:
        av = library()
        self.pixels = pixels
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._area = av.video.reformatter.Interpolation.AREA
        self._exact = exact_kernel() if pixels.kernel == "exact" and pixels.height is not None else None
        self._rotation: int | None = None  # that of the last frame, and what came of its matrix
        self._turned = 0, False

    def size(self, picture: Any) -> tuple[int, int]:
        """Height and width of what `paint` makes of a frame."""
        if self.pixels.height is not None and self.pixels.width is not None:
            return self.pixels.height, self.pixels.width
        height, width = picture.height, picture.width
        return (width, height) if self._turns(picture)[0] % 2 else (height, width)

    def _turns(self, picture: Any) -> tuple[int, bool]:
        """`_turns` of a frame, which looks at the matrix only when it is another one.

        A frame whose side data were looked at stands in a cycle with them: it, and the decoder's memory with it, would
        be held until the garbage collector comes by, which takes hours. So a tiny copy is looked at.
        """
        if picture.rotation != self._rotation:
            tiny = _converted(library().video.reformatter.VideoReformatter(), picture, width=16, height=16)
            self._rotation, self._turned = picture.rotation, _turns(tiny)
        return self._turned

    def paint(self, picture: Any, into: Array) -> None:
        """Writes a frame to `into`, `[height, width, 3]` uint8. Raises VideoError for what cannot be converted."""
        turns, mirrored = self._turns(picture)
        height, width = into.shape[:2]
        if turns % 2:
            height, width = width, height
        scaled = self._exact is None
        rgb = _converted(
            self._reformatter,
            picture,
            width=width if scaled else None,
            height=height if scaled else None,
            interpolation=self._area if scaled else None,
        )
        upright = view(rgb)
        if self._exact is not None:
            upright = self._exact(upright, height, width)
        if mirrored:
            upright = upright[:, ::-1]
        if turns:
            upright = np.rot90(upright, turns)
        np.copyto(into, upright)


def _converted(reformatter: Any, picture: Any, **how: Any) -> Any:
    """The frame as rgb24. Raises VideoError."""
    try:
        return reformatter.reformat(picture, format="rgb24", threads=1, **how)
    except (OSError, ValueError) as error:
        raise VideoError(f"its pixels ({picture.format.name}) cannot be converted: {error}") from error


def view(rgb: Any) -> Array:
    """`[height, width, 3]` uint8 over an rgb24 frame's memory, whose rows are longer than they look."""
    plane = rgb.planes[0]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: rgb.height, : rgb.width * 3]
    return rows.reshape(rgb.height, rgb.width, 3)


def _turns(picture: Any) -> tuple[int, bool]:
    """How an upright view is made: mirrored left to right or not, then so many quarter turns counter-clockwise."""
    matrix = picture.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0, False
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    mirrored = a * d - b * c < 0
    if mirrored:
        a, b = -a, -b
    return round(math.degrees(math.atan2(-b, a)) / 90) % 4, mirrored


def exact_kernel() -> Callable[[Array, int, int], Array]:
    """Antialiased bicubic on RGB bytes, as Pillow's. Needs torch; uses one thread of it, the caller's."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError("the exact kernel needs torch: pip install torch, or take --kernel fast") from error
    torch.set_num_threads(1)

    def scale(rgb: Array, height: int, width: int) -> Array:
        source = torch.from_numpy(rgb).permute(2, 0, 1)[None]
        scaled = torch.nn.functional.interpolate(source, (height, width), mode="bicubic", antialias=True)
        array: Array = scaled[0].permute(1, 2, 0).numpy()
        return array

    return scale


def jpeg_encoder() -> Callable[[Array], bytes]:
    """`[height, width, 3]` uint8 -> a JPEG file, quality 90, 4:2:0: by simplejpeg, or else by Pillow."""
    try:
        simplejpeg: Any = importlib.import_module("simplejpeg")
    except ImportError:
        return _pillow_encoder()

    def encode(rgb: Array) -> bytes:
        data: bytes = simplejpeg.encode_jpeg(rgb, quality=JPEG_QUALITY, colorspace="RGB", colorsubsampling="420")
        return data

    return encode


def _pillow_encoder() -> Callable[[Array], bytes]:
    try:
        image: Any = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError("JPEG needs simplejpeg: pip install 'penstock[image]', or take other pixels") from error
    io: Any = importlib.import_module("io")

    def encode(rgb: Array) -> bytes:
        file = io.BytesIO()
        image.fromarray(rgb).save(file, "jpeg", quality=JPEG_QUALITY, subsampling="4:2:0")
        data: bytes = file.getvalue()
        return data

    return encode
