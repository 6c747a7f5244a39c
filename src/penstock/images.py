"""Image files as pixels: the one place that decodes them, for pipelines, captioners, TorchServe's handlers, and models.

A file says more than levels: which way is up, how many bits a level has, a palette or inks instead of red, green and
blue, an opacity. A decoder that ignores one of them gives a wrong picture and no error, and each library ignores
another. Therefore two functions state what every picture becomes: `opened` makes it upright and 8 bits deep, and `flat`
lays it over a background. What they cannot convert without a guess is an error that names what was found.

Most pictures are JPEGs, which have a path of their own: simplejpeg gives the same bits as OpenCV in 6 % less CPU time,
detects missing data, and decodes at reduced size. The orientation is read here, so that it does not depend on the
library. Pillow decodes everything else. Both release the interpreter lock.
"""

import importlib
import io
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from penstock.errors import DecodeError, LoadFailed, describe
from penstock.plugins import optional_module

Array = np.ndarray[Any, Any]
Color = Literal["rgb", "bgr"]
Decoder = Literal["auto", "opencv", "simplejpeg"]
RGB = tuple[int, int, int]

MAX_PIXELS = 50_000_000  # 150 MB of pixels; accepts a camera's 8000 x 6000
WHITE: RGB = (255, 255, 255)  # what browsers and most viewers show behind a picture

# EPS is missing because Pillow starts programs for it, and JPEG 2000 because it declares its size twice.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")

# Tags of a TIFF, and where a PNG has the bits of its levels.
_BITS, _COMPRESSION, _PHOTOMETRIC, _PLANES, _SAMPLE_FORMAT = 258, 259, 262, 284, 339
_PNG_DEPTH = 24

# What people send and Pillow does not read: where a file says so, and what it is.
_UNREADABLE = (
    *((4, b"ftyp" + brand, "HEIC") for brand in (b"hei", b"hev", b"mif1", b"msf1")),
    (4, b"ftypavi", "AVIF, for which this Pillow was not built,"),
    (4, b"ftypcrx", "a camera's raw file"),
    (4, b"ftyp", "a video"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"v/1\x01", "OpenEXR"),
    (0, b"#?", "Radiance HDR"),
    (0, b"%PDF", "PDF"),
    (0, b"%!PS", "PostScript"),
    (0, b"<svg", "SVG"),
    (0, b"<?xml", "XML, perhaps SVG"),
    *(
        (0, mark, "a TIFF with levels of a rare kind or a broken header")
        for mark in (b"MM\0*", b"II*\0", b"MM\0+", b"II+\0")
    ),
    (0, b"\xff\xd8", "a JPEG with a broken header"),
    (0, b"\x89PNG", "a PNG with a broken header"),
    (0, b"GIF8", "a GIF with a broken header"),
    (0, b"RIFF", "a WebP with a broken header"),
)


def decode_image(
    data: bytes | bytearray | memoryview,
    color: Color = "rgb",
    *,
    decoder: Decoder = "auto",
    at_least: tuple[int, int] | None = None,
    max_pixels: int = MAX_PIXELS,
    background: Sequence[int] = WHITE,
) -> Array:
    """The pixels of an image file, uint8 `[height, width, 3]`: upright, 8 bits deep, laid over the `background` (RGB).

    The bytes determine the format, one of `FORMATS`. Animations give their first picture, deep levels their upper 8
    bits, floats from 0 to 1 the nearest of 255; inks (CMYK) are converted without a color profile. A JPEG is decoded at
    1/2, 1/4 or 1/8 of its size if it stays `at_least` that high and wide. Raises DecodeError for an unknown or
    unreadable format, a broken or truncated file, more than `max_pixels`, and levels without a scale; LoadFailed if
    Pillow is missing.
    """
    data = bytes(data)
    if data.startswith(JPEG):
        return _jpeg(data, color, decoder, at_least, max_pixels)
    return _array(flat(opened(data, FORMATS, max_pixels), background), color)


def opened(data: bytes, formats: Sequence[str] | None = None, max_pixels: int | None = None) -> Any:
    """The Pillow image in an image file: upright, and in a mode of 8 bits, which is L, LA, RGB or RGBA.

    `formats`: all that Pillow reads if None. `max_pixels`: Pillow's own limit if None. Raises as `decode_image`.
    """
    if not data:
        raise DecodeError("found no bytes, expected an encoded image")
    pillow = _pillow()
    kind = "image"
    try:
        image = pillow.open(io.BytesIO(data), formats=formats)  # reads the header only
        kind = image.format
        if max_pixels is not None:
            _check_pixels(image.width, image.height, max_pixels)
        tags = dict(getattr(image, "tag_v2", {}))  # of a TIFF
        image.load()
        exif = image.info.get("exif", b"")  # of an AVIF, also what its own boxes say; Pillow has turned a TIFF already
        image, orientation = _shallow(image, data, tags), _orientation(exif.removeprefix(_EXIF))
        return image if orientation == 1 else pillow.fromarray(upright(np.asarray(image), orientation))
    except DecodeError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as e:
        raise DecodeError(f"found an image that is too large: {e}") from e
    except pillow.UnidentifiedImageError as e:
        raise DecodeError(_unknown(data)) from e
    except Exception as e:  # Pillow's parsers raise many classes: OSError, SyntaxError, struct.error ...
        message = f"found a {kind} that cannot be decoded ({len(data)} bytes): broken, truncated, or of a rare kind"
        raise DecodeError(message, detail=describe(e)) from e


def flat(image: Any, background: Sequence[int] = WHITE) -> Any:
    """The Pillow image in mode RGB. What is not opaque is laid over the `background` (RGB)."""
    if image.has_transparency_data:
        pillow, image = _pillow(), image.convert("RGBA")
        if image.getchannel("A").getextrema()[0] < 255:
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, (*background, 255)), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def upright(mat: Any, orientation: int) -> Any:
    """The pixels `[height, width, ...]` with the Exif `orientation` applied (1: unchanged)."""
    axes = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}.get(orientation, ())
    if not isinstance(mat, np.ndarray):  # a tensor of PyTorch
        mat = mat.swapaxes(0, 1) if orientation >= 5 else mat
        return mat.flip(axes) if axes else mat
    if (cv2 := library("cv2")) is None:
        return np.ascontiguousarray(np.flip(mat.swapaxes(0, 1) if orientation >= 5 else mat, axes))
    if orientation >= 5:
        mat = cv2.transpose(mat)  # four times as fast as NumPy
    return cv2.flip(mat, {(0,): 0, (1,): 1, (0, 1): -1}[axes]) if axes else mat


# ---- what every library lacks: levels of more than 8 bits, and names of formats that none of them reads


def _shallow(image: Any, data: bytes, tags: Mapping[int, Any]) -> Any:
    """The loaded image in the mode L, LA, RGB or RGBA. Raises DecodeError for levels without a scale."""
    clear = image.info.get("transparency")  # a level, a color, or the opacities of a palette
    signed = tags.get(_SAMPLE_FORMAT, (1,))[0] == 2
    bits = tags.get(_BITS, (16,))
    # Pillow misreads two kinds of TIFF, and makes noise of them: planes that it joins, and levels that libtiff swapped.
    if tags.get(_PLANES) == 2 and (len(bits) == 2 or (len(bits) > 2 and max(bits) > 8)):
        raise DecodeError(
            "found a TIFF with separate planes of such levels, which cannot be read here: interleave them"
        )
    if bits == (32,) and image.mode == "I" and tags.get(_COMPRESSION, 1) != 1 and data.startswith(b"MM"):
        raise DecodeError("found a TIFF with compressed big-endian levels of 32 bits, which cannot be read here")
    if image.mode[0] in "IF" or signed:
        deep = np.asarray(image)
        found = _eight_bits(deep, bits[0], signed)
        if tags.get(_PHOTOMETRIC) == 0:  # white is 0, which Pillow inverts for 8 bits and fewer
            found = ~found
        opaque = (deep != clear) * np.uint8(255)
        return _pillow().fromarray(found if clear is None else np.dstack([found, opaque]))
    if image.format == "PNG" and isinstance(clear, int) and image.mode == "L":
        image.info["transparency"] = clear * 255 // (2 ** data[_PNG_DEPTH] - 1)  # Pillow scales the pixels alone
    elif image.format == "PNG" and isinstance(clear, tuple) and data[_PNG_DEPTH] == 16:
        image.info["transparency"] = tuple(level >> 8 for level in clear)
    mode = ("L" if image.mode in ("1", "L", "LA", "La") else "RGB") + ("A" if image.has_transparency_data else "")
    return image if image.mode == mode else image.convert(mode)


def _eight_bits(levels: Array, bits: int, signed: bool) -> Array:
    """The upper 8 of the `bits` of a level, without its sign; of floats, the nearest of 255. Raises DecodeError."""
    if not signed and bits == 32 and levels.dtype == np.int32:
        levels = levels.view(np.uint32)
    elif signed and bits == 8:
        levels = levels.view(np.int8)
    low, high = levels.min(), levels.max()
    floats = levels.dtype.kind == "f"
    if not (low >= 0 and (high <= 1 or not floats)):  # not a number is not 0 or more
        expected = "0 to 1" if floats else "0 or more"
        raise DecodeError(f"found levels from {low:g} to {high:g}, expected {expected}: save 8 or 16 bits per level")
    if floats:
        levels, bits = np.rint(levels * 255).astype(np.uint8), 8
    bits -= signed
    found: Array = (levels << 1 if bits < 8 else levels >> bits - 8).astype(np.uint8)
    return found


def _unknown(data: bytes) -> str:
    known = "expected AVIF, BMP, GIF, JPEG, PNG, TIFF or WebP"
    for at, mark, name in _UNREADABLE:
        if data.startswith(mark, at):
            return f"found {name} ({len(data)} bytes), which cannot be read here; {known}"
    return f"found {len(data)} bytes beginning with {data[:8]!r}: no known image format; {known}"


def _check_pixels(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise DecodeError(f"found an image of {width} x {height} pixels, expected at most {most:,} (max_pixels)")


def _array(image: Any, color: Color) -> Array:
    """The pixels of an image in mode RGB, in memory that may be written."""
    levels = bytearray(image.tobytes("raw", color.upper()))
    return np.frombuffer(levels, np.uint8).reshape(image.height, image.width, 3)


def _pillow() -> Any:
    return optional_module("PIL.Image", "Pillow cannot be imported", "image", LoadFailed)


@lru_cache(maxsize=8)
def library(name: str) -> Any:
    """The module, or None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# ---- JPEG


def _jpeg(data: bytes, color: Color, decoder: Decoder, at_least: tuple[int, int] | None, max_pixels: int) -> Array:
    header = whole_jpeg(data, max_pixels)
    reduction = header.reduction(at_least)
    height, width = -(-header.height // reduction), -(-header.width // reduction)
    try:
        if decoder != "opencv" and (turbo := library("simplejpeg")) is not None:
            mat = turbo.decode_jpeg(data, color.upper(), min_height=height, min_width=width)
        elif (cv2 := library("cv2")) is not None:
            scaled = cv2.IMREAD_COLOR if reduction == 1 else getattr(cv2, f"IMREAD_REDUCED_COLOR_{reduction}")
            mat = cv2.imdecode(np.frombuffer(data, np.uint8), scaled | cv2.IMREAD_IGNORE_ORIENTATION)
            if mat is None:
                raise ValueError("it is damaged")
            mat = mat if color == "bgr" else cv2.cvtColor(mat, cv2.COLOR_BGR2RGB)
        else:
            image = _pillow().open(io.BytesIO(data), formats=("JPEG",))
            image.draft("RGB", (width, height))
            mat = _array(flat(image), color)
    except LoadFailed:
        raise
    except Exception as e:  # of simplejpeg, with a reason; of OpenCV and Pillow, with paths and addresses
        why = e if type(e) is ValueError else "it is damaged"
        raise DecodeError(f"found a JPEG that cannot be decoded: {why} ({len(data)} bytes)") from e
    found: Array = upright(mat, header.orientation)
    return found


JPEG = b"\xff\xd8"
MOST_PARTS = 2**16  # segments and fill bytes before a JPEG's scan: walking over them costs 20 ms
_NO_LENGTH = {0x01, *range(0xD0, 0xD9), 0xFF}  # markers without a length, and a fill byte
_SEGMENT = struct.Struct(">BBH")
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15, but not DHT, JPG, DAC
_EXIF = b"Exif\0\0"
_ORIENTATION, _SHORT = 0x0112, 3


class JpegHeader(Struct, frozen=True):
    """The frame header of a JPEG (ITU T.81, B.2.2), and the Exif `orientation`, 1 to 8.

    `scan` is where the first scan begins. An end marker after it ends the image.
    """

    width: int
    height: int
    orientation: int
    scan: int

    def reduction(self, at_least: tuple[int, int] | None) -> int:
        """The largest of 1, 2, 4 and 8 that leaves the upright image `at_least` that high and wide."""
        if at_least is None:
            return 1
        h, w = at_least if self.orientation < 5 else at_least[::-1]  # 5 to 8 are rotated by 90 degrees
        return next((n for n in (8, 4, 2) if -(-self.height // n) >= h and -(-self.width // n) >= w), 1)

    def ended(self, data: bytes) -> bool:
        """Whether the image has its end marker. Inside a scan, 0xFF 0xD9 has no other meaning."""
        return data.rfind(b"\xff\xd9", self.scan) >= 0


def jpeg_header(data: bytes) -> JpegHeader:
    """The header of a JPEG. Raises ValueError if it is broken or truncated."""
    width = height = 0
    orientation, at, size = 0, 2, len(data)
    for _ in range(MOST_PARTS):
        if at + 4 > size:
            break
        first, marker, length = _SEGMENT.unpack_from(data, at)
        if first != 0xFF:
            raise ValueError(f"byte {at} is no marker")
        if marker in _NO_LENGTH:
            at += 1 if marker == 0xFF else 2  # a fill byte, or a whole marker
            continue
        if marker == 0xDA:
            if not width or not height:
                raise ValueError("it has a scan before its frame, or a frame without a size")
            return JpegHeader(width, height, orientation or 1, at + 2)
        if marker == 0xD9 or length < 2:
            break
        if marker in _FRAMES and at + 10 <= size:
            height, width = struct.unpack_from(">HH", data, at + 5)
        elif marker == 0xE1 and not orientation and data.startswith(_EXIF, at + 4):  # of several, the first counts
            orientation = _orientation(data[at + 10 : at + 2 + length])
        at += 2 + length
    raise ValueError(f"it ends inside its header, or its header has more than {MOST_PARTS} parts")


def whole_jpeg(data: bytes, max_pixels: int) -> JpegHeader:
    """The header of a JPEG that is whole and has at most `max_pixels`. Raises DecodeError."""
    try:
        header = jpeg_header(data)
    except ValueError as e:
        raise DecodeError(f"found a JPEG that is broken: {e} ({len(data)} bytes)") from e
    _check_pixels(header.width, header.height, max_pixels)
    if not header.ended(data):
        raise DecodeError(f"found a JPEG that is truncated after {len(data)} bytes: it has no end marker")
    return header


def _orientation(tiff: bytes) -> int:
    """The orientation tag in the first directory of a TIFF header; 1 if it is missing or invalid."""
    try:
        order = {b"II": "<", b"MM": ">"}[tiff[:2]]
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, start)
        for i in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * i)
            if tag == _ORIENTATION:
                return value if kind == _SHORT and 1 <= value <= 8 else 1
    except (KeyError, struct.error):
        pass
    return 1
