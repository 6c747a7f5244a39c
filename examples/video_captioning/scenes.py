"""Pictures with a known caption: one coloured shape on a plain background, and a three-digit number below it.

One sentence describes a scene: ``number 0 4 2 : a large red cross at the top left on gray``. The number identifies
the frame of a video, so the captions alone reveal wrong order, loss and duplication; the other words prove that the
pixels arrived intact. Drawing needs only NumPy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

COLORS = {
    "red": (215, 40, 40),
    "green": (40, 170, 60),
    "blue": (45, 80, 220),
    "yellow": (235, 215, 50),
    "purple": (150, 50, 180),
    "orange": (240, 140, 30),
}
BACKGROUNDS = {"black": (12, 12, 12), "gray": (120, 120, 120), "white": (240, 240, 240)}
SHAPES = ("circle", "cross", "triangle")
#: Distance from a shape's centre to its edge, as a fraction of the picture's height.
SIZES = {"small": 0.115, "large": 0.19}
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
#: Numbers wrap around: frame 1000 shows 000 again.
NUMBERS = 1000

#: Top of the strip with the number, as a fraction of the height; shapes stay above it.
STRIP_TOP = 0.78
_STRIP = (30, 30, 60)
_INK = (255, 255, 255)
_ROW_EDGES = (0.28, 0.49)
_COLUMN_EDGES = (1 / 3, 2 / 3)
# No shape's centre is closer than this to an edge between two rows or columns, so its cell stays visible in 64 pixels.
_GAP = 0.022
# Three columns by five rows: each bit is 4 by 2 pixels in a picture of 64 by 64.
_DIGITS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001010010010",
    "111101111101111",
    "111101111001111",
)
_NUMBER = re.compile(r"\s*number (\d) (\d) (\d)(?: |$)")


@dataclass(frozen=True)
class Scene:
    """The content of a picture; `x` and `y` are the shape's centre as fractions of the width and height."""

    number: int
    size: str
    color: str
    shape: str
    background: str
    x: float
    y: float


def caption(scene: Scene) -> str:
    """The only correct caption of `scene`."""
    digits = " ".join(f"{scene.number % NUMBERS:03d}")
    row, column = ROWS[_cell(scene.y, _ROW_EDGES)], COLUMNS[_cell(scene.x, _COLUMN_EDGES)]
    look = f"{scene.size} {scene.color} {scene.shape}"
    return f"number {digits} : a {look} at the {row} {column} on {scene.background}"


def number_of(text: str) -> int | None:
    """The number at the beginning of a caption, 0 to 999, or None."""
    found = _NUMBER.match(text)
    return int("".join(found.groups())) if found else None


def words() -> list[str]:
    """Every word of the captions once, in a fixed order."""
    fixed = ["number", ":", "a", "at", "the", "on"]
    return [*fixed, *"0123456789", *COLORS, *BACKGROUNDS, *SHAPES, *SIZES, *ROWS, *COLUMNS]


def place(across: float, down: float, size: str) -> tuple[float, float]:
    """A shape's centre (x, y) for two numbers in [0, 1): a third of their range is one column or row each."""
    edge = SIZES[size]
    x = _spread(across, (0.11, *_COLUMN_EDGES, 0.89))
    y = _spread(down, (edge - _GAP, *_ROW_EDGES, STRIP_TOP - edge + _GAP))
    return x, y


def sample(random: np.random.Generator) -> Scene:
    """A random scene; all words of a kind are equally likely."""
    size = str(random.choice(list(SIZES)))
    x, y = place(random.random(), random.random(), size)
    return Scene(
        number=int(random.integers(NUMBERS)),
        size=size,
        color=str(random.choice(list(COLORS))),
        shape=str(random.choice(SHAPES)),
        background=str(random.choice(list(BACKGROUNDS))),
        x=x,
        y=y,
    )


def draw(scene: Scene, width: int, height: int) -> np.ndarray:
    """The picture of `scene`: uint8 [height, width, 3], RGB."""
    picture = np.empty((height, width, 3), np.uint8)
    # One row at a time: pixel by pixel would take longer than everything else.
    picture[:] = np.full((width, 3), BACKGROUNDS[scene.background], np.uint8)
    _draw_shape(picture, scene)
    strip = picture[round(STRIP_TOP * height) :]
    strip[:] = np.full((width, 3), _STRIP, np.uint8)
    for index, digit in enumerate(f"{scene.number % NUMBERS:03d}"):
        _draw_digit(strip[:, round(width * index / 3) : round(width * (index + 1) / 3)], int(digit))
    return picture


def _draw_shape(picture: np.ndarray, scene: Scene) -> None:
    height, width = picture.shape[:2]
    radius = SIZES[scene.size] * height
    center_x, center_y = scene.x * width, scene.y * height
    left, right = max(0, int(center_x - radius) - 1), min(width, int(center_x + radius) + 2)
    top, bottom = max(0, int(center_y - radius) - 1), min(height, int(center_y + radius) + 2)
    across = np.abs(np.arange(left, right, dtype=np.float32) + 0.5 - center_x)[None, :]
    down = (np.arange(top, bottom, dtype=np.float32) + 0.5 - center_y)[:, None]
    # How far inside the shape a pixel's centre is; pixels within half a pixel of the edge are blended.
    inside = _INSIDE[scene.shape](across, down, radius)
    share = np.clip(inside + 0.5, 0, 1)[..., None]
    under = picture[top:bottom, left:right]
    under[:] = np.rint(under + share * (np.array(COLORS[scene.color], np.float32) - under))


def _circle(across: np.ndarray, down: np.ndarray, radius: float) -> np.ndarray:
    return radius - np.hypot(across, down)


def _cross(across: np.ndarray, down: np.ndarray, radius: float) -> np.ndarray:
    arm = 0.34 * radius
    lying = np.minimum(radius - across, arm - np.abs(down))
    standing = np.minimum(arm - across, radius - np.abs(down))
    return np.maximum(lying, standing)


def _triangle(across: np.ndarray, down: np.ndarray, radius: float) -> np.ndarray:
    # The tip is one radius above the centre, the base 0.85 below it and two radii long.
    side = (down + radius - 1.85 * across) / math.hypot(1.85, 1)
    return np.minimum(side, 0.85 * radius - down)


_INSIDE = {"circle": _circle, "cross": _cross, "triangle": _triangle}


def _draw_digit(box: np.ndarray, digit: int) -> None:
    height, width = box.shape[:2]
    bits = np.array([bit == "1" for bit in _DIGITS[digit]]).reshape(5, 3)
    rows = np.rint(np.linspace(0.10, 0.90, 6) * height).astype(int)
    columns = np.rint(np.linspace(0.18, 0.82, 4) * width).astype(int)
    glyph = bits.repeat(np.diff(rows), axis=0).repeat(np.diff(columns), axis=1)
    box[rows[0] : rows[-1], columns[0] : columns[-1]][glyph] = _INK


def _cell(where: float, edges: tuple[float, float]) -> int:
    return sum(where >= edge for edge in edges)


def _spread(where: float, bounds: tuple[float, float, float, float]) -> float:
    cell = min(2, int(where * 3))
    low, high = bounds[cell] + _GAP, bounds[cell + 1] - _GAP
    return low + (where * 3 - cell) * (high - low)
