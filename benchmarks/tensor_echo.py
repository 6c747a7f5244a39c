"""A Python model with declared tensors: it receives and returns the array of a whole batch."""

from typing import Any

import numpy as np

import penstock


@penstock.model(inputs={"x": "FP32[-1,64]"}, outputs={"y": "FP32[-1,64]"})
class Echo:
    """Answers `y`, which is `x`."""

    def predict(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x
