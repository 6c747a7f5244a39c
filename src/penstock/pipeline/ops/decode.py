"""Decoding of images: DecodeMat, DecodeTensor, and the accuracy of JPEGs decoded at reduced size.

Both ops release the interpreter lock while they decode. simplejpeg decodes JPEGs if it is installed: it gives the same
bits as OpenCV in 6 % less CPU time, and detects missing data. OpenCV decodes the other formats.
"""

from __future__ import annotations

import io
import logging
import struct
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from msgspec import Struct

from penstock.errors import ConfigError, DecodeError, install_hint
from penstock.pipeline.ops.base import Array, Fields, ItemOp, found
from penstock.pipeline.ops.geometry import sized
from penstock.pipeline.ops.mat import DataFormat, cv2, tensor_of

log = logging.getLogger("penstock.pipeline")

MAX_PIXELS = 50_000_000  # 150 MB of pixels; accepts a camera's 8000 x 6000

# Besides JPEG and PNG. EPS is missing because Pillow starts programs for it, and JPEG 2000 because it declares its size
# twice: an attacker could show a small one to Pillow, which checks it, and a huge one to OpenCV, which decodes it.
_FORMATS = ("AVIF", "BMP", "GIF", "TIFF", "WEBP")

Decoder = Literal["auto", "opencv", "simplejpeg"]


@lru_cache(maxsize=1)
def _simplejpeg() -> Any:
    """The module, or None if it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


class DecodeMat(ItemOp):
    """The pixels of an encoded image: bytes -> uint8 `[height, width, 3]`, BGR; `color` = "bgr".

    The bytes determine the format: JPEG, PNG, WebP, AVIF, BMP, GIF or TIFF. The result always has three channels of 8
    bits: gray is repeated, alpha is dropped, 16 bits are cut to the upper 8, and CMYK is converted without a color
    profile. Animations give their first picture. The EXIF orientation is applied, as in TorchPipe. Raises DecodeError,
    also for a truncated picture.

    - `decoder`: "auto", "opencv" or "simplejpeg" (for JPEG; "auto" uses simplejpeg if it is installed).
    - `scale_h`: decodes a JPEG at 1/2, 1/4 or 1/8 of its size if it stays at least this high and `scale_w` wide, for a
      resize that follows. Pixels differ; the difference is measured and logged at load.
    - `scale_w`: see `scale_h`.
    - `max_pixels`: a larger image is rejected by its header, before it is decoded.
    """

    takes = "bytes"
    gives = "mat"
    writes: ClassVar[tuple[str, ...]] = ("color",)

    def __init__(
        self, decoder: Decoder = "auto", scale_h: int = 0, scale_w: int = 0, max_pixels: int = MAX_PIXELS
    ) -> None:
        if decoder == "simplejpeg" and _simplejpeg() is None:
            raise ConfigError(
                f"decoder = 'simplejpeg', but it is not installed: {install_hint('image')}, or set decoder = 'auto'"
            )
        if (scale_h > 0) != (scale_w > 0):
            raise ConfigError(f"scale_h = {scale_h} and scale_w = {scale_w}: set both above 0, or neither")
        if max_pixels < 1:
            raise ConfigError(f"max_pixels = {max_pixels}, expected at least 1")
        self.color = "bgr"
        self.decoder: Decoder = decoder
        self.max_pixels = max_pixels
        self.scale = (scale_h, scale_w) if scale_h > 0 else None
        self.turbo: Any = None if decoder == "opencv" else _simplejpeg()

    def load(self, device: str) -> None:
        """Logs the accuracy of reduced decoding."""
        if note := self.note():
            log.info("scaled_decode %s", note)

    def note(self) -> str:
        """The measured accuracy of reduced decoding; "" if it is off."""
        if self.scale is None:
            return ""
        measured = accuracy(*self.scale, self.decoder)
        return (
            f"scale_h={self.scale[0]} scale_w={self.scale[1]}: pixels of the resized image differ from those of a full"
            f" decode by {measured.mean:.1f} of 255 on average, 99 % of them by at most {measured.within:.0f}"
        )

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = self.decode(data)
        fields["color"] = self.color
        return mat

    def decode(self, data: Any) -> Array:
        """The image in `self.color`. Raises DecodeError."""
        if not isinstance(data, bytes):
            if not isinstance(data, bytearray | memoryview):
                raise DecodeError(f"{type(self).__name__} found {found(data)}, expected the bytes of an encoded image")
            data = bytes(data)
        if not data:
            raise DecodeError(f"{type(self).__name__} found no bytes, expected an encoded image")
        if data.startswith(JPEG):
            return self._jpeg(data)
        return self._png(data) if data.startswith(PNG) else self._other(data)

    def _jpeg(self, data: bytes) -> Array:
        try:
            header = jpeg_header(data)
        except ValueError as e:
            raise DecodeError(f"found a JPEG that is broken: {e} ({len(data)} bytes)") from e
        self._check_pixels(header.width, header.height)
        if not header.ended(data):
            raise DecodeError(f"found a JPEG that is truncated after {len(data)} bytes: it has no end marker")
        reduction = self._reduction(header)
        if self.turbo is None:
            return self._opencv(data, "JPEG", reduction)
        try:
            mat: Array = self.turbo.decode_jpeg(
                data,
                self.color.upper(),
                min_height=-(-header.height // reduction) if reduction > 1 else 0,
                min_width=-(-header.width // reduction) if reduction > 1 else 0,
            )
        except ValueError as e:
            raise DecodeError(f"found a JPEG that cannot be decoded: {e} ({len(data)} bytes)") from e
        return upright(mat, header.orientation)

    def _reduction(self, header: JpegHeader) -> int:
        """The largest of 1, 2, 4 and 8 that leaves the image large enough."""
        if self.scale is None:
            return 1
        h, w = self.scale if header.orientation < 5 else self.scale[::-1]  # 5 to 8 are rotated by 90 degrees
        return next((n for n in (8, 4, 2) if -(-header.height // n) >= h and -(-header.width // n) >= w), 1)

    def _png(self, data: bytes) -> Array:
        try:
            self._check_pixels(*png_size(data))
        except ValueError as e:
            raise DecodeError(f"found a PNG that is broken: {e} ({len(data)} bytes)") from e
        return self._opencv(data, "PNG")

    def _other(self, data: bytes) -> Array:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:  # reads the header only
                kind, (width, height) = image.format or "image", image.size
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
            raise DecodeError(f"found an image that is too large: {e}") from e
        except UnidentifiedImageError as e:
            raise DecodeError(f"found {len(data)} bytes beginning with {data[:8]!r}: no known image format") from e
        except Exception as e:  # Pillow's parsers raise many classes: OSError, SyntaxError, struct.error ...
            raise DecodeError(f"found an image whose header is broken ({len(data)} bytes)") from e
        self._check_pixels(width, height)
        return self._opencv(data, kind)

    def _check_pixels(self, width: int, height: int) -> None:
        if width * height > self.max_pixels:
            raise DecodeError(
                f"found an image of {width} x {height} pixels, expected at most {self.max_pixels:,} (max_pixels)"
            )

    def _opencv(self, data: bytes, kind: str, reduction: int = 1) -> Array:
        flag = cv2.IMREAD_COLOR if reduction == 1 else getattr(cv2, f"IMREAD_REDUCED_COLOR_{reduction}")
        try:
            mat = cv2.imdecode(np.frombuffer(data, np.uint8), flag)  # applies the EXIF orientation
        except cv2.error as e:
            raise DecodeError(f"found a {kind} that cannot be decoded ({len(data)} bytes)") from e
        if mat is None:
            mat = _pillow(data, kind)
        return mat if self.color == "bgr" else cv2.cvtColor(mat, cv2.COLOR_BGR2RGB)


def _pillow(data: bytes, kind: str) -> Array:
    """The image in BGR, for formats that OpenCV was built without. Raises DecodeError."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))[:, :, ::-1]
    except Exception as e:  # many classes, as above
        raise DecodeError(f"found a {kind} that cannot be decoded ({len(data)} bytes): broken or truncated") from e


def upright(mat: Array, orientation: int) -> Array:
    """The image `[height, width, channels]` with the EXIF `orientation` applied (1: unchanged)."""
    if orientation >= 5:
        mat = cv2.transpose(mat)
    axis = {2: 1, 3: -1, 4: 0, 6: 1, 7: -1, 8: 0}.get(orientation)  # as in cv2.flip
    return mat if axis is None else cv2.flip(mat, axis)


class DecodeTensor(DecodeMat):
    """The pixels of an encoded image as a tensor: bytes -> uint8 `[1, 3, height, width]`; `color` is their order.

    It uses the decoders of DecodeMat on the CPU. TorchPipe decodes on the GPU.

    - `color`: "rgb" or "bgr".
    - `data_format`: "nchw"; "nhwc" gives `[1, height, width, 3]`, "hwc" (TorchPipe's) the same without rows.
    """

    gives = "tensor"
    writes = ("color", "data_format")

    def __init__(
        self,
        color: Literal["rgb", "bgr"] = "rgb",
        data_format: DataFormat = "nchw",
        decoder: Decoder = "auto",
        scale_h: int = 0,
        scale_w: int = 0,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        super().__init__(decoder, scale_h, scale_w, max_pixels)
        self.color, self.data_format = color, data_format

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = super().__call__(data, fields)
        fields["data_format"] = self.data_format
        return tensor_of(mat, self.data_format)


# ---- the accuracy of reduced decoding, on generated pictures between a blurred photograph and a busy one

_SIZES = ((2.3, 2.7), (4.6, 4.2), (3.1, 8.9))  # height and width of the pictures, in multiples of the target size
_MOST_SIDE = 160  # larger pictures give the same result
_QUALITY = 90


class Accuracy(Struct, frozen=True):
    """Differences of the resized picture, in levels of 255: their mean, and the bound of 99 % of them."""

    mean: float
    within: float


@lru_cache(maxsize=64)
def accuracy(scale_h: int, scale_w: int, decoder: Decoder = "auto") -> Accuracy:
    """Compares pictures that are decoded in full and at reduced size, then resized to the target size."""
    height, width = min(scale_h, _MOST_SIDE), min(scale_w, _MOST_SIDE)
    decoders = (DecodeMat(decoder), DecodeMat(decoder, height, width))
    differences = []
    for seed, (more_h, more_w) in enumerate(_SIZES):
        image = picture(int(height * more_h), int(width * more_w), seed)
        _, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        full, scaled = (sized(d.decode(jpeg.tobytes()), height, width).astype(np.int16) for d in decoders)
        differences.append(np.abs(full - scaled).ravel())
    levels = np.concatenate(differences)
    return Accuracy(float(levels.mean()), float(np.quantile(levels, 0.99)))


def picture(height: int, width: int, seed: int) -> Array:
    """A generated picture uint8 `[height, width, 3]`, the same for the same seed."""
    rng = np.random.default_rng(seed)
    levels = np.full((height, width, 3), 128, np.float32)
    size = max(height, width)
    while size >= 2:  # as in a photograph, smaller details have less contrast
        shape = (max(1, height // size), max(1, width // size), 3)
        noise = rng.normal(0, 30 * (size / max(height, width)) ** 0.5, shape).astype(np.float32)
        levels += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
        size //= 2
    for extent in rng.uniform(0.02, 0.3, 400):  # objects of all sizes
        corners = (rng.uniform(0, 1, 2) + rng.uniform(-extent, extent, (4, 2))) * (width, height)
        color = [float(level) for level in rng.uniform(0, 255, 3)]
        cv2.fillConvexPoly(levels, cv2.convexHull(corners.astype(np.int32)), color)
    levels += rng.normal(0, 5, levels.shape).astype(np.float32)  # sensor noise
    return levels.clip(0, 255).astype(np.uint8)


JPEG = b"\xff\xd8"
PNG = b"\x89PNG\r\n\x1a\n"
MOST_PARTS = 2**16  # segments and fill bytes before a JPEG's scan, or chunks of a PNG: walking over them costs 20 ms
_NO_LENGTH = {0x01, *range(0xD0, 0xD9)}  # markers without a length
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15, but not DHT, JPG, DAC
_ORIENTATION, _SHORT = 0x0112, 3


class JpegHeader(Struct, frozen=True):
    """The frame header of a JPEG (ITU T.81, B.2.2), and the EXIF `orientation`, 1 to 8.

    `scan` is where the first scan begins. An end marker after it ends the image.
    """

    width: int
    height: int
    orientation: int
    scan: int

    def ended(self, data: bytes) -> bool:
        """Whether the image has its end marker. Inside a scan, 0xFF 0xD9 has no other meaning."""
        return data.rfind(b"\xff\xd9", self.scan) >= 0


def jpeg_header(data: bytes) -> JpegHeader:
    """The header of a JPEG. Raises ValueError if it is broken or truncated."""
    width = height = 0
    orientation, at, size = 1, 2, len(data)
    for _ in range(MOST_PARTS):
        if at + 4 > size:
            break
        if data[at] != 0xFF:
            raise ValueError(f"byte {at} is no marker")
        marker = data[at + 1]
        if marker == 0xFF or marker in _NO_LENGTH:
            at += 1 if marker == 0xFF else 2  # a fill byte, or a whole marker
            continue
        length = data[at + 2] << 8 | data[at + 3]
        if marker == 0xDA:
            if not width or not height:
                raise ValueError("it has a scan before its frame, or a frame without a size")
            return JpegHeader(width, height, orientation, at + 2)
        if marker == 0xD9 or length < 2:
            break
        if marker in _FRAMES and at + 10 <= size:
            height, width = struct.unpack_from(">HH", data, at + 5)
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", at + 4):
            orientation = _exif_orientation(data[at + 10 : at + 2 + length])
        at += 2 + length
    raise ValueError(f"it ends inside its header, or its header has more than {MOST_PARTS} parts")


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height of a PNG with all its chunks. Raises ValueError.

    A chunk may declare 4 GB, which OpenCV allocates before it looks for the bytes.
    """
    if len(data) < 24 or data[8:16] != b"\0\0\0\rIHDR":
        raise ValueError("it ends inside its header, or has none")
    at, size = 8, len(data)
    for _ in range(MOST_PARTS):
        if at + 12 > size:
            raise ValueError(f"it is truncated: a chunk extends beyond its {size} bytes")
        length = int.from_bytes(data[at : at + 4], "big")
        if data.startswith(b"IEND", at + 4) and length == 0:
            width, height = struct.unpack_from(">II", data, 16)
            if not width or not height:
                raise ValueError("its width or its height is 0")
            return width, height
        at += 12 + length
    raise ValueError(f"it has more than {MOST_PARTS} chunks")


def _exif_orientation(tiff: bytes) -> int:
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
