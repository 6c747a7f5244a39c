"""SaveMat. It is alone here because it writes files, and the other image ops only compute (see `placement`)."""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.pipeline.ops.base import Array, Fields, MatOp, as_mat
from penstock.pipeline.ops.mat import cv2

_numbers = itertools.count()


class SaveMat(MatOp):
    """The unchanged image, after writing it to a directory as a PNG (float32 clipped to 0 to 255). Slow: for debugging.

    - `save_dir`: an existing directory. Existing files are not overwritten.
    """

    def __init__(self, save_dir: str) -> None:
        self.folder = Path(save_dir).expanduser()
        if not self.folder.is_dir():
            raise ConfigError(f"SaveMat: save_dir = '{save_dir}' is not a directory: create it first")

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = as_mat(data, "SaveMat")
        if mat.ndim == 4:
            return mat
        _, png = cv2.imencode(".png", mat if mat.dtype == np.uint8 else mat.clip(0, 255).astype(np.uint8))
        while True:
            path = self.folder / f"{os.getpid()}_{next(_numbers):06d}.png"
            try:
                with path.open("xb") as file:
                    file.write(png.tobytes())
            except FileExistsError:
                continue
            return mat
