"""Requests to a captioner: raw frames, JPEGs, or one image file. Images are decoded one at a time.

The size in an image's header is checked before decoding: a file of some kilobytes may claim to be gigapixels.
"""

import io
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from msgspec import Struct

from penstock.errors import BadRequest, describe, nearest
from penstock.values import shorten

Array = np.ndarray[Any, Any]
Bytes = bytes | memoryview

MAX_PIXELS: Final = 50_000_000  # of one image: 150 MB after decoding
MAX_ROWS: Final = 1024  # in one batch: the largest that a warm-up tries
_NAMES: Final = ("frames", "jpeg", "frame_index")
_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_JPEG: Final = b"\xff\xd8\xff"


class CaptionRequest(Struct, eq=False):
    """`rows` frames, either `frames` uint8 `[rows, height, width, 3]` RGB or as many `images`.

    `single` is one unnamed image, whose response is not a tensor. `frame_index` is int64 `[rows]`.
    """

    rows: int
    frames: Array | None = None
    images: list[Bytes] | None = None
    frame_index: Array | None = None
    single: bool = False

    def pieces(self) -> Iterator[Array]:
        """Consecutive rows of one size, uint8 `[n, height, width, 3]`. Raises BadRequest with the row."""
        if self.frames is not None:
            yield self.frames
        for row, image in enumerate(self.images or ()):
            yield decode_image(image, "the image" if self.single else f"input 'jpeg': row {row}")[np.newaxis]


def read_request(value: Any) -> CaptionRequest:
    """The request in a value: a dict of named arrays, an image file, or an array of frames. Raises BadRequest."""
    request = _read(value)
    if request.rows > MAX_ROWS:
        raise BadRequest(
            f"found {request.rows} frames at once; expected {MAX_ROWS} at most, or binary tensors, which are split"
        )
    return request


def _read(value: Any) -> CaptionRequest:
    if isinstance(value, dict):
        return _read_named(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not len(value):
            raise BadRequest("the body is empty; expected an image file")
        return CaptionRequest(1, images=[value if isinstance(value, memoryview) else bytes(value)], single=True)
    if isinstance(value, np.ndarray) and value.ndim == 3:
        return _frames(value[np.newaxis], single=True)
    if isinstance(value, np.ndarray) and value.ndim:
        return _frames(value)
    raise BadRequest(
        f"found a {type(value).__name__}; expected the bytes of one image, or tensors by the Open Inference Protocol"
    )


def _read_named(value: dict[Any, Any]) -> CaptionRequest:
    for name in value:
        if name not in _NAMES:
            known = ", ".join(_NAMES)
            raise BadRequest(
                f"unknown input '{shorten(str(name), 100)}'{nearest(str(name)[:100], _NAMES)} (expected: {known})"
            )
    frames, jpeg, index = (value.get(name) for name in _NAMES)
    if (frames is None) == (jpeg is None):
        found = "none" if frames is None else "both"
        raise BadRequest(f"found {found} of the inputs 'frames' and 'jpeg'; expected one of them")
    request = _frames(frames) if frames is not None else _jpegs(jpeg)
    if index is not None:
        if not isinstance(index, np.ndarray) or index.dtype != np.int64 or index.shape != (request.rows,):
            raise BadRequest(f"input 'frame_index': {_describe(index)}; expected INT64 of shape [{request.rows}]")
        request.frame_index = index.copy()  # the response outlives the request body
    return request


def _frames(frames: Any, *, single: bool = False) -> CaptionRequest:
    if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise BadRequest(f"input 'frames': {_describe(frames)}; expected UINT8 of shape [rows, height, width, 3]")
    if 0 in frames.shape:
        raise BadRequest(f"input 'frames': shape {list(frames.shape)} holds no pixels")
    return CaptionRequest(len(frames), frames=frames, single=single)


def _jpegs(jpeg: Any) -> CaptionRequest:
    if not isinstance(jpeg, np.ndarray) or jpeg.ndim != 1 or not len(jpeg):
        raise BadRequest(f"input 'jpeg': {_describe(jpeg)}; expected BYTES of shape [rows]")
    images = jpeg.tolist()
    for row, image in enumerate(images):
        if not isinstance(image, (bytes, memoryview)) or bytes(image[:3]) != _JPEG:
            raise BadRequest(f"input 'jpeg': row {row} is not a JPEG file; send each file's bytes in a binary tensor")
    return CaptionRequest(len(images), images=images)


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"found {value.dtype} of shape {list(value.shape)}"
    return f"found a {type(value).__name__}"


# ---- image files


def decode_image(data: Bytes, where: str) -> Array:
    """uint8 `[height, width, 3]` RGB of a JPEG, PNG, WebP, BMP, GIF or TIFF file. Raises BadRequest.

    Ignores the orientation in a camera's metadata, as the processors of `transformers` do.
    """
    try:
        return (_jpeg if bytes(data[:3]) == _JPEG else _pillow)(data, where)
    except BadRequest:
        raise
    except Exception as e:  # decoders raise anything on bytes from anywhere
        raise BadRequest(f"{where} is not an image file that can be decoded", detail=describe(e)) from None


def _jpeg(data: Bytes, where: str) -> Array:
    try:
        import simplejpeg
    except ImportError:
        return _pillow(data, where)
    height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    _check_size(width, height, where)
    if space in ("CMYK", "YCCK"):  # from printing: simplejpeg does not convert them to RGB
        return _pillow(data, where)
    found: Array = simplejpeg.decode_jpeg(data, colorspace="RGB")
    return found


def _pillow(data: Bytes, where: str) -> Array:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:  # reads only the header
        _check_size(*image.size, where)
        return np.asarray(image.convert("RGB"))


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MAX_PIXELS:
        raise BadRequest(f"{where} has {width} x {height} pixels; expected {MAX_PIXELS} pixels at most")
