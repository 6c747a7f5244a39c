from __future__ import annotations

import io
import logging
import struct
import sys
import threading
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from penstock import images
from penstock.errors import BadRequest, ConfigError, DecodeError
from penstock.pipeline.ops.decode import GPU_DECODERS, DecodeMat, DecodeTensor, accuracy, picture
from penstock.pipeline.ops.mat import cv2

DECODERS = ["opencv", "simplejpeg"]


def difference(mat, rgb):
    """The mean difference from an RGB picture."""
    assert mat.shape == rgb.shape
    return np.abs(mat[:, :, ::-1].astype(int) - rgb).mean()


def fails(data, *, match, **params):
    with pytest.raises(DecodeError, match=match) as caught:
        DecodeMat(**params)(data, {})
    return caught.value


# ---- what is decoded


@pytest.mark.parametrize("decoder", ["auto", *DECODERS])
@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}, {"keep_rgb": True}]
)
def test_jpeg_is_bgr_and_what_opencv_gives(encode, decoder, options):
    data = encode("JPEG", **options)
    fields = {}
    mat = DecodeMat(decoder=decoder)(data, fields)
    assert fields == {"color": "bgr"}
    assert mat.dtype == np.uint8
    assert np.array_equal(mat, cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "GIF"])
def test_other_formats_are_decoded_by_what_their_bytes_say(encode, rgb, kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    assert difference(DecodeMat()(encode(kind, **options), {}), rgb) <= (12 if kind == "GIF" else 0)


@pytest.mark.parametrize("wrap", [bytearray, memoryview])
def test_bytes_may_be_in_any_buffer(encode, wrap):
    data = encode("PNG")
    assert np.array_equal(DecodeMat()(wrap(data), {}), DecodeMat()(data, {}))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_one_pixel_is_an_image(decoder, kind):
    out = io.BytesIO()
    Image.new("RGB", (1, 1), (200, 100, 50)).save(out, kind)
    mat = DecodeMat(decoder=decoder)(out.getvalue(), {})
    assert mat.shape == (1, 1, 3)
    assert np.allclose(mat, [50, 100, 200], atol=4)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_gray_is_tripled(encode, rgb, decoder, kind):
    mat = DecodeMat(decoder=decoder)(encode(kind, "L"), {})
    assert mat.shape == (67, 90, 3)
    assert np.array_equal(mat[:, :, 0], mat[:, :, 2])


def test_the_background_of_what_is_not_opaque_is_a_parameter(encode):
    data = encode("PNG", image=Image.new("RGBA", (3, 2), (9, 9, 9, 0)), mode="RGBA")
    assert (DecodeMat()(data, {}) == 255).all()
    assert (DecodeMat(background=(1, 2, 3))(data, {}) == [3, 2, 1]).all()
    assert (DecodeTensor(background=(1, 2, 3))(data, {})[0, :, 0, 0] == [1, 2, 3]).all()
    with pytest.raises(ConfigError, match=r"background = \[0, 0, 256\], expected levels from 0 to 255"):
        DecodeMat(background=(0, 0, 256))


@pytest.mark.parametrize("decoder", DECODERS)
def test_cmyk_has_its_colours_and_is_not_a_negative(encode, rgb, decoder):
    """Pillow writes inverted CMYK with an APP14 segment, as Adobe does."""
    data = encode("JPEG", "CMYK", quality=95)
    assert b"Adobe" in data[:200]
    assert difference(DecodeMat(decoder=decoder)(data, {}), rgb) < 12


@pytest.mark.parametrize("decoder", DECODERS)
def test_ycck_has_its_colours(encode, rgb, decoder):
    """The same numbers declared as YCCK, as Pillow's libjpeg decodes them."""
    data = bytearray(encode("JPEG", "CMYK", quality=95))
    at = data.find(b"Adobe")
    data[at + 11] = 2  # the transform
    want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert difference(DecodeMat(decoder=decoder)(bytes(data), {}), want) < 8
    assert difference(DecodeMat(decoder=decoder)(bytes(data), {}), rgb) > 20, "it was taken for CMYK"


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_picture_is_taken(rgb, kind):
    frames = [Image.fromarray(rgb), Image.new("RGB", (90, 67))]
    out = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], **options)
    assert difference(DecodeMat()(out.getvalue(), {}), rgb) <= (12 if kind == "GIF" else 0)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_rotated_by_its_exif_orientation(rgb, decoder, orientation):
    """Compares with Pillow's rotation."""
    from PIL import ImageOps

    marks = Image.Exif()
    marks[0x0112] = orientation
    out = io.BytesIO()
    Image.fromarray(rgb).save(out, "JPEG", exif=marks, quality=95, subsampling=0)
    want = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(out.getvalue()))))
    mat = DecodeMat(decoder=decoder)(out.getvalue(), {})
    assert mat.shape == ((90, 67, 3) if orientation > 4 else (67, 90, 3))
    assert difference(mat, want) < 2


@pytest.mark.parametrize("decoder", DECODERS)
def test_bytes_after_the_end_of_a_jpeg_are_ignored(encode, decoder):
    data = encode("JPEG")
    assert np.array_equal(DecodeMat(decoder=decoder)(data + b"\r\nrest\xff\xd8", {}), DecodeMat()(data, {}))


def test_a_png_that_is_named_jpeg_is_a_png(encode, rgb):
    assert difference(DecodeMat()(encode("PNG"), {"name": "photo.jpeg"}), rgb) == 0


# ---- what is not


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("text", "str"),
        (None, "NoneType"),
        (7, "int"),
        (np.zeros((2, 2), np.uint8), r"uint8 array \[2, 2\]"),
        ([b"1"], "list"),
    ],
)
def test_a_value_other_than_bytes_is_an_error(data, found):
    error = fails(data, match=f"DecodeMat found {found}")
    assert "expected the bytes of an encoded image" in error.message


@pytest.mark.parametrize("data", [b"", bytearray(), memoryview(b"")])
def test_empty_bytes_are_an_error(data):
    fails(data, match="found no bytes")


@pytest.mark.parametrize("data", [b"\0", b"text", b"P6 9 9 255\n"])
def test_bytes_of_an_unknown_format_are_reported_with_their_beginning(data):
    fails(data, match="bytes beginning with b.*: no known image format")


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("options", [{}, {"progressive": True}])
@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.99])
def test_a_truncated_jpeg_fails(encode, decoder, options, part):
    data = encode("JPEG", **options)
    fails(data[: int(len(data) * part)], match="found a JPEG that is (broken|truncated)", decoder=decoder)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_another_truncated_image_fails(encode, kind, part, capfd):
    data = encode(kind)
    fails(data[: int(len(data) * part)], match="found (a|an) ")


@pytest.mark.parametrize("length", [0x7FFFFFFF, 0xFFFFFFFF, 5000])
def test_no_memory_is_allocated_for_the_chunk_length_in_a_png(encode, length):
    data = encode("PNG")
    at = data.find(b"IHDR") + 17
    tracemalloc.start()
    try:
        fails(data[:at] + struct.pack(">I", length) + data[at + 4 :], match="found a ")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_png_with_a_broken_header_fails(encode):
    data, chunk = encode("PNG"), struct.pack(">I4sI", 0, b"tEXt", zlib.crc32(b"tEXt"))
    for broken in (data[:6], data[:8] + data[33:], bomb_png(0, 5), bomb_png(5, 0), bomb_png(3, 3)[:33] + chunk * 10**4):
        fails(broken, match="found a PNG (with a broken header|that cannot be decoded)")


def test_a_jpeg_with_a_hole_fails(encode):
    data = encode("JPEG")
    fails(data[: len(data) // 2] + data[-2:], match="cannot be decoded: ")


def test_every_flipped_byte_gives_an_image_or_a_decode_error(encode, rgb, capfd):
    """Headers are parsed here. Whatever they contain, the item fails with a client error."""
    for kind in ("JPEG", "PNG", "GIF", "WEBP"):
        data = encode(kind, image=Image.fromarray(rgb[:16, :24]))
        for at in range(0, len(data), 1 + len(data) // 700):
            broken = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
            try:
                mat = DecodeMat(max_pixels=10**6)(broken, {})
            except DecodeError:
                continue
            assert mat.ndim == 3
            assert mat.shape[2] == 3


def bomb_png(width, height):
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def bomb_jpeg(data, width, height):
    at = data.find(b"\xff\xc0")
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_decompression_bomb_is_rejected_by_its_header_before_allocation(encode, kind):
    data = bomb_png(20_000, 20_000) if kind == "PNG" else bomb_jpeg(encode("JPEG"), 20_000, 20_000)
    fails(data, match="too large|20000 x 20000")  # what is loaded once is loaded
    tracemalloc.start()
    try:
        error = fails(data, match="too large|20000 x 20000 pixels, expected at most 50,000,000")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert isinstance(error, BadRequest)
    assert error.code == "undecodable"


def test_the_maximum_size_of_an_image_is_a_parameter(encode):
    assert DecodeMat(max_pixels=90 * 67)(encode("PNG"), {}).shape == (67, 90, 3)
    fails(encode("PNG"), match="90 x 67 pixels, expected at most 6,029", max_pixels=90 * 67 - 1)
    fails(encode("JPEG"), match="90 x 67 pixels, expected at most 6,029", max_pixels=90 * 67 - 1)
    fails(encode("BMP"), match="90 x 67 pixels, expected at most 6,029", max_pixels=90 * 67 - 1)
    with pytest.raises(ConfigError, match="max_pixels = 0, expected at least 1"):
        DecodeMat(max_pixels=0)


# ---- decoders


def test_without_simplejpeg_opencv_decodes(encode, monkeypatch):
    images.library.cache_clear()
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    try:
        assert np.array_equal(DecodeMat()(encode("JPEG"), {}), DecodeMat(decoder="opencv")(encode("JPEG"), {}))
        with pytest.raises(ConfigError, match=r"simplejpeg.*not installed: pip install 'opencv-python-headless"):
            DecodeMat(decoder="simplejpeg")
    finally:
        images.library.cache_clear()


def test_other_threads_run_while_an_image_is_decoded():
    """A counting thread makes progress while another decodes one large image."""
    _, jpeg = cv2.imencode(".jpg", np.zeros((5000, 5000, 3), np.uint8))
    data, op, done = jpeg.tobytes(), DecodeMat(), threading.Event()

    def work():
        for _ in range(3):
            op(data, {})
        done.set()

    thread = threading.Thread(target=work)
    counted = 0
    thread.start()
    while not done.wait(0.001):
        counted += 1
    thread.join()
    assert counted > 3  # once a decode at the most, if it held the lock


# ---- tensors


@pytest.mark.parametrize(
    ("data_format", "shape"), [("nchw", (1, 3, 67, 90)), ("nhwc", (1, 67, 90, 3)), ("hwc", (67, 90, 3))]
)
def test_a_decoded_tensor_is_rgb_by_default(encode, rgb, data_format, shape):
    fields = {}
    tensor = DecodeTensor(data_format=data_format)(encode("PNG"), fields)
    assert fields == {"color": "rgb", "data_format": data_format}
    assert tensor.shape == shape
    image = tensor[0].transpose(1, 2, 0) if data_format == "nchw" else tensor.reshape(67, 90, 3)
    assert np.array_equal(image, rgb)
    assert np.array_equal(DecodeTensor(color="bgr")(encode("PNG"), {})[0, ::-1].transpose(1, 2, 0), rgb)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_a_tensor_of_a_jpeg_has_the_colours_of_its_mat(encode, decoder, mode):
    data = encode("JPEG", mode)
    tensor = DecodeTensor(decoder=decoder)(data, {})
    assert np.array_equal(tensor[0].transpose(1, 2, 0)[:, :, ::-1], DecodeMat()(data, {}))


def jpeg(height, width):
    _, data = cv2.imencode(".jpg", picture(height, width, 3))
    return data.tobytes()


@pytest.mark.parametrize("decoder", ["opencv", "simplejpeg"])
@pytest.mark.parametrize(
    ("size", "wanted", "found"),
    [
        ((100, 200), (50, 100), (50, 100)),
        ((100, 200), (51, 100), (100, 200)),
        ((101, 201), (51, 101), (51, 101)),
        ((400, 200), (50, 50), (100, 50)),
        ((400, 400), (51, 50), (100, 100)),
        ((400, 400), (50, 50), (50, 50)),
        ((900, 900), (3, 3), (113, 113)),
        ((40, 30), (50, 10), (40, 30)),
    ],
)
def test_a_jpeg_is_never_decoded_below_the_target_size(decoder, size, wanted, found):
    mat = DecodeMat(decoder=decoder, scale_h=wanted[0], scale_w=wanted[1])(jpeg(*size), {})
    assert mat.shape == (*found, 3)


@pytest.mark.parametrize("decoder", ["opencv", "simplejpeg"])
def test_a_rotated_image_is_scaled_by_its_stored_sides(decoder):
    import io

    marks, out = Image.Exif(), io.BytesIO()
    marks[0x0112] = 6
    Image.fromarray(picture(200, 400, 1)).save(out, "JPEG", exif=marks)
    assert DecodeMat(decoder, scale_h=200, scale_w=100)(out.getvalue(), {}).shape == (200, 100, 3)
    assert DecodeMat(decoder, scale_h=100, scale_w=200)(out.getvalue(), {}).shape == (400, 200, 3)


def test_only_jpegs_are_scaled(encode):
    assert DecodeMat(scale_h=8, scale_w=8)(encode("PNG"), {}).shape == (67, 90, 3)


def test_both_sides_must_be_set_or_neither():
    with pytest.raises(ConfigError, match="scale_h = 224 and scale_w = 0: set both"):
        DecodeMat(scale_h=224)


def test_reduced_decoding_logs_its_accuracy_at_load(caplog):
    caplog.set_level(logging.INFO, "penstock.pipeline")
    DecodeMat().load("cpu")
    assert DecodeMat().note() == ""
    assert not caplog.records
    op = DecodeMat(scale_h=32, scale_w=32)
    op.load("cpu")
    assert op.note() in caplog.text
    assert f"{accuracy(32, 32).mean:.1f} of 255" in caplog.text


def test_the_measure_is_of_the_size_of_that_on_photographs():
    """Generated pictures are between a busy and a blurred photograph."""
    datasets = pytest.importorskip("sklearn.datasets")
    found = []
    for image in datasets.load_sample_images().images:
        _, data = cv2.imencode(".jpg", image[:, :, ::-1])
        full, scaled = (
            cv2.resize(op(data.tobytes(), {}), (160, 160)).astype(int)
            for op in (DecodeMat(), DecodeMat(scale_h=160, scale_w=160))
        )
        found.append(np.abs(full - scaled).mean())
    measured = accuracy(160, 160)
    assert min(found) < measured.mean < max(found)
    assert measured.within > measured.mean


def test_a_picture_is_the_same_for_the_same_seed():
    assert np.array_equal(picture(20, 30, 1), picture(20, 30, 1))
    assert not np.array_equal(picture(20, 30, 1), picture(20, 30, 2))


# ---- on a GPU, which a decoder on the CPU stands for


def on_gpu(monkeypatch, decode, **options):
    """A DecodeTensor in a node on a GPU, whose JPEGs `decode` turns into an array; others stay on the CPU."""
    torch = pytest.importorskip("torch")
    made = {"json": lambda module, torch, device: lambda data: torch.from_numpy(decode(data))}
    monkeypatch.setattr("penstock.pipeline.ops.decode.GPU_DECODERS", made)
    op = DecodeTensor(**options)
    op.load("cuda:0")
    op._device = "cpu"
    return op, torch


def flat_rgb(data):
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)[
        :, :, ::-1
    ].copy()


@pytest.mark.parametrize("color", ["rgb", "bgr"])
@pytest.mark.parametrize("data_format", ["nchw", "hwc", "nhwc"])
def test_jpegs_of_a_gpu_are_tensors_with_the_pixels_of_the_cpu(monkeypatch, rgb, color, data_format):
    op, torch = on_gpu(monkeypatch, flat_rgb, color=color, data_format=data_format)
    for orientation in range(1, 9):
        marks = Image.Exif()
        marks[0x0112] = orientation
        out = io.BytesIO()
        Image.fromarray(rgb).save(out, "JPEG", exif=marks)
        tensor, fields = op(out.getvalue(), (fields := {})), fields
        want = DecodeTensor(color, data_format, decoder="opencv")(out.getvalue(), {})
        assert isinstance(tensor, torch.Tensor)
        assert np.array_equal(tensor.numpy(), want)
        assert fields == {"color": color, "data_format": data_format}


def test_what_a_gpu_does_not_decode_is_decoded_by_the_cpu_and_is_there_too(monkeypatch, encode):
    def refuse(data):
        raise RuntimeError("no such sampling factors")

    with monkeypatch.context() as patch:
        op, torch = on_gpu(patch, flat_rgb)
    op._decode_jpeg = refuse
    for file in (encode("JPEG"), encode("PNG"), encode("JPEG", "CMYK")):
        tensor = op(memoryview(file), {})
        assert isinstance(tensor, torch.Tensor)
        assert np.array_equal(tensor.numpy(), DecodeTensor()(file, {}))
    with pytest.raises(DecodeError, match="truncated"):
        op(encode("JPEG")[:-40], {})

    def full(data):
        raise RuntimeError("CUDA out of memory")

    op._decode_jpeg = full
    with pytest.raises(RuntimeError, match="out of memory"):
        op(encode("JPEG"), {})


def test_a_decoder_that_fails_at_load_is_not_used(monkeypatch, encode, caplog):
    def fails(data):
        raise RuntimeError("built without nvJPEG")

    op, _ = on_gpu(monkeypatch, fails)
    assert "gpu_decoder_fails module=json device=cuda:0" in caplog.text
    assert "built without nvJPEG" in caplog.text
    assert np.array_equal(op(encode("JPEG"), {}).numpy(), DecodeTensor()(encode("JPEG"), {}))


def test_the_libraries_are_asked_for_rgb_without_their_own_rotation(encode):
    torch = pytest.importorskip("torch")
    asked = []

    class Library:
        class ImageReadMode:
            RGB = "rgb"

        class ColorSpec:
            SRGB = "srgb"

        def decode_jpeg(self, data, mode, device):
            asked.append((bytes(data.numpy()), mode, device))
            return torch.from_numpy(flat_rgb(asked[-1][0]).transpose(2, 0, 1).copy())

        def DecodeParams(self, **params):
            return params

        def Decoder(self, device_id):
            asked.append(device_id)
            return self

        def decode(self, data, params):
            asked.append(params)
            return flat_rgb(data) if data != b"other" else None

    file = encode("JPEG")
    first = GPU_DECODERS["torchvision.io"](Library(), torch, "cuda:1")(file)
    assert asked == [(file, "rgb", "cuda:1")]
    second = GPU_DECODERS["nvidia.nvimgcodec"](Library(), torch, "cpu:3")
    assert np.array_equal(second(file).numpy(), first.numpy())
    assert asked[1:] == [3, {"apply_exif_orientation": False, "color_spec": "srgb"}]
    with pytest.raises(RuntimeError, match="nvImageCodec"):
        second(b"other")


@pytest.mark.gpu
def test_a_gpu_decodes_nearly_the_pixels_of_the_cpu(encode):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    op = DecodeTensor()
    op.load("cuda:0")
    tensor = op(encode("JPEG", subsampling=0), {})
    assert tensor.device.type == "cuda"
    assert difference(tensor.cpu().numpy(), DecodeTensor()(encode("JPEG", subsampling=0), {})) <= 4
