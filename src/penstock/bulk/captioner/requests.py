"""What a captioner is asked: frames as they are, JPEGs, or one image file. Images are decoded here, one at a time.

An image's size is read from its head and bounded before anything is decoded: a file of some kilobytes may claim to be
gigapixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from msgspec import Struct

from penstock.errors import BadRequest, describe, nearest

Array = np.ndarray[Any, Any]
Bytes = bytes | memoryview

MOST_PIXELS: Final = 50_000_000  # of one image: 150 MB once it is decoded
MOST_ROWS: Final = 1024  # that run at once: as many as the largest batch that a warm-up tries
_NAMES: Final = ("frames", "jpeg", "frame_index")
_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_JPEG: Final = b"\xff\xd8\xff"


class Request(Struct, eq=False):
    """`rows` frames, either `frames` uint8 `[rows, height, width, 3]` RGB or as many `images`.

    `single`: one image without a name, whose answer is no tensor. `frame_index` is int64 `[rows]`.
    """

    rows: int
    frames: Array | None = None
    images: list[Bytes] | None = None
    frame_index: Array | None = None
    single: bool = False

    def pieces(self) -> Iterator[Array]:
        """Neighbouring rows of one size, uint8 `[n, height, width, 3]`. Raises BadRequest naming the row."""
        if self.frames is not None:
            yield self.frames
        for row, image in enumerate(self.images or ()):
            yield decode_image(image, "the image" if self.single else f"input 'jpeg': row {row}")[np.newaxis]


def read_request(value: Any) -> Request:
    """The request that a value is: a dict of named arrays, an image file, or an array of one or more frames.

    Raises BadRequest.
    """
    request = _read(value)
    if request.rows > MOST_ROWS:
        raise BadRequest(
            f"found {request.rows} frames at once; expected {MOST_ROWS} at most, or binary tensors, which are split"
        )
    return request


def _read(value: Any) -> Request:
    if isinstance(value, dict):
        return _read_named(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not len(value):
            raise BadRequest("the body is empty; expected an image file")
        return Request(1, images=[value if isinstance(value, memoryview) else bytes(value)], single=True)
    if isinstance(value, np.ndarray) and value.ndim == 3:
        return Request(1, frames=_checked_frames(value[np.newaxis]), single=True)
    if isinstance(value, np.ndarray):
        return Request(len(value), frames=_checked_frames(value)) if value.ndim else _refused(value)
    return _refused(value)


def _refused(value: Any) -> Request:
    raise BadRequest(
        f"found a {type(value).__name__}; expected the bytes of one image, or tensors by the Open Inference Protocol"
    )


def _read_named(value: dict[Any, Any]) -> Request:
    for name in value:
        if name not in _NAMES:
            known = ", ".join(_NAMES)
            raise BadRequest(f"unknown input '{str(name)[:100]}'{nearest(str(name)[:100], _NAMES)} (expected: {known})")
    frames, jpeg, index = (value.get(name) for name in _NAMES)
    if (frames is None) == (jpeg is None):
        found = "none" if frames is None else "both"
        raise BadRequest(f"found {found} of the inputs 'frames' and 'jpeg'; expected one of them")
    request = Request(*_frames(frames)) if frames is not None else _jpegs(jpeg)
    if index is not None:
        if not isinstance(index, np.ndarray) or index.dtype != np.int64 or index.shape != (request.rows,):
            raise BadRequest(f"input 'frame_index': {_told(index)}; expected INT64 of shape [{request.rows}]")
        request.frame_index = index.copy()  # it goes out with the answer, when what it lay in may be gone
    return request


def _frames(frames: Any) -> tuple[int, Array]:
    checked = _checked_frames(frames)
    return len(checked), checked


def _checked_frames(frames: Any) -> Array:
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise BadRequest(f"input 'frames': {_told(frames)}; expected UINT8 of shape [rows, height, width, 3]")
    if 0 in frames.shape:
        raise BadRequest(f"input 'frames': shape {list(frames.shape)} holds no pixels")
    return frames


def _jpegs(jpeg: Any) -> Request:
    if not isinstance(jpeg, np.ndarray) or jpeg.ndim != 1 or not len(jpeg):
        raise BadRequest(f"input 'jpeg': {_told(jpeg)}; expected BYTES of shape [rows]")
    images = jpeg.tolist()
    for row, image in enumerate(images):
        if not isinstance(image, (bytes, memoryview)) or bytes(image[:3]) != _JPEG:
            raise BadRequest(f"input 'jpeg': row {row} is no JPEG file; send each file's bytes in a binary tensor")
    return Request(len(images), images=images)


def _told(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"found {value.dtype} of shape {list(value.shape)}"
    return f"found a {type(value).__name__}"


# ---- image files


def decode_image(data: Bytes, where: str) -> Array:
    """uint8 `[height, width, 3]` RGB of a file that JPEG, PNG, WebP, BMP, GIF or TIFF is. Raises BadRequest.

    Orientation that a camera noted is not applied, as the processors of `transformers` do not.
    """
    decode = _simple_jpeg() if bytes(data[:3]) == _JPEG else None
    try:
        return decode(data, where) if decode is not None else _pillow(data, where)
    except BadRequest:
        raise
    except Exception as e:  # of the decoders' own making, on bytes of anybody's
        raise BadRequest(f"{where} is no image file that can be decoded", detail=describe(e)) from None


def _simple_jpeg() -> Callable[[Bytes, str], Array] | None:
    """The fast decoder, where it is installed."""
    try:
        import simplejpeg
    except ImportError:
        return None

    def decode(data: Bytes, where: str) -> Array:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(width, height, where)
        if space in ("CMYK", "YCCK"):  # of printers: it does not turn them into RGB
            return _pillow(data, where)
        found: Array = simplejpeg.decode_jpeg(data, colorspace="RGB")
        return found

    return decode


def _pillow(data: Bytes, where: str) -> Array:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:  # reads no further than the head
        _check_size(*image.size, where)
        return np.asarray(image.convert("RGB"))


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MOST_PIXELS:
        raise BadRequest(f"{where} is {width} x {height} pixels large; expected {MOST_PIXELS} pixels at most")
