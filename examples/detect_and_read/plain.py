"""The same work as a plain script, one request after another: `python plain.py PAGE.jpg ... [--png OUT.png]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import ocr
import onnxruntime

HERE = Path(__file__).parent
BOXES = (0.5, 0.6, 0.9)  # as in detect_and_read.toml: threshold, box_threshold, unclip
MEAN, STD = (np.float32(v)[:, None, None] for v in ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375]))


class Reader:
    """Reads pages, a word at a time."""

    def __init__(self, folder: Path = HERE) -> None:
        self.detector, self.recogniser = (
            onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
            for name in ("detector", "recogniser")
        )
        self.letters = ocr.read_letters(folder / "letters.txt")

    def read(self, data: bytes) -> dict[str, Any]:
        """The words of an encoded page."""
        return ocr.words_of(*self.found(decoded(data)))

    def drawn(self, data: bytes) -> bytes:
        """The page as a PNG with its words."""
        page = decoded(data)
        return ocr.drawn(page, *self.found(page)[:2])

    def found(self, page: np.ndarray) -> tuple[list[np.ndarray], list[str], list[float]]:
        """Boxes, texts and scores."""
        pixels = (ocr.detector_input(page, 1280) - MEAN) / STD
        boxes = ocr.boxes_of(run(self.detector, pixels)[0, 0], page.shape[:2], *BOXES)
        found = [ocr.text_of(run(self.recogniser, ocr.line_of(page, box))[0], self.letters) for box in boxes]
        return boxes, [text for text, _ in found], [score for _, score in found]


def decoded(data: bytes) -> np.ndarray:
    """The pixels of an encoded page. Raises ValueError."""
    page = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    if page is None:
        raise ValueError(f"found {len(data)} bytes, expected an image")
    return page


def run(session: onnxruntime.InferenceSession, rows: np.ndarray) -> np.ndarray:
    """The only output of a model for its only input."""
    return session.run(None, {session.get_inputs()[0].name: rows})[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--png", type=Path, help="where to write the first page with its words")
    given = parser.parse_args()
    reader = Reader()
    for path in given.pages:
        print(json.dumps(reader.read(path.read_bytes())))
    if given.png:
        given.png.write_bytes(reader.drawn(given.pages[0].read_bytes()))


if __name__ == "__main__":
    main()
