"""Headers of encoded images. They give the size before anything is allocated for the image."""

import struct

from msgspec import Struct

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
