"""Generates drawings with known figures: people and animals in a few strokes, on paper, among other objects.

`python drawings.py FOLDER --count 20` writes some as JPEG files, and their ground truth as FOLDER.json. The same seed
gives the same pictures. A figure's mask is its silhouette: the area inside its strokes, and the strokes with a width of
at least a twelfth of the figure's height. Its box is the mask's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from pictures import CLASSES, Pixels
from things import OTHERS, Points, Random, Stroke, animal, person

SIZES = ((640, 480), (480, 640), (800, 600), (512, 512), (960, 720))  # width and height of written pictures
QUALITY = 90  # of JPEG files
LIMB = 0.08  # minimum width of a mask's parts, as a fraction of the figure's height
SHIFT = 4  # fractional bits of OpenCV's drawing coordinates


@dataclass(frozen=True)
class Drawing:
    """A picture `[height, width, 3]`, blue first, and its figures.

    `labels [n]` are indices of CLASSES, `boxes [n, 4]` are left, top, right and bottom in pixels, and
    `masks [n, height, width]` are true inside a figure.
    """

    pixels: Pixels
    labels: NDArray[np.int64]
    boxes: NDArray[np.float64]
    masks: NDArray[np.bool_]


def draw(random: Random, width: int, height: int) -> Drawing:
    """A drawing with up to four figures and up to four other objects."""
    pixels = paper(random, width, height)
    ink = _ink(random, pixels)
    taken: list[NDArray[np.float64]] = []
    labels, boxes, masks = [], [], []
    for _ in range(int(random.choice(5, p=(0.06, 0.34, 0.3, 0.2, 0.1)))):
        label = int(random.integers(len(CLASSES)))
        tall = min(width, height) * float(random.uniform(0.24, 0.8 if not taken else 0.5))
        strokes = _placed(random, (person, animal)[label](random), tall, (width, height), taken, LIMB * tall / 2)
        if strokes is None:
            continue
        thick = max(1.0, tall * float(random.uniform(0.008, 0.035)))
        mask = _silhouette(strokes, (height, width), max(thick, LIMB * tall))
        labels.append(label)
        boxes.append(_bounds(mask))
        masks.append(mask)
        taken.append(boxes[-1])
        _render(random, pixels, strokes, ink if random.random() < 0.7 else _ink(random, pixels), thick)
    for _ in range(int(random.integers(0, 5))):
        tall = min(width, height) * float(random.uniform(0.1, 0.4))
        kind: Callable[[Random], list[Stroke]] = OTHERS[int(random.integers(len(OTHERS)))]
        strokes = _placed(random, kind(random), tall, (width, height), taken, 0.0)
        if strokes is not None:
            thick = max(1.0, tall * float(random.uniform(0.01, 0.05)))
            taken.append(_around(strokes))
            _render(random, pixels, strokes, ink if random.random() < 0.5 else _ink(random, pixels), thick)
    return Drawing(
        pixels=_photographed(random, pixels),
        labels=np.array(labels, np.int64),
        boxes=np.array(boxes, np.float64).reshape(-1, 4),
        masks=np.array(masks, np.bool_).reshape(-1, height, width),
    )


# ---- paper and ink


def paper(random: Random, width: int, height: int) -> Pixels:
    """An empty sheet of one colour with blotches: plain, ruled or squared."""
    colour = float(random.uniform(170, 255)) - random.uniform(0, 30, 3) * (random.random() < 0.6)
    blotches = (random.uniform(0, 6) * random.normal(0, 1, (8, 8))).astype(np.float32)
    sheet = colour.astype(np.float32) + cv2.resize(blotches, (width, height), interpolation=cv2.INTER_CUBIC)[..., None]
    ruling = int(random.integers(4))  # half of all sheets have none
    if ruling >= 2:
        gap = max(5, round(min(width, height) * float(random.uniform(0.03, 0.08))))
        sheet[::gap] -= random.uniform(10, 60, 3).astype(np.float32)
        if ruling == 3:
            sheet[:, ::gap] -= random.uniform(10, 60, 3).astype(np.float32)
    return np.clip(sheet, 0, 255).astype(np.uint8)


def _ink(random: Random, pixels: Pixels) -> Points:
    """A colour of pencil, ball pen or crayon that contrasts with this paper."""
    if random.random() < 0.5:
        return np.full(3, random.uniform(0, 80))
    ground = pixels.mean()
    while True:
        colour = random.uniform(0, 220, 3)
        if ground - colour.mean() > 60:
            return colour


def _photographed(random: Random, pixels: Pixels) -> Pixels:
    """The sheet as a camera sees it, with light from one side, some blur and noise."""
    height, width = pixels.shape[:2]
    light = random.uniform(0.75, 1.1, (2, 2)).astype(np.float32)
    seen = pixels * cv2.resize(light, (width, height), interpolation=cv2.INTER_LINEAR)[..., None]
    if random.random() < 0.4:
        seen = cv2.GaussianBlur(seen, (0, 0), float(random.uniform(0.4, 1.0)) * max(width, height) / 320)
    seen += random.standard_normal((height, width, 1), np.float32) * np.float32(random.uniform(0, 6))
    return np.clip(seen, 0, 255).astype(np.uint8)


# ---- strokes on paper


def _placed(
    random: Random,
    strokes: list[Stroke],
    tall: float,
    size: tuple[int, int],
    taken: list[NDArray[np.float64]],
    margin: float,
) -> list[Stroke] | None:
    """The strokes scaled to the height `tall`, slightly rotated, at a free place on the sheet; None if it is full."""
    turn = np.radians(random.normal(0, 8))
    turned = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]) * tall
    mirror = (float(random.choice((-1, 1))) * random.uniform(0.85, 1.15), 1.0)
    strokes = [Stroke(_wobbly(random, s) * mirror @ turned, s.closed, s.filled) for s in strokes]
    box = _around(strokes)
    room = np.array(size) - (box[2:] - box[:2]) - 2 * margin - 2
    if (room <= 0).any():
        return None
    for _ in range(12):
        move = random.uniform(0, 1, 2) * room - box[:2] + margin + 1
        if all(_shared(box + np.tile(move, 2), other) < 0.06 for other in taken):
            return [Stroke(s.points + move, s.closed, s.filled) for s in strokes]
    return None


def _wobbly(random: Random, stroke: Stroke) -> Points:
    """The stroke drawn by an unsteady hand: a point per twentieth of the height, displaced by about a hundredth."""
    corners = np.concatenate([stroke.points, stroke.points[:1]]) if stroke.closed else stroke.points
    along = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(corners, axis=0).T))])
    places = np.union1d(along, np.linspace(0, along[-1], int(along[-1] * 20) + 2))
    points = np.stack([np.interp(places, along, corners[:, axis]) for axis in (0, 1)], axis=1)
    if stroke.closed:
        points = points[:-1]
    return points + random.normal(0, 0.006, points.shape) + random.normal(0, 0.01, 2)


def _render(random: Random, pixels: Pixels, strokes: list[Stroke], ink: Points, thick: float) -> None:
    """Draws the strokes on `pixels`, filled areas in a lighter colour."""
    for stroke in strokes:
        points = _fixed(stroke.points)
        if stroke.filled:
            share = float(random.uniform(0.4, 1.0))
            cv2.fillPoly(pixels, [points], (ink * share + 230 * (1 - share)).tolist(), cv2.LINE_AA, SHIFT)
        cv2.polylines(pixels, [points], stroke.closed, ink.tolist(), max(1, round(thick)), cv2.LINE_AA, SHIFT)


def _silhouette(strokes: list[Stroke], shape: tuple[int, int], thick: float) -> NDArray[np.bool_]:
    mask = np.zeros(shape, np.uint8)
    for stroke in strokes:
        points = _fixed(stroke.points)
        if stroke.closed:
            cv2.fillPoly(mask, [points], 1, cv2.LINE_8, SHIFT)
        cv2.polylines(mask, [points], stroke.closed, 1, max(1, round(thick)), cv2.LINE_8, SHIFT)
    return mask.astype(np.bool_)


def _fixed(points: Points) -> NDArray[np.int32]:
    return np.rint(points * (1 << SHIFT)).astype(np.int32)


def _bounds(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    down, across = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return np.array([across[0], down[0], across[-1] + 1, down[-1] + 1], np.float64)


def _around(strokes: list[Stroke]) -> NDArray[np.float64]:
    points = np.concatenate([s.points for s in strokes])
    return np.concatenate([points.min(axis=0), points.max(axis=0)])


def _shared(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """How much of the smaller box lies in the other."""
    sides = np.maximum(0, np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]))
    least = min(np.prod(one[2:] - one[:2]), np.prod(other[2:] - other[:2]))
    return float(np.prod(sides) / max(least, 1e-9))


# ---- on disk


def pictures(count: int, seed: int) -> list[Drawing]:
    """`count` drawings of the sizes in SIZES."""
    random = np.random.default_rng(seed)
    return [draw(random, *SIZES[int(random.integers(len(SIZES)))]) for _ in range(count)]


def jpeg(drawing: Drawing) -> bytes:
    """The picture as a JPEG file."""
    return bytes(cv2.imencode(".jpg", drawing.pixels, (cv2.IMWRITE_JPEG_QUALITY, QUALITY))[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    truth = {}
    for number, drawing in enumerate(pictures(options.count, options.seed)):
        name = f"drawing-{number:03d}.jpg"
        (options.folder / name).write_bytes(jpeg(drawing))
        truth[name] = {
            "classes": [CLASSES[label] for label in drawing.labels],
            "boxes": drawing.boxes.tolist(),
        }
    options.folder.with_name(options.folder.name + ".json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
