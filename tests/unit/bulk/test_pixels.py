"""The pixels of frames."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import pytest

from penstock.bulk import decode as decode_module
from penstock.bulk import pixels as pixels_module
from penstock.bulk.decode import BlockPool, read_chunks
from penstock.bulk.pixels import DifferenceHash, FrameConverter, jpeg_encoder, tone_mapped
from penstock.bulk.types import Pixels, ReadPlan, Video
from penstock.errors import ConfigError
from support.videos import make_clip, number_of, picture

SIZE = (320, 192)


def first(path: Path, number: int = 0) -> Any:
    with av.open(str(path)) as container:
        for place, shown in enumerate(container.decode(video=0)):
            if place == number:
                return shown
    raise AssertionError


def painted(shown: Any, pixels: Pixels) -> np.ndarray[Any, Any]:
    painter = FrameConverter(pixels)
    height, width = painter.size(shown)
    into = np.full((height, width, 3), 99, np.uint8)
    painter.convert(shown, into)
    return into


def smooth(width: int, height: int, low: int = 16) -> np.ndarray[Any, Any]:
    """Two gradients, which scaling hardly changes."""
    across, down = np.arange(width) / width, np.arange(height)[:, None] / height
    planes = [low + 200 * across + 0 * down, low + 200 * down + 0 * across, 120 + 0 * across + 0 * down]
    return np.stack([np.broadcast_to(p, (height, width)) for p in planes], -1).astype(np.uint8)


def frame_of(rgb: np.ndarray[Any, Any], pix_fmt: str = "yuv420p") -> Any:
    return av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(format=pix_fmt)


@pytest.mark.parametrize("kernel", ["fast", "exact"])
@pytest.mark.parametrize("size", [(224, 224), (97, 33), (64, 300)])
def test_a_frame_is_converted_to_the_requested_size(kernel: Any, size: tuple[int, int]) -> None:
    height, width = size
    into = painted(frame_of(smooth(640, 360)), Pixels(kernel=kernel, height=height, width=width))
    assert into.shape == (height, width, 3)
    difference = np.abs(into.astype(int) - smooth(width, height).astype(int))
    assert difference.mean() < 3
    assert difference.max() < 12


def test_the_exact_kernel_is_pillows_bicubic_within_a_level(tmp_path: Path) -> None:
    shown = first(make_clip(tmp_path / "a.mp4", 3, size=SIZE), 2)
    whole = shown.to_ndarray(format="rgb24", threads=1)
    expected = np.asarray(PIL.Image.fromarray(whole).resize((96, 64), PIL.Image.Resampling.BICUBIC))
    into = painted(shown, Pixels(kernel="exact", height=64, width=96))
    assert np.abs(into.astype(int) - expected.astype(int)).max() <= 1


def test_source_pixels_are_the_frame_itself() -> None:
    shown = frame_of(smooth(161, 97), "yuv444p")
    into = painted(shown, Pixels(mode="source"))
    assert into.shape == (97, 161, 3)
    assert np.array_equal(into, shown.to_ndarray(format="rgb24", threads=1))


@pytest.mark.parametrize("kernel", ["fast", "exact"])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p", "yuv422p", "yuv444p10le", "nv12", "bgr24", "gbrp", "rgba"])
def test_black_white_and_red_survive_in_every_pixel_format(kernel: Any, pix_fmt: str) -> None:
    rgb = np.zeros((96, 96, 3), np.uint8)
    rgb[:, 32:64] = 255
    rgb[:, 64:, 0] = 255
    into = painted(frame_of(rgb, pix_fmt), Pixels(kernel=kernel, height=48, width=48)).astype(int)
    for column, colour in ((8, (0, 0, 0)), (24, (255, 255, 255)), (40, (255, 0, 0))):
        assert np.abs(into[24, column] - colour).max() <= 4, (column, into[24, column])


@pytest.mark.parametrize("kernel", ["fast", "exact"])
@pytest.mark.parametrize(("degrees", "quarters"), [(0, 0), (90, 1), (180, 2), (270, 3)])
def test_a_rotated_recording_is_turned_upright(tmp_path: Path, kernel: Any, degrees: int, quarters: int) -> None:
    shown = first(make_clip(tmp_path / "a.mp4", 2, size=SIZE, rotate=degrees), 1)
    lying = shown.to_ndarray(format="rgb24", threads=1)
    assert np.array_equal(painted(shown, Pixels(mode="source")), np.rot90(lying, quarters))
    # scaled to a third shape: the viewer sees the rotation first
    into = painted(shown, Pixels(kernel=kernel, height=120, width=200))
    upright = np.rot90(into, -quarters)
    assert number_of(upright) == 1


def test_a_mirrored_recording_is_mirrored_back(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        stream.set_display_rotation(0, hflip=True)
        out.mux(stream.encode(av.VideoFrame.from_ndarray(picture(5, *SIZE), format="rgb24")))
        out.mux(stream.encode())
    shown = first(path)
    assert number_of(painted(shown, Pixels(mode="source"))[:, ::-1]) == 5
    assert number_of(painted(shown, Pixels(height=96, width=160))[:, ::-1]) == 5


def hdr(nits: float, curve: int) -> Any:
    """A grey frame of so much light, as a 10-bit camera or master stores it."""
    if curve == pixels_module.PQ:
        power = (nits / 10_000) ** 0.1593017578125
        signal = ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375
    else:
        scene = (nits / 1000) ** (1 / 1.2)
        signal = (3 * scene) ** 0.5 if scene <= 1 / 12 else 0.17883277 * np.log(12 * scene - 0.28466892) + 0.55991073
    frame = av.VideoFrame(64, 48, "yuv420p10le")
    for plane, level in zip(frame.planes, (64 + 876 * signal, 512, 512), strict=True):
        plane.update(np.full(plane.buffer_size // 2, round(level), "<u2").tobytes())
    frame.color_trc, frame.color_primaries, frame.colorspace, frame.color_range = curve, 9, 9, 1
    return frame


@pytest.mark.parametrize("kernel", ["fast", "exact"])
@pytest.mark.parametrize("curve", [pixels_module.PQ, pixels_module.HLG])
def test_hdr_is_converted_to_the_brightness_of_ordinary_video(kernel: Any, curve: int) -> None:
    def level(nits: float, **options: Any) -> int:
        into = painted(hdr(nits, curve), Pixels(kernel=kernel, height=24, width=32, **options))
        assert int(into.max()) - int(into.min()) <= 2  # grey stays grey
        return int(into[12, 16, 1])

    assert level(0, tone_map=True) == 0
    assert level(50, tone_map=True) == pytest.approx(255 * (50 / 203) ** (1 / 2.4), abs=3)  # below the knee: as it is
    levels = [level(nits, tone_map=True) for nits in (10, 50, 100, 203, 400, 700, 1000)]
    assert levels == sorted(set(levels))  # nothing below the peak is clipped
    assert levels[3] > 220
    assert levels[-1] >= 254
    assert level(203) < 195  # white looks grey without it


def test_hues_survive_tone_mapping() -> None:
    red = np.zeros((2, 2, 3), np.uint16)
    red[..., 0], red[..., 1:] = 45_000, 20_000
    mapped = tone_mapped(red, pixels_module.PQ)[0, 0].astype(int)
    assert mapped[0] > 2 * mapped[1]
    assert abs(mapped[1] - mapped[2]) < 30


def test_deinterlacing_sends_one_field_of_interlaced_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_module, "_said", set())
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=25, options={"x264-params": "tff=1", "crf": "5"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for number in range(3):
            fields = picture(number, *SIZE)
            fields[1::2] = picture(1000 + number, *SIZE)[1::2]
            out.mux(stream.encode(av.VideoFrame.from_ndarray(fields, format="rgb24")))
        out.mux(stream.encode())
    for pixels in Pixels(height=96, width=320), Pixels(height=96, width=320, deinterlace=True):
        pool, plan = BlockPool(1 << 20, 1 << 20), ReadPlan(pixels=pixels, chunk_size=8)
        (chunk,) = read_chunks(Video(str(path), "a.mkv", 0, 0), plan, pool)
        assert isinstance(chunk.pixels, np.ndarray)
        worst = [
            np.abs(shown[:20].astype(int) - picture(n, *SIZE)[:40:2]).mean() for n, shown in enumerate(chunk.pixels)
        ]
        assert max(worst) < 15 if pixels.deinterlace else min(worst) > 40
    (record,) = caplog.records
    assert record.getMessage().startswith("a.mkv is interlaced: moving edges are combs; --deinterlace sends one field")
    assert painted(frame_of(fields), Pixels(mode="source", deinterlace=True)).shape == (192, 320, 3)


@pytest.mark.parametrize("without", [None, "simplejpeg"])
def test_jpegs_have_quality_90_and_subsampled_colours(monkeypatch: pytest.MonkeyPatch, without: str | None) -> None:
    hide(monkeypatch, without)
    rgb = smooth(224, 160)
    file = jpeg_encoder()(rgb)
    image = PIL.Image.open(io.BytesIO(file))
    assert image.size == (224, 160)
    assert [layer[1:3] for layer in image.layer] == [(2, 2), (1, 1), (1, 1)]  # type: ignore[attr-defined]
    assert np.abs(np.asarray(image).astype(int) - rgb).mean() < 2
    reference = io.BytesIO()
    PIL.Image.fromarray(rgb).save(reference, "jpeg", quality=90)
    assert image.quantization == PIL.Image.open(reference).quantization  # type: ignore[attr-defined]


def hide(monkeypatch: pytest.MonkeyPatch, *names: str | None) -> None:
    """Makes libraries appear to be missing."""
    real = importlib.import_module

    def guarded(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] in names:
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", guarded)


def test_a_missing_library_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torch", "simplejpeg", "PIL")
    with pytest.raises(ConfigError, match=r"exact kernel needs torch.*--kernel fast"):
        FrameConverter(Pixels(kernel="exact", height=4, width=4))
    with pytest.raises(ConfigError, match="JPEG needs simplejpeg"):
        jpeg_encoder()
    hide(monkeypatch, "av")
    with pytest.raises(ConfigError, match="PyAV is not installed"):
        FrameConverter(Pixels())


@pytest.fixture(autouse=True)
def _threads_of_torch() -> Any:
    """Restores torch's number of threads, which the exact kernel sets to one."""
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_a_hash_ignores_size_noise_and_brightness_and_sees_another_picture() -> None:
    random = np.random.default_rng(0)
    hash_of = DifferenceHash()

    def hashed(cells: Any, scale: int, noise: float = 0.0, brighter: int = 0) -> int:
        gray = np.kron(cells, np.ones((scale, scale))) + random.normal(0, noise, (9 * scale, 16 * scale)) + brighter
        rgb = np.repeat(np.clip(gray, 0, 255).astype(np.uint8)[..., None], 3, axis=2)
        return hash_of(av.VideoFrame.from_ndarray(rgb, format="rgb24"))

    one, other = random.integers(40, 200, (2, 9, 16))
    found = hashed(one, 40)
    for scale, noise, brighter in ((20, 0.0, 0), (40, 8.0, 0), (40, 0.0, 20)):
        assert (found ^ hashed(one, scale, noise, brighter)).bit_count() <= 8
    assert (found ^ hashed(other, 40)).bit_count() > 60
    assert hashed(np.full((9, 16), 100), 40, noise=4.0) == 0
