"""The clips of the captioning benchmark, generated once and cached in `~/.cache/penstock-benchmarks`.

Each clip pans over a picture with the statistics of a photograph: a spectrum that falls as 1/f in three correlated
colours, and objects with hard edges. x264 at crf 23 produces about the bit rates of real footage.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import av
import cv2
import numpy as np

FRAMES = 901
SIZES = {270: (480, 270), 360: (640, 360), 720: (1280, 720), 1080: (1920, 1080)}
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "video_captioning"
VERSION = 1  # version of the drawings; each version has its own folder


def folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = cache / "penstock-benchmarks" / f"captioning-{VERSION}"
    found.mkdir(parents=True, exist_ok=True)
    return found


def pan(height: int) -> Path:
    """A clip of 901 frames of this height, generated if it is missing."""
    path = folder() / f"pan-{height}.mp4"
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        _write(path, _frames(SIZES[height]), SIZES[height])
    return path


def scenes(height: int) -> Path:
    """A clip of 901 numbered frames, in the style that the tiny captioner knows."""
    path = folder() / f"scenes-{height}.mp4"
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        sys.path.insert(0, str(EXAMPLE))
        import make_videos

        part = path.with_suffix(".part.mp4")
        make_videos.make_clip(part, FRAMES, SIZES[height])
        part.rename(path)
    return path


def _frames(size: tuple[int, int]) -> Iterator[np.ndarray]:
    width, height = size
    picture = _picture(int(width * 1.4), int(height * 1.4))
    for t in np.linspace(0, 1, FRAMES):
        zoom = 1.1 + 0.1 * np.sin(5 * t)
        x = 0.2 * width * (1 + np.sin(9 * t))
        y = 0.2 * height * (1 + np.cos(7 * t))
        matrix = np.array([[zoom, 0, x - 0.1 * width], [0, zoom, y - 0.1 * height]], np.float32)
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        yield cv2.warpAffine(picture, matrix, size, flags=flags, borderMode=cv2.BORDER_REFLECT)


def _picture(width: int, height: int) -> np.ndarray:
    """`[height, width, 3]` uint8."""
    random = np.random.default_rng(1)
    distance = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    distance[0, 0] = 1
    shared, *own = (
        np.fft.irfft2(np.fft.rfft2(random.standard_normal((height, width))) / distance**1.25, (height, width))
        for _ in range(4)
    )
    planes = [128 + 42 * (0.8 * shared / shared.std() + 0.35 * one / one.std()) for one in own]
    picture = np.ascontiguousarray(np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8))
    for _ in range(60):
        at = random.integers(0, (width, height))
        corners = at + random.normal(0, 0.06 * height, (5, 2))
        colour = random.integers(20, 235, 3).tolist()
        texture = picture.copy()
        cv2.fillPoly(texture, [corners.astype(np.int32)], colour, cv2.LINE_AA)
        picture = cv2.addWeighted(picture, 0.35, texture, 0.65, 0)
    return picture


def _write(path: Path, frames: Iterator[np.ndarray], size: tuple[int, int]) -> None:
    part = path.with_suffix(".part.mp4")
    with av.open(str(part), "w") as container:
        stream = container.add_stream("libx264", rate=30, options={"crf": "23", "preset": "medium"})
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    part.rename(path)
