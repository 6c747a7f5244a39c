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

from penstock.bulk.pixels import FrameConverter, jpeg_encoder
from penstock.bulk.types import Pixels
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
