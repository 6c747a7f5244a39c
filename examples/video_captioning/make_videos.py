"""Makes videos whose every frame has a known caption: `python make_videos.py FOLDER --clips 6 --frames 300`.

A shape moves along and changes every second and a half; the number beneath it is the frame's index modulo 1000.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from scenes import NUMBERS, Scene, caption, draw, place, sample

FRAMES_PER_LOOK = 45


def clip_scenes(frames: int, seed: int = 0) -> Iterator[Scene]:
    """The scene of each frame of the clip with this seed."""
    random = np.random.default_rng([seed, 0x5CE7E])
    across_s, down_s, *starts = random.uniform(0.004, 0.012, 2).tolist() + random.uniform(0, 2, 2).tolist()
    look = sample(random)
    for index in range(frames):
        if index and index % FRAMES_PER_LOOK == 0:
            look = sample(random)
        x, y = place(_to_and_fro(starts[0] + across_s * index), _to_and_fro(starts[1] + down_s * index), look.size)
        yield replace(look, number=index % NUMBERS, x=x, y=y)


def make_clip(
    path: Path,
    frames: int = 300,
    size: tuple[int, int] = (480, 270),
    fps: Fraction | int = 30,
    seed: int = 0,
    quality: int = 23,
) -> list[str]:
    """Writes an H.264 clip of `size` (width, height) and returns the caption of each frame; `quality` is x264's CRF."""
    captions = []
    with av.open(str(path), "w") as container:
        # With its macroblock tree, x264 does not write the same bytes every time.
        options = {"crf": str(quality), "preset": "veryfast", "x264-params": "mbtree=0"}
        stream = container.add_stream("libx264", rate=Fraction(fps), options=options)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = max(1, round(2 * fps))
        stream.codec_context.thread_count = 1
        for scene in clip_scenes(frames, seed):
            frame = av.VideoFrame.from_ndarray(draw(scene, *size), format="rgb24")
            container.mux(stream.encode(frame))
            captions.append(caption(scene))
        container.mux(stream.encode())
    return captions


def _to_and_fro(where: float) -> float:
    """A triangle wave: 0 to 1 and back while `where` goes from 0 to 2; always below 1."""
    return min(1 - abs(where % 2 - 1), 1 - 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=6)
    parser.add_argument("--frames", type=int, default=300, help="per clip")
    parser.add_argument("--size", default="480x270", help="WIDTHxHEIGHT, both even")
    parser.add_argument("--fps", type=Fraction, default=Fraction(30), help="a number or a fraction, 30000/1001")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    width, height = (int(side) for side in options.size.split("x"))
    options.folder.mkdir(parents=True, exist_ok=True)
    for index in range(options.clips):
        path = options.folder / f"clip-{index:03d}.mp4"
        make_clip(path, options.frames, (width, height), options.fps, seed=options.seed + index)
        print(f"{path}: {options.frames} frames, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
