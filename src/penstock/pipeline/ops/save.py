"""SaveMat: images written to a directory, to be looked at."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.pipeline.ops.base import Array, Fields, ItemOp, as_mat
from penstock.pipeline.ops.mat import cv2

_numbers = itertools.count()


class SaveMat(ItemOp):
    """The image as it is; it is written to a directory as a PNG, too (float32 cut to 0 to 255). Slow: for debugging.

    - `save_dir`: a directory that exists. Nothing is written elsewhere, and nothing that is there is overwritten.
    """

    takes = "mat"
    gives = "mat"

    def __init__(self, save_dir: str) -> None:
        self.folder = Path(save_dir).expanduser()
        if not self.folder.is_dir():
            raise ConfigError(f"SaveMat: save_dir = '{save_dir}' is no directory: make it first")

    def __call__(self, data: Any, fields: Fields) -> Array:
        mat = as_mat(data, "SaveMat")
        _, png = cv2.imencode(".png", mat if mat.dtype == np.uint8 else mat.clip(0, 255).astype(np.uint8))
        while True:
            path = self.folder / f"{os.getpid()}_{next(_numbers):06d}.png"
            try:
                with path.open("xb") as file:
                    file.write(png.tobytes())
            except FileExistsError:
                continue
            return mat
