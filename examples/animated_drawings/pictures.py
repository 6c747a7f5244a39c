"""Converts a picture's bytes to the network's input, and its output to an answer."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from penstock import BadRequest, decode_image

CLASSES = ("person", "animal")
SIDE = 320  # width and height of the network's input
LEAST_SCORE = 0.4  # threshold of reported figures
MOST_SHARED = 0.5  # intersection over union of two boxes above which only the likelier figure is reported
GREY = 128  # padding around a picture that is not square
DIGITS = 4  # decimals of reported numbers

Pixels = NDArray[np.uint8]


def decoded(file: object) -> Pixels:
    """The pixels `[height, width, 3]` of an image file, blue first. Raises ValueError."""
    if not isinstance(file, (bytes, bytearray, memoryview)):
        raise ValueError(f"found a {type(file).__name__}; send the bytes of an image, such as a PNG or JPEG")
    try:
        return decode_image(file, "bgr")
    except BadRequest as e:
        raise ValueError(e.message) from None


def fitted(pixels: Pixels, side: int = SIDE) -> Pixels:
    """The picture resized to fit `[side, side, 3]`, at the top left, padded with grey."""
    high, wide = shrunk(pixels.shape[:2], side)
    square = np.full((side, side, 3), GREY, np.uint8)
    shrinks = max(pixels.shape[:2]) > side
    kind = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    cv2.resize(pixels, (wide, high), dst=square[:high, :wide], interpolation=kind)
    return square


def shrunk(shape: tuple[int, ...], side: int = SIDE) -> tuple[int, int]:
    """The height and width of a picture after resizing for the network."""
    longest = max(shape[:2])
    return max(1, round(shape[0] * side / longest)), max(1, round(shape[1] * side / longest))


def answer(
    shape: tuple[int, ...], scores: Any, classes: Any, boxes: Any, masks: Any, outlines: bool = False
) -> dict[str, Any]:
    """The answer for a picture of the height and width `shape`, with figures ordered from left to right.

    It has the figures' `classes`, `scores`, `boxes` (left, top, right, bottom) and `outlines` (corners of the
    silhouette), in fractions of the picture's width and height. The other parameters are the network's output:
    `scores [n]`, `classes [n]`, `boxes [n, 4]`, `masks [n, 80, 80]`.
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
    """The indices of likely figures without duplicates of likelier ones. `scores` must be descending."""
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
    """The boxes `[n, 4]` shrunk or grown to the masks `[n, 80, 80]`, which are more precise."""
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
    """The network's boxes `[n, 4]` in pixels of a picture of this height and width."""
    high, wide = shrunk(shape)
    scale = np.array([shape[1] / wide, shape[0] / high] * 2)
    return np.clip(np.asarray(boxes, np.float64) * scale, 0, [shape[1], shape[0]] * 2)


def silhouette(shape: tuple[int, ...], mask: Any, box: Any) -> NDArray[np.bool_]:
    """The largest connected part of the network's `mask [80, 80]` within `box`, which is in pixels of the picture."""
    left, top = (int(edge) for edge in box[:2])
    right, bottom = (int(np.ceil(edge)) for edge in box[2:])
    high, wide = shrunk(shape)
    cell = SIDE / mask.shape[0]
    across, down = wide / shape[1] / cell, high / shape[0] / cell  # cells per pixel of the picture
    move = np.array([[across, 0, (left + 0.5) * across - 0.5], [0, down, (top + 0.5) * down - 0.5]])
    size = max(1, right - left), max(1, bottom - top)
    seen = cv2.warpAffine(
        mask, move, size, flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_REPLICATE
    )
    parts, places, sizes, _ = cv2.connectedComponentsWithStats((seen > 127).astype(np.uint8))
    largest = 1 + int(sizes[1:, cv2.CC_STAT_AREA].argmax()) if parts > 1 else 1  # 0 is the background
    return np.asarray(places == largest, np.bool_)


def outline(mask: NDArray[np.bool_], box: Any) -> NDArray[np.int64]:
    """The corners `[n, 2]`, x and y, of a silhouette within `box`; empty if it is empty."""
    found, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    if not found:
        return np.empty((0, 2), np.int64)
    corners = cv2.approxPolyDP(found[0], 0.004 * max(mask.shape) + 0.5, True)[:, 0]
    return np.asarray(corners + np.array([int(box[0]), int(box[1])]), np.int64)
