"""A detector of figures in drawings: `penstock serve app.py`, and `penstock tune app.py --slo "p99<=100ms"`.

curl --data-binary @drawing.jpg -H 'content-type: image/jpeg' http://127.0.0.1:8080/predictions/figuredetector
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # set before torch is loaded: waiting threads use no core

import numpy as np
import torch
from networks import NETWORKS, SMALL, load_network
from pictures import CLASSES, Pixels, answer, decoded, fitted

import penstock
from penstock.errors import ConfigError
from penstock.runtimes.torch import prepare

FOLDER = Path(__file__).parent
EXAMPLE = FOLDER / "drawing.jpg"


@dataclass(frozen=True)
class NetworkInput:
    """A picture as the network sees it, and its original height and width."""

    pixels: Pixels
    shape: tuple[int, int]


@dataclass(frozen=True)
class NetworkOutput:
    """The network's output for a picture with this height and width."""

    shape: tuple[int, int]
    scores: Any
    classes: Any
    boxes: Any
    masks: Any


@penstock.model
class FigureDetector:
    """Maps a PNG or JPEG, or JSON `{"image": "..."}` in base64, to classes, scores and boxes."""

    def __init__(self, network: str = SMALL, weights: str = "", outlines: bool = False) -> None:
        """`network` is "small" or "maskrcnn", `weights` an optional file; `outlines` adds the corners of silhouettes.

        Raises ConfigError.
        """
        if network not in NETWORKS:
            raise ConfigError(f"option network: found {network!r}, expected {' or '.join(NETWORKS)}")
        self._network, self._weights, self._outlines = network, weights, outlines
        example = base64.b64encode(EXAMPLE.read_bytes()).decode()
        self.parameters = {"task": "object-detection", "classes": list(CLASSES), "example": {"image": example}}

    def load(self, device: str, precision: str = "fp32", optimize: str = "none", threads: int = 0) -> None:
        """Raises ConfigError for an unsupported precision, LoadFailed if a library or file is missing."""
        if threads:
            torch.set_num_threads(threads)
        network = load_network(self._network, self._weights)
        if precision != "fp32" and not network.halves:
            raise ConfigError(f"precision: found {precision}, but the network {self._network} runs in fp32 only")
        self._run = prepare(network, device, precision=precision, optimize=optimize)
        self._device = torch.device(device)

    def warmup(self) -> list[bytes]:
        """The example drawing of this folder."""
        return [EXAMPLE.read_bytes()]

    def preprocess(self, item: Any) -> NetworkInput:
        """Decodes and fits one picture. Raises BadRequest."""
        try:
            pixels = decoded(_file(item))
        except ValueError as e:
            raise penstock.BadRequest(str(e)) from None
        return NetworkInput(fitted(pixels), (pixels.shape[0], pixels.shape[1]))

    def predict(self, batch: list[NetworkInput]) -> list[NetworkOutput]:
        """The network's output for each picture."""
        images = torch.from_numpy(np.stack([row.pixels for row in batch])).to(self._device)
        with torch.inference_mode():
            parts = [part.cpu().numpy() for part in self._run(images)]
        return [NetworkOutput(row.shape, *rows) for row, *rows in zip(batch, *parts, strict=True)]

    def postprocess(self, output: NetworkOutput) -> dict[str, Any]:
        """Classes, scores and boxes; see `pictures.answer`."""
        return answer(output.shape, output.scores, output.classes, output.boxes, output.masks, self._outlines)


def _file(item: Any) -> Any:
    """The picture in a request: its body, the only file of a form, or base64 text. Raises ValueError."""
    if not isinstance(item, dict) or len(item) != 1:
        return item
    (file,) = item.values()
    if not isinstance(file, str):
        return file
    try:
        return base64.b64decode(file, validate=True)
    except binascii.Error:
        raise ValueError("found a text that is not base64, expected the bytes of a picture in base64") from None
