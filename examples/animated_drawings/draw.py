"""Draws an answer on its picture: `python draw.py drawing.jpg answer.json found.png`.

The answer is the server's response to the picture; `-` reads it from standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from pictures import CLASSES, Pixels, decoded

COLOURS = dict(zip(CLASSES, ((60, 160, 0), (40, 60, 230)), strict=True))  # blue first


def shown(pixels: Pixels, answer: dict[str, Any]) -> Pixels:
    """The picture with each figure's box and name, and its silhouette if the answer has outlines."""
    canvas = pixels.copy()
    size = np.array([pixels.shape[1], pixels.shape[0]])
    thick = max(1, round(max(pixels.shape) / 400))
    for name, outline in zip(answer["classes"], answer.get("outlines", []), strict=False):
        if outline:
            cv2.fillPoly(canvas, [np.rint(outline * size).astype(np.int32)], COLOURS[name], cv2.LINE_AA)
    canvas = cv2.addWeighted(canvas, 0.35, pixels, 0.65, 0)
    for name, score, box in zip(answer["classes"], answer["scores"], answer["boxes"], strict=True):
        left, top, right, bottom = (round(edge) for edge in box * np.tile(size, 2))
        cv2.rectangle(canvas, (left, top), (right, bottom), COLOURS[name], thick, cv2.LINE_AA)
        text, tall = f"{name} {score:.2f}", thick * 0.4
        (wide, high), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, tall, thick)
        foot = max(top, high + below)
        cv2.rectangle(canvas, (left, foot - high - below), (left + wide, foot), COLOURS[name], cv2.FILLED)
        cv2.putText(
            canvas, text, (left, foot - below // 2), cv2.FONT_HERSHEY_SIMPLEX, tall, (255, 255, 255), thick, cv2.LINE_AA
        )
    return np.asarray(canvas, np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("answer", help="a file with the server's response, - for standard input")
    parser.add_argument("png", type=Path, help="the file to write")
    options = parser.parse_args()
    try:
        text = sys.stdin.read() if options.answer == "-" else Path(options.answer).read_text()
        image = shown(decoded(options.picture.read_bytes()), json.loads(text))
        options.png.write_bytes(bytes(cv2.imencode(".png", image)[1]))
    except (KeyError, TypeError, ValueError) as e:
        raise SystemExit(f"{options.answer} and {options.picture} cannot be shown: {e!r}") from None
    except OSError as e:
        raise SystemExit(str(e)) from None


if __name__ == "__main__":
    main()
