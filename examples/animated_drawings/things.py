"""Generates people, animals and other objects as strokes of a pen. All are about 1 high."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]
Random = np.random.Generator


@dataclass(frozen=True)
class Stroke:
    """A line through points `[n, 2]`, x to the right and y down: open, `closed`, or closed and `filled`."""

    points: Points
    closed: bool = False
    filled: bool = False


def person(random: Random) -> list[Stroke]:
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


def animal(random: Random) -> list[Stroke]:
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
    """A row of shapes that resemble letters."""
    letters = range(int(random.integers(3, 8)))
    return [Stroke(random.uniform(0, 1, (int(random.integers(3, 6)), 2)) * (0.5, 1) + (i * 0.7, 0)) for i in letters]


OTHERS = (_sun, _house, _tree, _flower, _cloud, _scribble, _writing)


# ---- strokes


def _line(*points: object) -> Stroke:
    return Stroke(np.array(points, np.float64))


def _shape(*corners: object, filled: bool = False) -> Stroke:
    return Stroke(np.array(corners, np.float64), closed=True, filled=filled)


def _by(point: Points, right: float, down: float) -> Points:
    """The point moved right and down."""
    return np.array([point[0] + right, point[1] + down])


def _oval(middle: object, wide: float, high: float, filled: bool = False) -> Stroke:
    turns = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    points = np.asarray(middle) + np.stack([np.cos(turns) * wide, np.sin(turns) * high], axis=1)
    return Stroke(points, closed=True, filled=filled)


def _limb(random: Random, start: Points, degrees: float, long: float, bend: float) -> Stroke:
    """Two segments of length `long` from `start`; 0 degrees point down, 90 to the right."""
    first = np.radians(degrees)
    second = first + np.radians(random.uniform(-bend, bend))
    joint = start + long * np.array([np.sin(first), np.cos(first)])
    end = joint + long * np.array([np.sin(second), np.cos(second)])
    return _line(start, joint, end)
