"""The models of the benchmarks, the same code for every server. Imports only libraries that every peer has."""

import hashlib
import time
from typing import Any

FRAMES, HEIGHT, WIDTH, CHANNELS = 16, 270, 480, 3


def echo(items: list[Any]) -> list[Any]:
    """Returns its input."""
    return items


def total(items: list[Any]) -> list[Any]:
    """The sum of each tensor."""
    return [{"total": item["x"].sum(axis=1)} for item in items]


def accelerator(items: list[Any]) -> list[Any]:
    """Takes 5 ms + 0.2 ms per item, without CPU time."""
    time.sleep(0.005 + 0.0002 * len(items))
    return items


def heavy(items: list[Any]) -> list[Any]:
    """Takes 10 ms + 2 ms per item: 381 items per second in batches of 16."""
    time.sleep(0.010 + 0.002 * len(items))
    return items


def slow(items: list[Any]) -> list[Any]:
    """Takes 20 ms + 2 ms per item: 308 items per second in batches of 16."""
    time.sleep(0.020 + 0.002 * len(items))
    return items


def wide(items: list[Any]) -> list[Any]:
    """Takes 40 ms + 0.5 ms per item: 889 items per second in batches of 64."""
    time.sleep(0.040 + 0.0005 * len(items))
    return items


def frame_means(items: list[Any]) -> list[Any]:
    """The mean of each of 16 raw uint8 frames of 270 x 480 x 3, as 16 floats."""
    import numpy

    means = []
    for item in items:
        frames = numpy.frombuffer(item, numpy.uint8).reshape(FRAMES, HEIGHT * WIDTH * CHANNELS)
        means.append(frames.mean(axis=1, dtype=numpy.float32).tolist())
    return means


def by_rows(items: list[Any]) -> list[Any]:
    """Takes 20 ms + 1 ms a row, and no processor: 64 rows take 84 ms."""
    return _answers(items, 0.020, 0.001)


def by_launches(items: list[Any]) -> list[Any]:
    """Takes 250 ms + 1.6 ms a row, and no processor, as a GPU does that mostly waits for its launches."""
    return _answers(items, 0.250, 0.0016)


def _answers(items: list[Any], a: float, b: float) -> list[Any]:
    """What it is given, of Open Inference requests the last input alone."""
    rows = [len(next(iter(item.values()))) if isinstance(item, dict) else 1 for item in items]
    time.sleep(a + b * sum(rows))
    return [dict([list(item.items())[-1]]) if isinstance(item, dict) else item for item in items]


ITERATIONS = 2000  # of a hash: about a millisecond of one core


def steady(items: list[Any]) -> list[Any]:
    """The same work for each item, on the processor."""
    return [hashlib.pbkdf2_hmac("sha256", b"item", b"salt", ITERATIONS).hex() for _ in items]


def slowed(items: list[Any]) -> list[Any]:
    """A tenth more work than `steady`."""
    return [hashlib.pbkdf2_hmac("sha256", b"item", b"salt", ITERATIONS + ITERATIONS // 10).hex() for _ in items]


class SlowToPreprocess:
    """Computes for `preprocess_s` in Python for each item, and waits 2 ms for a device for each batch."""

    def __init__(self, preprocess_s: float = 0.005) -> None:
        self.preprocess_s = preprocess_s

    def preprocess(self, item: Any) -> Any:
        end = time.thread_time() + self.preprocess_s
        while time.thread_time() < end:
            pass
        return item

    def predict(self, items: list[Any]) -> list[Any]:
        time.sleep(0.002)
        return items
