"""Valid and invalid requests to a captioner."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from penstock import images
from penstock.bulk.captioner.model import read_request
from penstock.errors import BadRequest, DecodeError

FRAMES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)


def jpegs(*files: object) -> np.ndarray:
    array = np.empty(len(files), object)
    array[:] = files
    return array


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


def test_frames_are_one_piece_and_not_copied() -> None:
    request = read_request({"frames": FRAMES, "frame_index": np.array([7, 8])})
    (piece,) = request.pieces()
    assert np.shares_memory(piece, FRAMES)
    assert request.rows == 2
    assert request.frame_index.tolist() == [7, 8]
    assert not request.single


def test_each_jpeg_is_decoded_at_its_own_size() -> None:
    files = [simplejpeg.encode_jpeg(noise(*size), quality=95) for size in ((16, 24), (8, 8))]
    request = read_request({"jpeg": jpegs(*files)})
    pieces = list(request.pieces())
    assert [p.shape for p in pieces] == [(1, 16, 24, 3), (1, 8, 8, 3)]
    assert np.array_equal(pieces[0][0], simplejpeg.decode_jpeg(files[0]))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF") for mode in ("RGB", "L")]
    + [("JPEG", "CMYK"), ("TIFF", "CMYK")],
)
def test_an_image_file_is_one_row(kind: str, mode: str) -> None:
    file = io.BytesIO()
    Image.fromarray(noise(9, 5)).convert(mode).save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    request = read_request(memoryview(file.getvalue()))
    assert (request.rows, request.single) == (1, True)
    (piece,) = request.pieces()
    assert piece.shape == (1, 9, 5, 3)
    if kind in ("PNG", "WEBP", "BMP", "TIFF"):
        assert np.array_equal(piece[0], np.asarray(Image.fromarray(noise(9, 5)).convert(mode).convert("RGB")))


def test_arrays_from_the_same_process_are_frames() -> None:
    assert read_request(FRAMES[0]).single
    assert read_request(FRAMES).rows == 2
    assert not read_request(FRAMES).single


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "found none of the inputs 'frames' and 'jpeg'"),
        ({"frames": FRAMES, "jpeg": jpegs(b"\xff\xd8\xff")}, "found both of the inputs"),
        ({"frame": FRAMES}, "unknown input 'frame'; did you mean 'frames'"),
        (
            {"frames": FRAMES[0]},
            r"found uint8 of shape \[4, 6, 3\]; expected UINT8 of shape \[rows, height, width, 3\]",
        ),
        ({"frames": FRAMES.astype(np.float32)}, "found float32 of shape"),
        ({"frames": FRAMES[..., :2]}, "found uint8 of shape"),
        ({"frames": FRAMES[:0]}, r"shape \[0, 4, 6, 3\] holds no pixels"),
        ({"frames": FRAMES[:, :0]}, "holds no pixels"),
        ({"frames": [[1]]}, "found a list; expected UINT8"),
        ({"jpeg": jpegs(b"\xff\xd8\xff.", b"PNG")}, "row 1 is not a JPEG file"),
        ({"jpeg": jpegs("text")}, "row 0 is not a JPEG file"),
        ({"jpeg": jpegs()}, "expected BYTES of shape"),
        ({"frames": FRAMES, "frame_index": np.arange(3)}, r"'frame_index': found int64 of shape \[3\]; .* \[2\]"),
        ({"frames": FRAMES, "frame_index": np.arange(2, dtype=np.int32)}, "'frame_index': found int32"),
        ({"frames": np.zeros((1025, 1, 1, 3), np.uint8)}, "found 1025 frames at once; expected 1024 at most"),
        (FRAMES[:, :0], "holds no pixels"),
        (np.uint8(3) + np.zeros((), np.uint8), "found a "),
        (b"", "the body is empty"),
        (["x"], "found a list; expected the bytes of one image, or tensors"),
    ],
)
def test_an_invalid_request_is_rejected_with_the_reason(value: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read_request(value)


def huge_jpeg(width: int, height: int) -> bytes:
    """A small file whose header states a huge size."""
    file = bytearray(simplejpeg.encode_jpeg(noise(8, 8)))
    frame = file.index(b"\xff\xc0")
    file[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(file)


def huge_png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(8, 8)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def row_of(file: object) -> np.ndarray:
    """The second image of a request, in the way a bulk job sends it."""
    rows = list(read_request({"jpeg": jpegs(simplejpeg.encode_jpeg(noise(8, 8)), file)}).pieces())
    return rows[1][0]


@pytest.mark.parametrize("file", [huge_jpeg(10_000, 8_000), huge_png(10_000, 8_000)])
def test_an_image_with_a_huge_size_in_its_header_is_rejected(file: bytes) -> None:
    with pytest.raises(DecodeError, match=r"^found an image of 10000 x 8000 pixels, expected at most 50,000,000"):
        list(read_request(file).pieces())


@pytest.mark.parametrize("file", [b"\x89PNG\r\n\x1a\n garbage", b"\x80\x04\x95 a pickle", b"<svg/>"])
def test_a_damaged_file_is_rejected(file: bytes) -> None:
    with pytest.raises(DecodeError, match=r"^found "):
        list(read_request(memoryview(file)).pieces())


@pytest.mark.parametrize("file", [b"\xff\xd8\xff garbage", simplejpeg.encode_jpeg(noise(64, 64))[:-200]])
def test_a_damaged_jpeg_is_rejected_with_its_row(file: bytes) -> None:
    with pytest.raises(DecodeError, match=r"^input 'jpeg': row 1: found a JPEG that is"):
        row_of(memoryview(file))


def test_jpegs_are_decoded_without_the_fast_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    file = simplejpeg.encode_jpeg(noise(16, 24), quality=95)
    fast = row_of(file)
    monkeypatch.setattr(images, "library", lambda name: None)
    assert np.abs(row_of(file).astype(int) - fast).max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_an_image_of_16_bits_is_that_of_8(kind: str) -> None:
    """It was white."""
    gray = noise(9, 5)[:, :, 0]
    out = io.BytesIO()
    Image.fromarray(gray.astype(np.uint16) * 257).save(out, kind)
    (piece,) = read_request(out.getvalue()).pieces()
    assert np.array_equal(piece[0], np.repeat(gray[:, :, None], 3, axis=2))


def test_a_photograph_is_upright() -> None:
    marks, out = Image.Exif(), io.BytesIO()
    marks[0x0112] = 6
    Image.fromarray(noise(24, 16)).save(out, "JPEG", exif=marks)
    assert row_of(out.getvalue()).shape == (16, 24, 3)
