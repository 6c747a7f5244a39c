"""The COCO detection challenge's average precision, for boxes or masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pictures import overlap

THRESHOLDS = np.arange(0.5, 1.0, 0.05)  # of intersection over union for a match
RECALLS = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class Found:
    """The detections in one picture, `[n]` each; `shapes` are boxes `[n, 4]` or masks `[n, height, width]`."""

    scores: NDArray[np.float64]
    classes: NDArray[np.int64]
    shapes: Any


@dataclass(frozen=True)
class Precision:
    """The mean over all thresholds, and the value at 0.5, both averaged over classes."""

    mean: float
    at_half: float

    def __str__(self) -> str:
        return f"mAP {self.mean:.3f}, at IoU 0.5 {self.at_half:.3f}"


def precision(found: list[Found], labels: list[NDArray[np.int64]], truth: list[Any]) -> Precision:
    """The precision of `found` against the `truth`, shapes of the same kind with the classes `labels`; one entry per
    picture."""
    classes = np.unique(np.concatenate(labels))
    shared = [_shared(f.shapes, t) for f, t in zip(found, truth, strict=True)]
    table = np.array([[_of_class(c, at, found, labels, shared) for at in THRESHOLDS] for c in classes])
    return Precision(float(table.mean()), float(table[:, 0].mean()))


def _shared(found: Any, truth: Any) -> NDArray[np.float64]:
    """Intersection over union of each found shape `[n]` with each true shape `[m]`."""
    both = np.zeros((len(found), len(truth)))
    for i, one in enumerate(found):
        for j, other in enumerate(truth):
            if one.ndim == 1:
                both[i, j] = overlap(one, other)
            else:
                both[i, j] = (one & other).sum() / max(1, (one | other).sum())
    return both


def _of_class(
    label: int, at: float, found: list[Found], labels: list[NDArray[np.int64]], shared: list[NDArray[np.float64]]
) -> float:
    """The mean over 101 recalls of the best precision at that recall or above."""
    judged: list[tuple[float, bool]] = []
    for one, own, ious in zip(found, labels, shared, strict=True):
        free = own == label
        for i in np.argsort(-one.scores, kind="stable"):
            if one.classes[i] != label:
                continue
            fits = np.where(free, ious[i], 0)
            hit = fits.size > 0 and fits.max() >= at
            if hit:
                free[fits.argmax()] = False
            judged.append((float(one.scores[i]), bool(hit)))
    judged.sort(key=lambda pair: -pair[0])
    hits = np.cumsum([hit for _, hit in judged])
    if len(hits) == 0:
        return 0.0
    recall = hits / sum(int((own == label).sum()) for own in labels)
    best = np.maximum.accumulate((hits / np.arange(1, len(hits) + 1))[::-1])[::-1]
    places = np.searchsorted(recall, RECALLS)
    return float(np.where(places < len(best), best[np.minimum(places, len(best) - 1)], 0).mean())
