"""How much a picture differs when a JPEG is decoded at a part of its size: the price of DecodeMat's `scale_h`.

Measured on generated pictures, noise and things of all sizes: between a blurred photograph and a busy one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from msgspec import Struct

from penstock.pipeline.ops.arrays import Array
from penstock.pipeline.ops.cv import cv2
from penstock.pipeline.ops.decode import DecodeMat, Decoder
from penstock.pipeline.ops.resize import sized

_SIZES = ((2.3, 2.7), (4.6, 4.2), (3.1, 8.9))  # of the pictures, in parts of the size that is wanted
_MOST = 160  # more pixels say the same
_QUALITY = 90


class Accuracy(Struct, frozen=True):
    """Differences of the resized picture, in levels of 255: their mean, and what 99 % of them are within."""

    mean: float
    within: float


@lru_cache(maxsize=64)
def accuracy(scale_h: int, scale_w: int, decoder: Decoder = "auto") -> Accuracy:
    """Decodes pictures in full and scaled, resizes both to the size wanted, and compares."""
    height, width = min(scale_h, _MOST), min(scale_w, _MOST)
    full, scaled = DecodeMat(decoder), DecodeMat(decoder, height, width)
    differences = []
    for seed, (more_h, more_w) in enumerate(_SIZES):
        _, jpeg = cv2.imencode(
            ".jpg", picture(int(height * more_h), int(width * more_w), seed), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY]
        )
        pair = [sized(decode.decode(jpeg.tobytes()), height, width).astype(np.int16) for decode in (full, scaled)]
        differences.append(np.abs(pair[0] - pair[1]).ravel())
    levels = np.concatenate(differences)
    return Accuracy(float(levels.mean()), float(np.quantile(levels, 0.99)))


def picture(height: int, width: int, seed: int) -> Array:
    """A picture uint8 `[height, width, 3]`, the same for the same seed."""
    rng = np.random.default_rng(seed)
    levels = np.full((height, width, 3), 128, np.float32)
    size = max(height, width)
    while size >= 2:  # a photograph's detail shrinks with its size
        shape = (max(1, height // size), max(1, width // size), 3)
        noise = rng.normal(0, 30 * (size / max(height, width)) ** 0.5, shape).astype(np.float32)
        levels += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
        size //= 2
    for extent in rng.uniform(0.02, 0.3, 400):  # and its things are of all sizes
        corners = (rng.uniform(0, 1, 2) + rng.uniform(-extent, extent, (4, 2))) * (width, height)
        colour = [float(level) for level in rng.uniform(0, 255, 3)]
        cv2.fillConvexPoly(levels, cv2.convexHull(corners.astype(np.int32)), colour)
    levels += rng.normal(0, 5, levels.shape).astype(np.float32)  # a sensor's noise
    return levels.clip(0, 255).astype(np.uint8)
