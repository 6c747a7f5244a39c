"""Image files of known pixels, in every kind that a format has: what each becomes, and what is refused by name."""

import io
import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from penstock import images
from penstock.errors import DecodeError
from penstock.images import MOST_PARTS, decode_image, flat, jpeg_header, opened, upright

Array = np.ndarray[Any, Any]

# ---- files whose pixels are known

HEIGHT, WIDTH = 40, 56
Y, X = np.mgrid[0:HEIGHT, 0:WIDTH]
COLORS = np.stack([X * 4, Y * 6, 40 + X + Y], axis=2).astype(np.uint8)  # smooth, so that lossy formats keep it
GRAY = (20 + 3 * X + Y).astype(np.uint8)
OPACITY = (255 - 6 * Y).astype(np.uint8)
LOSSY = {"JPEG": 4, "WEBP": 4, "AVIF": 4}  # mean difference that their compression may cause


class Picture(NamedTuple):
    """A file, its pixels uint8 `[40, 56, 3]` upright over white, and the mean difference that its format causes."""

    name: str
    data: bytes
    pixels: Array
    tolerance: float


def turned(mat: Array, orientation: int) -> Array:
    """Upright pixels of stored ones, by the definition in the Exif standard."""
    across = np.swapaxes(mat, 0, 1)
    return [
        mat,
        mat[:, ::-1],
        mat[::-1, ::-1],
        mat[::-1],
        across,
        across[:, ::-1],
        across[::-1, ::-1],
        across[::-1],
    ][orientation - 1]


def stored(mat: Array, orientation: int) -> Array:
    """What a camera stores of upright pixels: 6 and 8 undo each other, the others themselves."""
    return np.ascontiguousarray(turned(mat, {6: 8, 8: 6}.get(orientation, orientation)))


def over(pixels: Array, opacity: Array, background: float = 255.0) -> Array:
    part = opacity[:, :, None] / 255.0
    return np.rint(pixels * part + background * (1 - part)).astype(np.uint8)


def rgb(gray: Array) -> Array:
    return np.repeat(gray[:, :, None], 3, axis=2)


def png(levels: Array, bits: int, color: int, orientation: int = 1, clear: bytes = b"") -> bytes:
    """A PNG of levels `[height, width]` or `[height, width, channels]`. `color`: its type. `clear`: its tRNS."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    height, width = levels.shape[:2]
    if bits == 16:
        rows = levels.astype(">u2").reshape(height, -1).view(np.uint8)
    elif bits == 8:
        rows = levels.astype(np.uint8).reshape(height, -1)
    else:
        each = np.unpackbits(levels.astype(np.uint8)[:, :, None], axis=2)[:, :, 8 - bits :]
        rows = np.packbits(each.reshape(height, -1), axis=1)
    body = b"".join(b"\0" + row.tobytes() for row in rows)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)),
            chunk(b"PLTE", PALETTE.tobytes()) if color == 3 else b"",
            chunk(b"tRNS", clear) if clear else b"",
            chunk(b"eXIf", exif(orientation, ">")[6:]),
            chunk(b"IDAT", zlib.compress(body)),
            chunk(b"IEND", b""),
        ]
    )


def exif(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entry = struct.pack(order + "HHIHH", 0x0112, kind, 1, orientation, 0)
    return b"Exif\0\0" + mark + struct.pack(order + "IH", 8, 1) + entry + b"\0" * 4


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


PALETTE = np.random.default_rng(0).integers(0, 256, (16, 3), np.uint8)
UNSIGNED, SIGNED, FLOATS = 1, 2, 3


def tiff(levels: Array, kind: int, orientation: int = 1, white_is_0: bool = False, order: str = "<") -> bytes:
    """An uncompressed TIFF of levels `[height, width]` or `[height, width, 3]`; `kind` is its SampleFormat."""
    height, width, channels = (*levels.shape, 1)[:3]
    bits = levels.dtype.itemsize * 8
    body = levels.astype(levels.dtype.newbyteorder(order)).tobytes()
    body += b"\0" * (len(body) % 2)
    many = struct.pack(order + "6H", *[bits] * 3, *[kind] * 3)  # the values of tags with three
    at = 8 + len(body)
    tags = [
        (256, width),
        (257, height),
        (258, bits if channels == 1 else at),
        (259, 1),
        (262, 2 if channels == 3 else 0 if white_is_0 else 1),
        (273, 8),
        (274, orientation),
        (277, channels),
        (278, height),
        (279, levels.nbytes),
        (339, kind if channels == 1 else at + 6),
    ]
    entries = b""
    for tag, value in tags:
        long, count = tag in (273, 279), channels if tag in (258, 339) else 1
        packed = struct.pack(order + ("I" if long or count > 1 else "HH"), value, *([] if long or count > 1 else [0]))
        entries += struct.pack(order + "HHI", tag, 4 if long else 3, count) + packed
    mark = b"II*\0" if order == "<" else b"MM\0*"
    ifd = struct.pack(order + "H", len(tags)) + entries + b"\0" * 4
    return mark + struct.pack(order + "I", at + len(many)) + body + many + ifd


def saved(array: Array | Image.Image, kind: str, orientation: int = 1, **options: Any) -> bytes:
    out = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    if kind == "TIFF":
        options["tiffinfo"] = {274: orientation}
    elif kind not in ("GIF", "BMP"):
        marks = Image.Exif()
        marks[0x0112] = orientation
        options["exif"] = marks
    if kind in ("JPEG", "WEBP", "AVIF"):
        options = {"quality": 95, **options}
    image.save(out, kind, **options)
    return out.getvalue()


def pictures() -> Iterator[Picture]:
    clear = over(COLORS, OPACITY), over(rgb(GRAY), OPACITY)
    wide, wide_gray = COLORS.astype(np.uint16) * 256 + 99, GRAY.astype(np.uint16) * 256 + 99
    for o in range(1, 9):
        color, gray, opacity = (stored(a, o) for a in (COLORS, GRAY, OPACITY))
        for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
            yield Picture(f"{kind} RGB {o}", saved(color, kind, o), COLORS, LOSSY.get(kind, 0))
            if kind != "JPEG":
                both = np.dstack([color, opacity])
                yield Picture(f"{kind} RGBA {o}", saved(both, kind, o), clear[0], 1 + LOSSY.get(kind, 0))
        for kind in ("JPEG", "PNG", "TIFF"):
            yield Picture(f"{kind} gray {o}", saved(gray, kind, o), rgb(GRAY), LOSSY.get(kind, 0))
        for kind in ("JPEG", "TIFF"):
            inks = Image.fromarray(color).convert("CMYK")
            yield Picture(f"{kind} CMYK {o}", saved(inks, kind, o), COLORS, 4)
        for kind in ("PNG", "TIFF"):
            yield Picture(f"{kind} I;16 {o}", saved(stored(wide_gray, o), kind, o), rgb(GRAY), 0)
            palette = Image.fromarray(color).quantize(256)
            known = turned(np.asarray(palette.convert("RGB")), o)
            yield Picture(f"{kind} palette {o}", saved(palette, kind, o), known, 0)
            bits = Image.fromarray(gray > 100)
            yield Picture(f"{kind} 1 bit {o}", saved(bits, kind, o), rgb((GRAY > 100) * np.uint8(255)), 0)
        yield Picture(
            f"TIFF LZW 16 bits {o}", saved(stored(wide_gray, o), "TIFF", o, compression="tiff_lzw"), rgb(GRAY), 0
        )
        yield Picture(f"PNG 16-bit RGB {o}", png(stored(wide, o), 16, 2, o), COLORS, 0)
        deep = np.dstack([wide_gray, OPACITY.astype(np.uint16) * 257])
        yield Picture(f"PNG 16-bit gray with alpha {o}", png(stored(deep, o), 16, 4, o), clear[1], 1)
        yield Picture(f"PNG gray with alpha {o}", png(stored(np.dstack([GRAY, OPACITY]), o), 8, 4, o), clear[1], 1)
        for order, white_is_0 in itertools.product("<>", (False, True)):
            what = f"{order} white is 0: {white_is_0}, {o}"
            for name, levels, sign in (
                ("uint8", GRAY, UNSIGNED),
                ("uint16", wide_gray, UNSIGNED),
                ("uint32", GRAY.astype(np.uint32) << 24 | 99, UNSIGNED),
                ("int16", GRAY.astype(np.int16) << 7 | 9, SIGNED),
                ("int32", GRAY.astype(np.int32) << 23 | 99, SIGNED),
                ("float", GRAY.astype(np.float32) / 255, FLOATS),
            ):
                levels = stored(levels, o)
                if white_is_0:
                    levels = 1 - levels if sign == FLOATS else np.iinfo(levels.dtype).max - levels
                yield Picture(f"TIFF {name} {what}", tiff(levels, sign, o, white_is_0, order), rgb(GRAY), 0)
            if not white_is_0:
                yield Picture(f"TIFF RGB 16 {what}", tiff(stored(wide, o), UNSIGNED, o, order=order), COLORS, 0)
    for bits in (1, 2, 4, 8, 16):
        levels = GRAY.astype(np.uint16) * 257 >> 16 - bits
        known = (levels >> 8 if bits == 16 else levels * 255 // (2**bits - 1)).astype(np.uint8)
        yield Picture(f"PNG gray {bits}", png(levels, bits, 0), rgb(known), 0)
        level = int(levels[20, 20])
        data = png(levels, bits, 0, clear=struct.pack(">H", level))
        yield Picture(f"PNG gray {bits} tRNS", data, rgb(np.where(levels == level, 255, known).astype(np.uint8)), 0)
    seen = np.where((COLORS[9, 9] == COLORS).all(axis=2)[:, :, None], 255, COLORS).astype(np.uint8)
    yield Picture("PNG RGB tRNS", png(COLORS, 8, 2, clear=COLORS[9, 9].astype(">u2").tobytes()), seen, 0)
    yield Picture("PNG 16-bit RGB tRNS", png(wide, 16, 2, clear=wide[9, 9].astype(">u2").tobytes()), seen, 0)
    index = (GRAY // 16).astype(np.uint8)
    yield Picture("PNG palette 4", png(index, 4, 3), PALETTE[index], 0)
    opacities = np.arange(0, 256, 17).astype(np.uint8)
    data = png(index, 4, 3, clear=opacities.tobytes())
    yield Picture("PNG palette 4 tRNS", data, over(PALETTE[index], opacities[index]), 1)
    for mode in ("RGB", "L", "1", "P"):
        image = Image.fromarray(COLORS).convert(mode)
        for kind in ("BMP", "GIF"):
            known = np.asarray(image.convert("RGB"))
            yield Picture(f"{kind} {mode}", saved(image, kind), known, 12 if (kind, mode) == ("GIF", "RGB") else 0)
    spot = Image.fromarray(COLORS).quantize(16)
    hole = np.asarray(spot) == 3
    known = np.where(hole[:, :, None], 255, np.asarray(spot.convert("RGB"))).astype(np.uint8)
    yield Picture("GIF transparent", saved(spot, "GIF", transparency=3), known, 0)


@pytest.fixture(scope="module")
def files() -> list[Picture]:
    return list(pictures())


def difference(mat: Array, pixels: Array) -> float:
    return float(np.abs(mat.astype(int) - pixels).mean()) if mat.shape == pixels.shape else 255.0


def by_pillow(data: bytes) -> Array:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    return np.asarray(flat(image) if image.has_transparency_data else image.convert("RGB"))


def by_opencv(data: bytes) -> Array:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]


def wrong(files: list[Picture], decode: Callable[[bytes], Array]) -> list[str]:
    found = []
    for picture in files:
        try:
            mat = decode(picture.data)
        except Exception as e:
            found.append(f"{picture.name}: {e}")
            continue
        if (off := difference(mat, picture.pixels)) > picture.tolerance:
            found.append(f"{picture.name}: {mat.shape} differs by {off:.1f}")
    return found


# ---- what they become

# Pillow reads no TIFF of these kinds, and says so.
REFUSED = ("uint32 >", "uint16 > white is 0: True", "uint32 < white is 0: True")
REFUSED += tuple(f"{kind} {order} white is 0: True" for kind in ("int16", "int32") for order in "<>")


def test_every_file_has_its_pixels_or_is_refused_by_name(files):
    """The pixels are known: no library decides what is right."""
    assert len(files) > 400
    refused = [f for f in files if f.name.removeprefix("TIFF ").startswith(REFUSED)]
    assert wrong([f for f in files if f not in refused], decode_image) == []
    for picture in refused:
        with pytest.raises(
            DecodeError, match=r"found a TIFF with levels of a rare kind or a broken header .*expected AVIF"
        ):
            decode_image(picture.data)


@pytest.mark.parametrize("library", [by_pillow, by_opencv])
def test_a_library_alone_is_right_about_half_of_the_files(files, library, capfd):
    """So the files are what they claim to be, and one library is not enough."""
    assert 100 < len(wrong(files, library)) < len(files) / 2


@pytest.fixture(params=["simplejpeg", "cv2", "Pillow"])
def only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one library for JPEGs that is installed."""
    found = images.library
    monkeypatch.setattr(images, "library", lambda name: found(name) if name == request.param else None)
    return str(request.param)


def test_a_jpeg_is_the_same_picture_by_every_library(files, only):
    jpegs = [f for f in files if f.name.startswith("JPEG")]
    assert wrong(jpegs, decode_image) == []
    assert wrong(jpegs, lambda data: decode_image(data, "bgr")[:, :, ::-1]) == []


@pytest.mark.parametrize("first", [1, 6])
def test_of_several_exif_segments_the_first_counts(first, only):
    data = saved(stored(COLORS, first), "JPEG", first)
    at = data.index(b"Exif") - 4
    length = int.from_bytes(data[at + 2 : at + 4], "big") + 2
    both = data[: at + length] + segment(0xE1, exif(3)) + data[at + length :]
    assert difference(decode_image(both), COLORS) < 4
    assert opened(both).size == (WIDTH, HEIGHT)


@pytest.mark.parametrize(("at_least", "found"), [((20, 28), (20, 28)), ((21, 28), (40, 56)), ((5, 7), (5, 7))])
def test_a_jpeg_may_be_decoded_at_reduced_size(at_least, found, only):
    mat = decode_image(saved(stored(COLORS, 6), "JPEG", 6), at_least=at_least)
    assert mat.shape == (*found, 3)
    assert abs(float(mat.mean()) - float(COLORS.mean())) < 4


def test_a_damaged_jpeg_is_an_error_by_every_library(only):
    data = saved(COLORS, "JPEG")
    for broken in (data[:300], data[: len(data) // 3] + data[-2:], b"\xff\xd8\xff\xd9"):
        if only == "cv2" and broken is not data[:300] and b"\xff\xda" in broken:
            continue  # OpenCV decodes what is left
        with pytest.raises(
            DecodeError, match=r"found a JPEG that (is broken|is truncated|cannot be decoded)"
        ) as caught:
            decode_image(broken)
        assert "0x" not in caught.value.message


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 2), (3, 5, 3)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pixels_are_turned_with_opencv_and_without(orientation, shape, monkeypatch):
    mat = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    expected = turned(mat, orientation)
    assert np.array_equal(upright(mat, orientation).reshape(expected.shape), expected)
    monkeypatch.setattr(images, "library", lambda name: None)
    assert np.array_equal(upright(mat, orientation), expected)


@pytest.mark.parametrize("background", [(0, 0, 0), (10, 200, 30)])
def test_what_is_not_opaque_is_laid_over_the_background(background):
    data = png(np.dstack([COLORS, OPACITY]), 8, 6)
    for color, order in (("rgb", slice(None)), ("bgr", slice(None, None, -1))):
        mat = decode_image(data, color, background=background)
        expected = over(COLORS, OPACITY, np.array(background))[:, :, order]
        assert np.abs(mat.astype(int) - expected).max() <= 1


def test_pixels_may_be_written_and_bytes_be_in_any_buffer():
    for kind in ("PNG", "JPEG"):
        data = saved(COLORS, kind)
        mat = decode_image(memoryview(data))
        mat[0, 0] = 7
        assert mat.flags.c_contiguous
        assert np.array_equal(decode_image(bytearray(data))[1:], mat[1:])


@pytest.mark.parametrize(
    ("data", "mode"),
    [
        (png(GRAY, 8, 0), "L"),
        (png(GRAY.astype(np.uint16) << 8, 16, 0), "L"),
        (png(GRAY // 200, 1, 0), "L"),
        (png(np.dstack([GRAY, OPACITY]), 8, 4), "LA"),
        (png(GRAY // 16, 4, 3), "RGB"),
        (png(GRAY // 16, 4, 3, clear=b"\0\7"), "RGBA"),
        (png(np.dstack([COLORS, OPACITY]), 8, 6, 5), "RGBA"),
        (png(GRAY.astype(np.uint16) << 8, 16, 0, 8, clear=b"\0\0"), "LA"),
        (saved(COLORS, "JPEG"), "RGB"),
        (saved(GRAY, "JPEG"), "L"),
        (saved(Image.new("CMYK", (4, 4)), "JPEG"), "RGB"),
        (saved(COLORS, "PPM"), "RGB"),
    ],
)
def test_an_opened_image_keeps_gray_and_opacity(data, mode):
    image = opened(data)
    assert image.mode == mode
    assert image.size in ((WIDTH, HEIGHT), (HEIGHT, WIDTH), (4, 4))


# ---- what is refused


@pytest.mark.parametrize(
    ("beginning", "name"),
    [
        (b"\0\0\0\x18ftypheic", "HEIC"),
        (b"\0\0\0\x18ftypmif1", "HEIC"),
        (b"\0\0\0\x18ftypavif", "AVIF"),
        (b"\0\0\0\x18ftypisom", "a video"),
        (b"\xff\x0a", "JPEG XL"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
        (b"8BPS\0\1", "a Photoshop file"),
        (b"%PDF-1.4", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "PostScript"),
        (b"<svg/>", "SVG"),
        (b"GIF89a", "a GIF with a broken header"),
        (b"P6 9 9 255\n", "beginning with b'P6 9 9 2': no known image format"),
        (b"\0", "beginning with b'.*': no known image format"),
    ],
)
def test_a_format_that_cannot_be_read_is_named(beginning, name):
    with pytest.raises(DecodeError, match=f"found .*{name}.*expected AVIF, BMP, GIF, JPEG, PNG, TIFF or WebP"):
        decode_image(beginning + b"\0" * 40)


@pytest.mark.parametrize(
    ("data", "levels"),
    [
        (tiff(GRAY.astype(np.float32), FLOATS), "from 20 to 224, expected 0 to 1"),
        (tiff(GRAY.astype(np.float32) / 255 - 0.5, FLOATS), "from -0.4.* to 0.3.*, expected 0 to 1"),
        (tiff(np.full((4, 4), np.nan, np.float32), FLOATS), "from nan to nan, expected 0 to 1"),
        (tiff(GRAY.astype(np.int32) - 21, SIGNED), "from -1 to 203, expected 0 or more"),
        (tiff(GRAY.view(np.int8), SIGNED), "from -128 to 127, expected 0 or more"),
    ],
)
def test_levels_without_a_scale_are_refused_with_their_range(data, levels):
    with pytest.raises(DecodeError, match=f"found levels {levels}: save 8 or 16 bits"):
        decode_image(data)


def test_separate_planes_are_read_or_refused():
    """Pillow misreads those of 16 bits: it makes noise of them."""
    for levels in (COLORS, COLORS.astype(np.uint16) << 8):
        planes = [np.ascontiguousarray(levels[:, :, i]).tobytes() for i in range(3)]
        size, bits = len(planes[0]), levels.dtype.itemsize * 8
        starts = [8 + size * i for i in range(3)]
        at = 8 + 3 * size
        values = struct.pack("<4H3I3I", bits, bits, bits, 0, *starts, size, size, size)
        tags = [(256, 1, WIDTH), (257, 1, HEIGHT), (258, 3, at), (259, 1, 1), (262, 1, 2), (273, 3, at + 8)]
        tags += [(277, 1, 3), (278, 1, HEIGHT), (279, 3, at + 20), (284, 1, 2)]
        entries = b"".join(struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, n, v) for tag, n, v in tags)
        ifd = struct.pack("<H", len(tags)) + entries + b"\0" * 4
        data = b"II*\0" + struct.pack("<I", at + len(values)) + b"".join(planes) + values + ifd
        if bits == 8:
            assert difference(decode_image(data), COLORS) == 0
        else:
            with pytest.raises(DecodeError, match="found a TIFF with separate planes of such levels"):
                decode_image(data)


def test_a_tiff_of_another_writer_has_its_pixels_or_is_refused():
    """Kinds that Pillow and OpenCV do not write: planes, tiles, BigTIFF, both byte orders, with and without zlib."""
    tifffile = pytest.importorskip("tifffile")
    shapes = {"minisblack": (GRAY, rgb(GRAY)), "rgb": (COLORS, COLORS)}
    shapes["alpha"] = (np.dstack([GRAY, OPACITY]), over(rgb(GRAY), OPACITY))
    read, failed = 0, []
    for photometric, (levels, known) in shapes.items():
        types = (np.uint8, np.uint16, np.uint32, np.int32, np.float32)
        options = itertools.product(types, (None, "zlib"), (1, 2), "<>", (None, (16, 16)), (False, True))
        for dtype, compression, planar, order, tile, big in options:
            if levels.ndim == 2 and planar == 2:
                continue
            top = (
                1 / 255 if dtype == np.float32 else 1 << (31 if dtype == np.int32 else np.dtype(dtype).itemsize * 8) - 8
            )
            deep = (levels.astype(np.float64) * top).astype(dtype)
            more = {"planarconfig": planar} if levels.ndim == 3 else {}
            if photometric == "alpha":
                more["extrasamples"] = ["unassalpha"]
            out = io.BytesIO()
            tifffile.imwrite(
                out,
                np.moveaxis(deep, 2, 0) if planar == 2 else deep,
                photometric=photometric.replace("alpha", "minisblack"),
                compression=compression,
                byteorder=order,
                tile=tile,
                bigtiff=big,
                metadata=None,
                **more,
            )
            try:
                mat = decode_image(out.getvalue())
            except DecodeError:
                continue
            read += 1
            if (off := difference(mat, known)) > 1:
                failed.append((photometric, dtype.__name__, compression, planar, order, tile, big, off))
    assert failed == []
    assert read > 50


def test_signed_levels_of_8_bits_have_7():
    assert difference(decode_image(tiff((GRAY >> 1).view(np.int8), SIGNED)), rgb(GRAY // 2 * 2)) == 0


def test_the_size_is_checked_before_the_pixels_are_decoded():
    for kind in ("PNG", "JPEG", "GIF"):
        with pytest.raises(DecodeError, match="56 x 40 pixels, expected at most 2,239"):
            decode_image(saved(COLORS, kind), max_pixels=HEIGHT * WIDTH - 1)


# ---- the header of a JPEG


FRAME = segment(0xC0, struct.pack(">BHHB", 8, 300, 400, 3) + b"\0" * 9)
SCAN = segment(0xDA, b"\0" * 10)


@pytest.mark.parametrize("progressive", [False, True])
def test_the_size_is_read(progressive):
    header = jpeg_header(saved(COLORS, "JPEG", progressive=progressive))
    assert (header.width, header.height, header.orientation) == (WIDTH, HEIGHT, 1)


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


@given(st.binary(max_size=200))
def test_any_bytes_give_a_header_or_a_value_error(data):
    try:
        header = jpeg_header(b"\xff\xd8" + data)
    except ValueError:
        return
    assert header.width > 0
    assert header.height > 0
