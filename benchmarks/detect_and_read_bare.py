"""A loop without a server: `python detect_and_read_bare.py SECONDS`; prints its rate as a line of JSON.

It reads ten pages at a time: a thread per core decodes, detects and crops, then the words of all pages of about
the same width share the calls of the recogniser. This is what `detect_and_read.toml` does, without requests.
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import onnxruntime

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "detect_and_read"
sys.path.insert(0, str(EXAMPLE))
import ocr  # noqa: E402
import pages  # noqa: E402
import plain  # noqa: E402

AT_ONCE, MOST = 10, 32  # pages, and words of one call
PAGES = 60


def session(name: str) -> onnxruntime.InferenceSession:
    """A model that computes in the calling thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(EXAMPLE / f"{name}.onnx", options, providers=["CPUExecutionProvider"])


def main() -> None:
    seconds = float(sys.argv[1])
    cv2.setNumThreads(1)
    detector, recogniser = session("detector"), session("recogniser")
    letters = ocr.read_letters(EXAMPLE / "letters.txt")
    files = [data for data, _ in pages.some(PAGES)]

    def lines(data: bytes) -> tuple[list[np.ndarray], list[np.ndarray]]:
        page = plain.decoded(data)
        pixels = (ocr.detector_input(page, 1280) - plain.MEAN) / plain.STD
        boxes = ocr.boxes_of(plain.run(detector, pixels)[0, 0], page.shape[:2], *plain.BOXES)
        return boxes, [ocr.line_of(page, box) for box in boxes]

    def texts(group: list[tuple[int, np.ndarray]]) -> list[tuple[int, tuple[str, float]]]:
        found = plain.run(recogniser, np.concatenate([line for _, line in group]))
        return [(place, ocr.text_of(one, letters)) for (place, _), one in zip(group, found, strict=True)]

    done = calls = words = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        begun, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() < begun + seconds:
            found = list(pool.map(lines, [files[(done + n) % PAGES] for n in range(AT_ONCE)]))
            order = sorted(enumerate(line for _, some in found for line in some), key=lambda one: one[1].shape[3])
            groups: list[list[tuple[int, np.ndarray]]] = []
            for one in order:
                if not groups or len(groups[-1]) == MOST or groups[-1][0][1].shape != one[1].shape:
                    groups.append([])
                groups[-1].append(one)
            read = dict(pair for some in pool.map(texts, groups) for pair in some)
            place = 0
            for boxes, _ in found:
                mine = [read[place + n] for n in range(len(boxes))]
                json.dumps(ocr.words_of(boxes, [text for text, _ in mine], [score for _, score in mine]))
                place += len(boxes)
            done, calls, words = done + AT_ONCE, calls + len(groups), words + len(order)
        elapsed, used = time.perf_counter() - begun, time.process_time() - cpu
    print(json.dumps({"rate": done / elapsed, "batch": words / calls, "cpu_ms_a_request": 1e3 * used / done}))


if __name__ == "__main__":
    main()
