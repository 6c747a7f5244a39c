"""The ops of detect_and_read.toml, and the same functions for the programs beside it.

Detection and recognition take and give the tensors of PaddleOCR's models, so the ops read those as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np

from penstock.pipeline.ops.python import op

HERE = Path(__file__).parent
MULTIPLE = 32  # the detector halves its input five times at most


@op(takes="mat", gives="tensor", writes=["page"])
class DetectorInput:
    """The page for the detector: uint8 `[height, width, 3]` -> uint8 `[1, 3, h, w]`, sides multiples of 32.

    `limit`: a page whose longer side has more pixels is made smaller. The field `page` keeps the page.
    """

    def __init__(self, limit: int = 960) -> None:
        self.limit = limit

    def __call__(self, data: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
        fields["page"] = data
        return detector_input(data, self.limit)


def detector_input(page: np.ndarray, limit: int = 960) -> np.ndarray:
    """See `DetectorInput`."""
    scale = min(1.0, limit / max(page.shape[:2]))
    height, width = (max(MULTIPLE, round(side * scale / MULTIPLE) * MULTIPLE) for side in page.shape[:2])
    sized = page if page.shape[:2] == (height, width) else cv2.resize(page, (width, height))
    return np.ascontiguousarray(sized.transpose(2, 0, 1))[None]


@op(takes="tensor", gives="mat", reads=["page"], writes=["box"])
class Boxes:
    """The boxes of the words on a page, from the detector's probabilities `[1, 1, h, w]`: differentiable binarization.

    The result is the page. The field `box` becomes a list of float32 `[4, 2]`, corners in pixels of the page in
    reading order. `threshold` is the least probability of a pixel, `box_threshold` the least mean of a box, and
    `unclip` the ratio by which boxes grow, because the detector marks a shrunken box.
    """

    def __init__(self, threshold: float = 0.3, box_threshold: float = 0.6, unclip: float = 1.5) -> None:
        self.settings = (threshold, box_threshold, unclip)

    def __call__(self, data: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
        fields["box"] = boxes_of(data[0, 0], fields["page"].shape[:2], *self.settings)
        return fields["page"]


def boxes_of(
    probability: np.ndarray, page: tuple[int, int], threshold: float = 0.3, least: float = 0.6, unclip: float = 1.5
) -> list[np.ndarray]:
    """See `Boxes`."""
    outlines, _ = cv2.findContours((probability > threshold).astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    scale = np.array([page[1] / probability.shape[1], page[0] / probability.shape[0]], np.float32)
    found = []
    for outline in outlines:
        centre, (width, height), angle = cv2.minAreaRect(outline)
        width, height = width + 1, height + 1  # an outline runs through the centres of its pixels
        if min(width, height) < 3 or _mean(probability, outline) < least:
            continue
        grown = 2 * unclip * width * height / (2 * (width + height))
        corners = cv2.boxPoints((centre, (width + grown, height + grown), angle))
        corners = np.clip((_ordered(corners) + 0.5) * scale, 0, (page[1] - 1, page[0] - 1)).astype(np.float32)
        found.append(corners)
    return sorted(found, key=lambda box: (box[:, 1].mean() // 24, box[:, 0].min()))


def _mean(probability: np.ndarray, outline: np.ndarray) -> float:
    """The mean probability inside an outline."""
    x, y, width, height = cv2.boundingRect(outline)
    inside = cv2.fillPoly(np.zeros((height, width), np.uint8), [outline - (x, y)], 1)
    return cv2.mean(probability[y : y + height, x : x + width], inside)[0]


def _ordered(corners: np.ndarray) -> np.ndarray:
    """Four corners clockwise from the upper left one."""
    left, right = np.split(corners[np.argsort(corners[:, 0], kind="stable")], 2)
    (upper_left, lower_left), (upper_right, lower_right) = (side[np.argsort(side[:, 1])] for side in (left, right))
    return np.array([upper_left, upper_right, lower_right, lower_left])


@op(gives="tensor", reads=["page", "box"])
class Line:
    """The word in `box` as the recogniser's input: the page -> float32 `[1, 3, height, width]`, from -1 to 1.

    The word is made upright, and as high as the recogniser expects. Padding makes the width a multiple of `step`, so
    that words of about the same length share a batch. A word of more than `most` pixels is made narrower.
    """

    def __init__(self, height: int = 48, step: int = 64, most: int = 1280) -> None:
        self.settings = (height, step, most)

    def __call__(self, data: Any, fields: dict[str, Any]) -> np.ndarray:
        return line_of(fields["page"], fields["box"], *self.settings)


def line_of(page: np.ndarray, corners: np.ndarray, height: int = 48, step: int = 64, most: int = 1280) -> np.ndarray:
    """See `Line`."""
    sides = np.hypot(*(corners - np.roll(corners, -1, axis=0)).T)
    long, high = max(sides[0], sides[2], 1.0), max(sides[1], sides[3], 1.0)
    if high >= 1.5 * long:  # a vertical word
        corners, long, high = np.roll(corners, -1, axis=0), high, long
    width = int(min(most, max(8, round(height * long / high))))
    target = np.array([(0, 0), (width, 0), (width, height), (0, height)], np.float32)
    upright = cv2.warpPerspective(
        page, cv2.getPerspectiveTransform(corners, target), (width, height), borderMode=cv2.BORDER_REPLICATE
    )
    line = np.zeros((1, 3, height, -(-width // step) * step), np.float32)
    np.multiply(upright.transpose(2, 0, 1), np.float32(1 / 127.5), out=line[0, :, :, :width])
    line[0, :, :, :width] -= 1
    return line


@op(takes="tensor", writes=["text", "score"])
class Text:
    """The word from the recogniser's probabilities `[1, steps, 1 + letters]`: fields `text` and `score`.

    `letters` is a file with a letter on each line, beginning with the recogniser's second output; the first is blank. A
    recogniser with one output more also knows the space. `score` is the mean probability of the letters.
    """

    def __init__(self, letters: str) -> None:
        self.letters = read_letters(letters)

    def __call__(self, data: np.ndarray, fields: dict[str, Any]) -> str:
        fields["text"], fields["score"] = text_of(data[0], self.letters)
        return fields["text"]


def read_letters(path: str | Path) -> list[str]:
    """The letters of a dictionary, and a space. A relative path begins at this folder."""
    return [*(HERE / path).read_text(encoding="utf-8").rstrip("\n").split("\n"), " "]


def text_of(probability: np.ndarray, letters: list[str]) -> tuple[str, float]:
    """See `Text`."""
    if not 2 <= probability.shape[1] <= len(letters) + 1:
        raise ValueError(
            f"the recogniser has {probability.shape[1]} outputs, but the dictionary {len(letters) - 1} letters"
        )
    best = probability.argmax(1)
    kept = best > 0
    kept[1:] &= best[1:] != best[:-1]
    text = "".join(letters[n - 1] for n in best[kept])
    return text, round(float(probability.max(1)[kept].mean()), 4) if text else 0.0


@op(reads=["page", "box", "text", "score"])
class Answer:
    """The words of a page: `{"words": [{"text", "score", "box"}]}`, or a PNG if the field `format` is "png"."""

    def __call__(self, data: Any, fields: dict[str, Any]) -> Any:
        found = (fields["box"], fields["text"], fields["score"])
        if (wanted := fields.get("format", "json")) not in ("json", "png"):
            raise ValueError(f"format is {wanted!r}, expected 'json' or 'png'")
        return drawn(fields["page"], *found[:2]) if wanted == "png" else words_of(*found)


def words_of(boxes: list[np.ndarray], texts: list[str], scores: list[float]) -> dict[str, Any]:
    """The answer in JSON."""
    found = zip(boxes, texts, scores, strict=True)
    return {
        "words": [
            {"text": text, "score": score, "box": box.astype(float).round(1).tolist()} for box, text, score in found
        ]
    }


def drawn(page: np.ndarray, boxes: list[np.ndarray], texts: list[str]) -> bytes:
    """The page as a PNG, with a frame around each word and the text above it."""
    image = page.copy()
    for box, text in zip(boxes, texts, strict=True):
        cv2.polylines(image, [box.astype(np.int32)], True, (0, 140, 0), 1, cv2.LINE_AA)
        x, y = box[0].astype(int)
        seen = text.encode("ascii", "replace").decode()  # OpenCV's font has no other letters
        cv2.putText(
            image, seen, (int(x), max(8, int(y) - 2)), cv2.FONT_HERSHEY_SIMPLEX, 0.4, (200, 0, 0), 1, cv2.LINE_AA
        )
    return cv2.imencode(".png", image)[1].tobytes()
