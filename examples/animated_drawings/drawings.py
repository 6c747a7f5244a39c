"""Drawings whose figures are known: people and animals in a few strokes, on paper, beside other things.

`python drawings.py FOLDER --count 20` writes some as JPEG files, and what is on them as `truth.json`. The same seed
draws the same pictures. A figure's mask is its silhouette: what its strokes enclose, and its strokes as thick as a
twelfth of the figure's height at least. Its box is that of the mask.
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

CLASSES = ("person", "animal")
SIZES = ((640, 480), (480, 640), (800, 600), (512, 512), (960, 720))  # of the pictures on disk: width, height
QUALITY = 90  # of their JPEG
LIMB = 0.08  # the thinnest that a part of a mask is, as a part of the figure's height
SHIFT = 4  # OpenCV draws with this many bits behind the point

Pixels = NDArray[np.uint8]
Points = NDArray[np.float64]
Random = np.random.Generator


@dataclass(frozen=True)
class Stroke:
    """A line through points `[n, 2]`, x and y; `filled` with colour, or only `closed`, or open."""

    points: Points
    closed: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Drawing:
    """A picture `[height, width, 3]`, blue first, and its figures: `labels [n]` are places in CLASSES, `boxes [n, 4]`
    are left, top, right and bottom in pixels, `masks [n, height, width]` are true where a figure is."""

    pixels: Pixels
    labels: NDArray[np.int64]
    boxes: NDArray[np.float64]
    masks: NDArray[np.bool_]


def draw(random: Random, width: int, height: int) -> Drawing:
    """A drawing of up to four figures and up to four other things."""
    pixels = paper(random, width, height)
    ink = _ink(random, pixels)
    taken: list[NDArray[np.float64]] = []
    labels, boxes, masks = [], [], []
    for _ in range(int(random.choice(5, p=(0.06, 0.34, 0.3, 0.2, 0.1)))):
        label = int(random.integers(len(CLASSES)))
        tall = min(width, height) * float(random.uniform(0.24, 0.8 if not taken else 0.5))
        strokes = _placed(random, (_person, _animal)[label](random), tall, (width, height), taken, LIMB * tall / 2)
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
    """An empty sheet: plain, ruled or squared, of one colour, with blotches."""
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
    """A colour that is seen on this paper: pencil, ball pen or crayon."""
    if random.random() < 0.5:
        return np.full(3, random.uniform(0, 80))
    ground = pixels.mean()
    while True:
        colour = random.uniform(0, 220, 3)
        if ground - colour.mean() > 60:
            return colour


def _photographed(random: Random, pixels: Pixels) -> Pixels:
    """The sheet as a camera sees it: light from one side, some blur, noise."""
    height, width = pixels.shape[:2]
    light = random.uniform(0.75, 1.1, (2, 2)).astype(np.float32)
    seen = pixels * cv2.resize(light, (width, height), interpolation=cv2.INTER_LINEAR)[..., None]
    if random.random() < 0.4:
        seen = cv2.GaussianBlur(seen, (0, 0), float(random.uniform(0.4, 1.0)) * max(width, height) / 320)
    seen += random.standard_normal((height, width, 1), np.float32) * np.float32(random.uniform(0, 6))
    return np.clip(seen, 0, 255).astype(np.uint8)


# ---- things to draw, each about 1 high: x to the right, y down


def _person(random: Random) -> list[Stroke]:
    head = float(random.uniform(0.09, 0.17))
    neck = np.array([0.0, 2 * head])
    hip = np.array([random.normal(0, 0.03), float(random.uniform(0.52, 0.64))])
    strokes = [_oval((0, head), head * float(random.uniform(0.8, 1.1)), head, filled=random.random() < 0.15)]
    shoulder = neck + (hip - neck) * float(random.uniform(0.05, 0.35))
    half = float(random.uniform(0.07, 0.16))
    body = int(random.integers(5))
    if body <= 1:
        strokes.append(_line(neck, hip))
    elif body == 2:  # a dress
        strokes.append(
            _shape(neck, _by(hip, half * 1.5, 0.08), _by(hip, -half * 1.5, 0.08), filled=random.random() < 0.3)
        )
    elif body == 3:  # a box
        corners = _by(neck, -half, 0), _by(neck, half, 0), _by(hip, half, 0), _by(hip, -half, 0)
        strokes.append(_shape(*corners, filled=random.random() < 0.3))
    else:
        strokes.append(_oval((neck + hip) / 2, half, (hip[1] - neck[1]) / 2, filled=random.random() < 0.3))
    wide = 0.0 if body <= 1 else half * 0.7
    for side in (-1, 1):
        strokes.append(_limb(random, _by(shoulder, side * wide, 0), side * random.uniform(20, 160), 0.17, bend=50))
        strokes.append(
            _limb(random, _by(hip, side * wide * 0.7, 0), side * random.uniform(4, 40), (1 - hip[1]) / 2, bend=20)
        )
    if random.random() < 0.5:
        strokes += [_oval((side * head * 0.4, head * 0.8), 0.013, 0.013, filled=True) for side in (-1, 1)]
        strokes.append(_line((-head * 0.35, head * 1.4), (0, head * 1.55), (head * 0.35, head * 1.4)))
    if random.random() < 0.4:
        across = np.linspace(-0.9, 0.9, int(random.integers(3, 9))) * head
        tops = head - np.sqrt(np.maximum(0, head**2 - across**2))
        long = float(random.uniform(0.02, 0.07))
        strokes += [_line((x, top), (x * 1.3, top - long)) for x, top in zip(across, tops, strict=True)]
    return strokes


def _animal(random: Random) -> list[Stroke]:
    long, half = float(random.uniform(0.35, 0.6)), float(random.uniform(0.09, 0.2))
    middle = float(random.uniform(0.5, 0.6))
    front = float(random.choice((-1, 1)))
    head = float(random.uniform(0.1, 0.16))
    strokes = []
    if random.random() < 0.25:
        half = 0.02
        strokes.append(_line((-long, middle), (long, middle)))
    elif random.random() < 0.5:
        strokes.append(_oval((0, middle), long, half, filled=random.random() < 0.25))
    else:
        corners = (-long, middle - half), (long, middle - half), (long, middle + half), (-long, middle + half)
        strokes.append(_shape(*corners, filled=random.random() < 0.25))
    neck = np.array([front * long * 0.85, middle - half * 0.6])
    face = np.array([front * (long + head * float(random.uniform(0, 0.8))), head + float(random.uniform(0.05, 0.15))])
    strokes.append(_line(neck, _by(face, 0, head)))
    strokes.append(_oval(face, head * float(random.uniform(1.0, 1.3)), head, filled=random.random() < 0.15))
    for side in (-0.6, 0.6):  # ears
        foot = _by(face, side * head, -head * 0.75)
        strokes.append(
            _shape(_by(foot, -0.04, 0), _by(foot, 0.04, 0), _by(foot, side * 0.05, -float(random.uniform(0.06, 0.14))))
        )
    for at in (-0.85, -0.6, 0.6, 0.85):
        top = np.array([at * long, middle + half * 0.8])
        strokes.append(_limb(random, top, float(random.normal(0, 10)), (1 - top[1]) / 2, bend=12))
    tail = np.array([-front * long, middle - half * 0.3])
    swing = float(random.uniform(-0.25, 0.15))
    strokes.append(_line(tail, _by(tail, -front * 0.12, swing * 0.4), _by(tail, -front * 0.2, swing)))
    if random.random() < 0.5:
        strokes.append(_oval(_by(face, front * head * 0.3, -head * 0.2), 0.015, 0.015, filled=True))
    return strokes


def _sun(random: Random) -> list[Stroke]:
    turns = np.arange(0, 2 * np.pi, 2 * np.pi / int(random.integers(6, 13)))
    ways = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    return [
        _oval((0.5, 0.5), 0.25, 0.25, filled=random.random() < 0.4),
        *(_line((0.5, 0.5) + way * 0.3, (0.5, 0.5) + way * 0.5) for way in ways),
    ]


def _house(random: Random) -> list[Stroke]:
    wide = float(random.uniform(0.6, 1.2))
    door = float(random.uniform(0.1, wide - 0.3))
    return [
        _shape((0, 0.4), (wide, 0.4), (wide, 1), (0, 1), filled=random.random() < 0.2),
        _shape((-0.05, 0.4), (wide / 2, 0), (wide + 0.05, 0.4), filled=random.random() < 0.2),
        _shape((door, 0.7), (door + 0.2, 0.7), (door + 0.2, 1), (door, 1)),
    ]


def _tree(random: Random) -> list[Stroke]:
    filled = random.random() < 0.3
    crown = (
        _oval((0.3, 0.3), 0.3, 0.3, filled=filled)
        if random.random() < 0.5
        else _shape((0, 0.65), (0.3, 0), (0.6, 0.65), filled=filled)
    )
    return [_shape((0.24, 0.55), (0.36, 0.55), (0.36, 1), (0.24, 1), filled=filled), crown]


def _flower(random: Random) -> list[Stroke]:
    turns = np.arange(0, 2 * np.pi, 2 * np.pi / int(random.integers(5, 8)))
    petals = [_oval((0.3 + np.cos(t) * 0.2, 0.3 + np.sin(t) * 0.2), 0.1, 0.1) for t in turns]
    return [_line((0.3, 0.42), (0.3 + random.normal(0, 0.04), 1)), _oval((0.3, 0.3), 0.11, 0.11, filled=True), *petals]


def _cloud(random: Random) -> list[Stroke]:
    turns = np.linspace(0, 2 * np.pi, 80, endpoint=False)
    away = 1 + 0.18 * np.abs(np.sin(turns * int(random.integers(3, 6))))
    return [Stroke(np.stack([0.8 + 0.7 * away * np.cos(turns), 0.5 + 0.4 * away * np.sin(turns)], axis=1), closed=True)]


def _scribble(random: Random) -> list[Stroke]:
    return [Stroke(np.cumsum(random.normal(0, 0.12, (int(random.integers(10, 60)), 2)), axis=0))]


def _writing(random: Random) -> list[Stroke]:
    """Something like letters, in a row."""
    letters = range(int(random.integers(3, 8)))
    return [Stroke(random.uniform(0, 1, (int(random.integers(3, 6)), 2)) * (0.5, 1) + (i * 0.7, 0)) for i in letters]


OTHERS = (_sun, _house, _tree, _flower, _cloud, _scribble, _writing)


# ---- strokes


def _line(*points: object) -> Stroke:
    return Stroke(np.array(points, np.float64))


def _shape(*corners: object, filled: bool = False) -> Stroke:
    return Stroke(np.array(corners, np.float64), closed=True, filled=filled)


def _by(point: Points, right: float, down: float) -> Points:
    """The point that lies beside another one."""
    return np.array([point[0] + right, point[1] + down])


def _oval(middle: object, wide: float, high: float, filled: bool = False) -> Stroke:
    turns = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    points = np.asarray(middle) + np.stack([np.cos(turns) * wide, np.sin(turns) * high], axis=1)
    return Stroke(points, closed=True, filled=filled)


def _limb(random: Random, start: Points, degrees: float, long: float, bend: float) -> Stroke:
    """Two parts of length `long` from `start`; 0 degrees hang down, 90 point to the right."""
    first = np.radians(degrees)
    second = first + np.radians(random.uniform(-bend, bend))
    joint = start + long * np.array([np.sin(first), np.cos(first)])
    end = joint + long * np.array([np.sin(second), np.cos(second)])
    return _line(start, joint, end)


def _placed(
    random: Random,
    strokes: list[Stroke],
    tall: float,
    size: tuple[int, int],
    taken: list[NDArray[np.float64]],
    margin: float,
) -> list[Stroke] | None:
    """The strokes as tall as that, turned a little, at a free place of the sheet; None where there is none."""
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
    """The points of a hand that does not draw straight: one each twentieth of the height, and off by a hundredth."""
    corners = np.concatenate([stroke.points, stroke.points[:1]]) if stroke.closed else stroke.points
    along = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(corners, axis=0).T))])
    places = np.union1d(along, np.linspace(0, along[-1], int(along[-1] * 20) + 2))
    points = np.stack([np.interp(places, along, corners[:, axis]) for axis in (0, 1)], axis=1)
    if stroke.closed:
        points = points[:-1]
    return points + random.normal(0, 0.006, points.shape) + random.normal(0, 0.01, 2)


def _render(random: Random, pixels: Pixels, strokes: list[Stroke], ink: Points, thick: float) -> None:
    """Draws on `pixels`, what is filled in a lighter colour."""
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
    """So many drawings of the sizes that lie on disk."""
    random = np.random.default_rng(seed)
    return [draw(random, *SIZES[int(random.integers(len(SIZES)))]) for _ in range(count)]


def jpeg(drawing: Drawing) -> bytes:
    """The picture as a file."""
    return bytes(cv2.imencode(".jpg", drawing.pixels, (cv2.IMWRITE_JPEG_QUALITY, QUALITY))[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the pictures")
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
    (options.folder / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main()
