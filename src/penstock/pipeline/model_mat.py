"""OpenvinoMat: a model between images, as TorchPipe's op of this name."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import BadRequest
from penstock.pipeline.model_op import ModelOp
from penstock.pipeline.ops.base import Array, Fields, as_mat


class OpenvinoMat(ModelOp):
    """Runs a model file on images: `[height, width, channels]` -> float32 `[height, width, channels]`.

    The model itself takes `[1, channels, height, width]`. Outputs of three axes lose the first, and outputs of two keep
    both. A tensor `[1, channels, height, width]` as data is accepted too.
    """

    takes = "any"
    gives = "any"

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        """As `ModelOp`."""
        results: list[Any] = []
        for value in data:
            try:
                results.append(_planes(value))
            except BadRequest as e:
                results.append(e)
        fine = [i for i, value in enumerate(results) if not isinstance(value, BadRequest)]
        for i, answer in zip(fine, super().__call__([results[i] for i in fine], []), strict=True):
            results[i] = [_mat(one) for one in answer] if isinstance(answer, list) else _mat(answer)
        return results


def _planes(value: Any) -> Any:
    """The image as `[1, channels, height, width]`. Raises BadRequest."""
    if isinstance(value, np.ndarray) and value.ndim == 4:
        return value
    mat = as_mat(value, "OpenvinoMat").astype(np.float32)
    return np.ascontiguousarray((mat[:, :, None] if mat.ndim == 2 else mat).transpose(2, 0, 1))[None]


def _mat(output: Any) -> Any:
    if not isinstance(output, np.ndarray) or output.ndim < 3 or len(output) != 1:
        return output
    one: Array = output[0]
    return np.ascontiguousarray(one.transpose(1, 2, 0)) if one.ndim == 3 else one
