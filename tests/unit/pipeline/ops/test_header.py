from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.pipeline.ops.decode import MOST_PARTS, PNG, jpeg_header, png_size


def exif(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(order + "HHIHH", 0x0112, kind, 1, orientation, 0)
    return b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 1) + entry + b"\0" * 4


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


FRAME = segment(0xC0, struct.pack(">BHHB", 8, 300, 400, 3) + b"\0" * 9)
SCAN = segment(0xDA, b"\0" * 10)


@pytest.mark.parametrize("progressive", [False, True])
def test_the_size_is_read(encode, rgb, progressive):
    header = jpeg_header(encode("JPEG", progressive=progressive))
    assert (header.width, header.height, header.orientation) == (90, 67, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
def test_the_orientation_is_read_in_both_byte_orders(orientation, order):
    header = jpeg_header(b"\xff\xd8" + segment(0xE1, exif(orientation, order)) + FRAME + SCAN)
    assert header.orientation == orientation
    assert (header.width, header.height) == (400, 300)


@pytest.mark.parametrize(
    "body",
    [
        exif(0),
        exif(9),
        exif(6, kind=4),
        exif(6)[:20],
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"http://ns.adobe.com/xap",
    ],
)
def test_an_invalid_orientation_tag_is_ignored(body):
    assert jpeg_header(b"\xff\xd8" + segment(0xE1, body) + FRAME + SCAN).orientation == 1


def test_fill_bytes_and_standalone_markers_are_skipped():
    header = jpeg_header(b"\xff\xd8\xff\xff\xff\x01" + b"\xff\xd0" + FRAME + b"\xff" + SCAN)
    assert header.width == 400


def test_a_scan_is_ended_by_a_marker_behind_its_beginning():
    data = b"\xff\xd8" + segment(0xE2, b"\xff\xd9") + FRAME + SCAN
    assert not jpeg_header(data).ended(data)
    assert jpeg_header(data).ended(data + b"\1\2\xff\xd9rest")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xd8", "ends inside its header"),
        (b"\xff\xd8\xff\xd9", "ends inside its header"),
        (b"\xff\xd8" + FRAME, "ends inside its header"),
        (b"\xff\xd8" + FRAME[:7], "ends inside its header"),
        (b"\xff\xd8" + segment(0xE0, b"")[:-1] + b"\1" + SCAN, "ends inside its header"),
        (b"\xff\xd8\0\0\0\0", "byte 2 is no marker"),
        (b"\xff\xd8" + SCAN + FRAME, "scan before its frame"),
        (b"\xff\xd8" + segment(0xC0, struct.pack(">BHHB", 8, 0, 400, 3)) + SCAN, "without a size"),
    ],
)
def test_a_broken_header_is_an_error(data, why):
    with pytest.raises(ValueError, match=why):
        jpeg_header(data)


@pytest.mark.parametrize("part", [b"\xff", b"\xff\xd0", segment(0xE5, b"")])
def test_a_header_with_endless_parts_is_not_read_to_its_end(part):
    with pytest.raises(ValueError, match=f"more than {MOST_PARTS} parts"):
        jpeg_header(b"\xff\xd8" + part * MOST_PARTS + FRAME + SCAN)


def test_a_png_with_endless_chunks_is_not_read_to_its_end():
    head = PNG + struct.pack(">I4sII5sI", 13, b"IHDR", 1, 1, b"\x08\2\0\0\0", 0)
    end = struct.pack(">I4sI", 0, b"IEND", 0)
    assert png_size(head + end) == (1, 1)
    with pytest.raises(ValueError, match=f"more than {MOST_PARTS} chunks"):
        png_size(head + struct.pack(">I4sI", 0, b"tEXt", 0) * MOST_PARTS + end)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_header_or_a_value_error(data):
    try:
        header = jpeg_header(b"\xff\xd8" + data)
    except ValueError:
        return
    assert header.width > 0
    assert header.height > 0


def test_an_exif_segment_by_pillow_is_read(encode):
    marks = Image.Exif()
    marks[0x0112] = 8
    marks[0x010F] = "a camera"
    assert jpeg_header(encode("JPEG", exif=marks)).orientation == 8
