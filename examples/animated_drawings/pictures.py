"""From the bytes of a picture to what the network sees, and from what it says to an answer. NumPy and OpenCV only."""

from __future__ import annotations

import os
from typing import Any

# For files that are small and huge when they are decoded. It has to stand there before OpenCV is loaded.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(2**26))

import cv2
import numpy as np
from numpy.typing import NDArray

CLASSES = ("person", "animal")
SIDE = 320  # pixels of what the network sees, both ways
LEAST_SCORE = 0.4  # of a figure that is told
MOST_SHARED = 0.5  # of two boxes, as their intersection over their union; the likelier figure stays
GREY = 128  # around a picture that is no square
DIGITS = 4  # of numbers that are told

Pixels = NDArray[np.uint8]


def decoded(file: object) -> Pixels:
    """The pixels `[height, width, 3]` of an image file, blue first. Raises ValueError."""
    if not isinstance(file, (bytes, bytearray, memoryview)):
        raise ValueError(f"found a {type(file).__name__}; send the bytes of a PNG or JPEG")
    try:
        pixels = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:  # nothing at all, or too many pixels
        pixels = None
    if pixels is None:
        raise ValueError(f"these {len(file)} bytes are no image; send a PNG or JPEG of at most 64 megapixels")
    return np.asarray(pixels, np.uint8)


def fitted(pixels: Pixels, side: int = SIDE) -> Pixels:
    """The picture `[side, side, 3]`: as large as fits, at the top left, on grey."""
    high, wide = shrunk(pixels.shape[:2], side)
    square = np.full((side, side, 3), GREY, np.uint8)
    shrinks = max(pixels.shape[:2]) > side
    kind = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    cv2.resize(pixels, (wide, high), dst=square[:high, :wide], interpolation=kind)
    return square


def shrunk(shape: tuple[int, ...], side: int = SIDE) -> tuple[int, int]:
    """The height and width of a picture of that height and width, as the network sees it."""
    longest = max(shape[:2])
    return max(1, round(shape[0] * side / longest)), max(1, round(shape[1] * side / longest))


def answer(
    shape: tuple[int, ...], scores: Any, classes: Any, boxes: Any, masks: Any, outlines: bool = False
) -> dict[str, Any]:
    """What is told of a picture of that height and width: the figures' `classes`, `scores` and `boxes` (left, top,
    right, bottom), and their `outlines` (corners of the silhouette), from left to right. Places are parts of the
    picture's width and height, from 0 to 1.

    The others are the network's: `scores [n]`, `classes [n]`, `boxes [n, 4]`, `masks [n, 80, 80]`.
    """
    kept = figures(scores, boxes)
    edges = on_picture(shape, tightened(boxes[kept], masks[kept]))
    order = np.argsort(edges[:, 0] + edges[:, 2], kind="stable")
    size = np.array([shape[1], shape[0]])
    found: dict[str, Any] = {
        "classes": [CLASSES[classes[kept[i]]] for i in order],
        "scores": [round(float(scores[kept[i]]), DIGITS) for i in order],
        "boxes": [(edges[i] / np.tile(size, 2)).round(DIGITS).tolist() for i in order],
    }
    if outlines:
        corners = (outline(silhouette(shape, masks[kept[i]], edges[i]), edges[i]) for i in order)
        found["outlines"] = [(points / size).round(DIGITS).tolist() for points in corners]
    return found


def figures(scores: Any, boxes: Any, least: float = LEAST_SCORE) -> list[int]:
    """The places of what is likely enough and no second view of a likelier figure. Scores fall."""
    kept: list[int] = []
    for place in np.flatnonzero(scores >= least):
        if all(overlap(boxes[place], boxes[other]) < MOST_SHARED for other in kept):
            kept.append(int(place))
    return kept


def overlap(one: Any, other: Any) -> float:
    """Intersection over union of two boxes."""
    sides = np.maximum(0, np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]))
    both = float(sides[0] * sides[1])
    areas = sum(float((box[2] - box[0]) * (box[3] - box[1])) for box in (one, other))
    return both / max(areas - both, 1e-9)


def tightened(boxes: Any, masks: Any) -> NDArray[np.float64]:
    """The boxes `[n, 4]` around what the masks `[n, 80, 80]` show in them: masks know better where a figure ends."""
    tight = np.array(boxes, np.float64)
    for place, mask in enumerate(masks):
        cell = SIDE / len(mask)
        wide = np.clip(tight[place] + (-cell, -cell, cell, cell), 0, SIDE)
        seen = silhouette((SIDE, SIDE), mask, wide)
        down, across = np.flatnonzero(seen.any(axis=1)), np.flatnonzero(seen.any(axis=0))
        if len(down):
            left, top = np.floor(wide[:2])
            tight[place] = left + across[0], top + down[0], left + across[-1] + 1, top + down[-1] + 1
    return tight


def on_picture(shape: tuple[int, ...], boxes: Any) -> NDArray[np.float64]:
    """Boxes `[n, 4]` that the network told, in pixels of a picture of that height and width."""
    high, wide = shrunk(shape)
    scale = np.array([shape[1] / wide, shape[0] / high] * 2)
    return np.clip(np.asarray(boxes, np.float64) * scale, 0, [shape[1], shape[0]] * 2)


def silhouette(shape: tuple[int, ...], mask: Any, box: Any) -> NDArray[np.bool_]:
    """Where a figure is, within its box and in one piece; `mask [80, 80]` is the network's, `box` counts pixels of the
    picture."""
    left, top = (int(edge) for edge in box[:2])
    right, bottom = (int(np.ceil(edge)) for edge in box[2:])
    high, wide = shrunk(shape)
    cell = SIDE / mask.shape[0]
    across, down = wide / shape[1] / cell, high / shape[0] / cell  # cells in a pixel of the picture
    move = np.array([[across, 0, (left + 0.5) * across - 0.5], [0, down, (top + 0.5) * down - 0.5]])
    size = max(1, right - left), max(1, bottom - top)
    seen = cv2.warpAffine(
        mask, move, size, flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_REPLICATE
    )
    parts, places, sizes, _ = cv2.connectedComponentsWithStats((seen > 127).astype(np.uint8))
    largest = 1 + int(sizes[1:, cv2.CC_STAT_AREA].argmax()) if parts > 1 else 1  # 0 is what is no figure
    return np.asarray(places == largest, np.bool_)


def outline(mask: NDArray[np.bool_], box: Any) -> NDArray[np.int64]:
    """The corners `[n, 2]`, x and y, of a silhouette within `box`; none if it is empty."""
    found, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    if not found:
        return np.empty((0, 2), np.int64)
    corners = cv2.approxPolyDP(found[0], 0.004 * max(mask.shape) + 0.5, True)[:, 0]
    return np.asarray(corners + np.array([int(box[0]), int(box[1])]), np.int64)
