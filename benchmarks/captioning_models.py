"""Captioners without a model, to measure the transport of pixels: each caption is the number of its frame."""

import time
from typing import Any, ClassVar

import numpy as np

import penstock
from penstock.types import TensorSpec

LATE_S = 0.002  # by which a sleep may end late, which the next batch makes up for


@penstock.model(max_batch_size=64)
class Captioner:
    """Expects frames of 224 x 224, as BLIP-2 does, and returns only the number of each frame.

    With a `rate`, it captions so many frames/s, and leaves the processor alone meanwhile.
    """

    inputs = (
        TensorSpec("frames", "UINT8", (-1, -1, -1, 3), optional=True),
        TensorSpec("jpeg", "BYTES", (-1,), optional=True),
        TensorSpec("frame_index", "INT64", (-1,)),
    )
    outputs = (TensorSpec("caption", "BYTES", (-1,)), TensorSpec("frame_index", "INT64", (-1,)))
    parameters: ClassVar[dict[str, Any]] = {
        "task": "image-to-text",
        "model": "none",
        "revision": "1",
        "height": 224,
        "width": 224,
        "layout": "NHWC",
        "kernel": "bicubic",
        "prompt": "",
        "max_new_tokens": 0,
        "precision": "fp32",
    }

    def __init__(self, rate: float | None = None) -> None:
        self._rate = rate
        self._free_s = 0.0  # when the simulated network has finished

    def predict(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        if self._rate is not None:
            rows = sum(len(item["frame_index"]) for item in items)
            self._free_s = max(self._free_s, time.monotonic() - LATE_S) + rows / self._rate
            time.sleep(max(0.0, self._free_s - time.monotonic()))
        for item in items:
            index = item["frame_index"]
            found.append({"caption": np.array([str(i) for i in index.tolist()], object), "frame_index": index})
        return found
