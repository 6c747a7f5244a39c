"""Pages of textured paper with words on them, and the truth: `python pages.py [FOLDER] [--count 20]` writes JPEGs.

The same seed gives the same page. The letters are those of Pillow's own font.
"""

from __future__ import annotations

import argparse
import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
MARGIN = 9  # pixels between two words, at least


class Word(NamedTuple):
    """A word and its corners, float32 `[4, 2]` in pixels: upper left, upper right, lower right, lower left."""

    text: str
    corners: np.ndarray


def page(seed: int, words: int, height: int = 480, width: int = 640) -> tuple[np.ndarray, list[Word]]:
    """A page uint8 `[height, width, 3]` (BGR) with about this many words: fewer if they do not fit."""
    rng = np.random.default_rng(seed)
    image = paper(rng, height, width)
    taken = np.zeros((height, width), np.uint8)
    found: list[Word] = []
    for _ in range(60 * words):
        if len(found) == words:
            break
        text = "".join(rng.choice(list(LETTERS), rng.integers(3, 9 if words < 100 else 6)))
        mask = written(text, int(rng.integers(16, 31 if words < 100 else 21)))
        place = rng.uniform((0, 0), (width, height)), rng.normal(0, 2.5)
        matrix, corners = placed(mask, *place)
        inside = corners.min() > 4 and (corners.max(0) < (width - 4, height - 4)).all()
        if not inside or cv2.fillConvexPoly(np.zeros_like(taken), corners.astype(np.int32), 1)[taken > 0].any():
            continue
        wide = np.mean(corners, 0) + (corners - np.mean(corners, 0)) * (1 + 2 * MARGIN / np.ptp(corners, 0))
        cv2.fillConvexPoly(taken, wide.astype(np.int32), 1)
        write(rng, image, mask, matrix, corners)
        found.append(Word(text, corners))
    image = image + rng.normal(0, rng.uniform(1, 7), image.shape)
    return image.clip(0, 255).astype(np.uint8), found


def paper(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Paper without words: stains, fibres and ruled lines. float32 `[height, width, 3]`."""
    image = np.full((height, width, 3), rng.uniform(165, 250, 3), np.float32)
    for size in (160, 40, 8):
        grain = rng.normal(0, rng.uniform(1, 7), (height // size + 2, width // size + 2, 1)).astype(np.float32)
        image += cv2.resize(grain, (width, height), interpolation=cv2.INTER_CUBIC)[:, :, None]
    if rng.random() < 0.4:
        image[rng.integers(20) :: rng.integers(24, 60)] -= rng.uniform(10, 40)
    for x, y in rng.uniform((0, 0), (width, height), (int(rng.integers(12)), 2)):
        end = rng.normal((x, y), 60)
        cv2.line(image, (int(x), int(y)), (int(end[0]), int(end[1])), [float(v) for v in rng.uniform(90, 200, 3)])
    return image


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def written(text: str, size: int) -> np.ndarray:
    """The ink of a word, float32 `[height, width]`, 0 to 1, with a border of a sixth of the size."""
    left, top, right, bottom = (int(v) for v in _font(size).getbbox(text))
    border = size // 6 + 1
    image = Image.new("L", (right - left + 2 * border, bottom - top + 2 * border))
    ImageDraw.Draw(image).text((border - left, border - top), text, fill=255, font=_font(size))
    return np.asarray(image, np.float32) / 255


def placed(mask: np.ndarray, centre: np.ndarray, degrees: float) -> tuple[np.ndarray, np.ndarray]:
    """The affine matrix that turns a word and puts it at its place, and its corners there."""
    height, width = mask.shape
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 1.0)
    matrix[:, 2] += centre - (width / 2, height / 2)
    corners = np.array([(0, 0, 1), (width, 0, 1), (width, height, 1), (0, height, 1)])
    return matrix, (corners @ matrix.T).astype(np.float32)


def write(
    rng: np.random.Generator, image: np.ndarray, mask: np.ndarray, matrix: np.ndarray, corners: np.ndarray
) -> None:
    """Puts a word on a page, half of them on a label of another color."""
    left, top = np.floor(corners.min(0)).astype(int)
    right, bottom = np.ceil(corners.max(0)).astype(int) + 1
    local = matrix - np.array([(0, 0, left), (0, 0, top)])
    part, size = image[top:bottom, left:right], (int(right - left), int(bottom - top))
    if rng.random() < 0.5:
        label = cv2.warpAffine(np.ones_like(mask), local, size, flags=cv2.INTER_LINEAR)[: len(part), : part.shape[1]]
        part += label[:, :, None] * rng.uniform(-45, 5, 3).astype(np.float32)
    ink = cv2.warpAffine(mask, local, size, flags=cv2.INTER_LINEAR)[: len(part), : part.shape[1], None]
    part += ink * rng.uniform(0.75, 1) * (rng.uniform(0, 110, 3).astype(np.float32) - part)


def jpeg(image: np.ndarray) -> bytes:
    """The page as a JPEG."""
    return cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()


def some(count: int, seed: int = 1_000_000) -> list[tuple[bytes, list[Word]]]:
    """Pages of 1 to 30 words as JPEGs, with their truth; none of them takes part in training."""
    made = (page(seed + n, 1 + n * 7 % 30) for n in range(count))
    return [(jpeg(image), words) for image, words in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("pages"))
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    truth = {}
    for n, (data, words) in enumerate(some(given.count)):
        name = f"{n:04}.jpg"
        (given.folder / name).write_bytes(data)
        truth[name] = [{"text": word.text, "corners": word.corners.round(1).tolist()} for word in words]
    (given.folder / "truth.json").write_text(json.dumps(truth, indent=1))
    print(f"{given.count} pages in {given.folder}")


if __name__ == "__main__":
    main()
