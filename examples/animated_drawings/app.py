"""Finds the figures of drawings: `penstock serve app.py`, and `penstock tune app.py --slo "p99<=100ms"`.

curl --data-binary @drawing.jpg -H 'content-type: image/jpeg' http://127.0.0.1:8080/predictions/figuredetector
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: threads that wait use no core

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
class Seen:
    """A picture as the network sees it, and the height and width that it has."""

    pixels: Pixels
    shape: tuple[int, int]


@dataclass(frozen=True)
class Said:
    """What the network says of a picture of that height and width."""

    shape: tuple[int, int]
    scores: Any
    classes: Any
    boxes: Any
    masks: Any


@penstock.model
class FigureDetector:
    """Takes a PNG or JPEG, or JSON `{"image": "..."}` with one in base64; gives classes, scores and boxes."""

    def __init__(self, network: str = SMALL, weights: str = "", outlines: bool = False) -> None:
        """`network` is "small" or "maskrcnn", `weights` a file of its own; with `outlines` the corners of silhouettes
        are told too. Raises ConfigError."""
        if network not in NETWORKS:
            raise ConfigError(f"option network: found {network!r}, expected {' or '.join(NETWORKS)}")
        self._network, self._weights, self._outlines = network, weights, outlines
        example = base64.b64encode(EXAMPLE.read_bytes()).decode()
        self.parameters = {"task": "object-detection", "classes": list(CLASSES), "example": {"image": example}}

    def load(self, device: str, precision: str = "fp32", optimize: str = "none", threads: int = 0) -> None:
        """Raises ConfigError for what the network does not take, LoadFailed where a library or file misses."""
        if threads:
            torch.set_num_threads(threads)
        network = load_network(self._network, self._weights)
        if precision != "fp32" and not network.halves:
            raise ConfigError(f"precision: found {precision}, but the network {self._network} runs in fp32 only")
        self._run = prepare(network, device, precision=precision, optimize=optimize)
        self._device = torch.device(device)

    def warmup(self) -> list[bytes]:
        """The drawing of this folder."""
        return [EXAMPLE.read_bytes()]

    def preprocess(self, item: Any) -> Seen:
        """Raises BadRequest for what is no picture."""
        try:
            pixels = decoded(_file(item))
        except ValueError as e:
            raise penstock.BadRequest(str(e)) from None
        return Seen(fitted(pixels), (pixels.shape[0], pixels.shape[1]))

    def predict(self, batch: list[Seen]) -> list[Said]:
        """What the network says of each picture."""
        images = torch.from_numpy(np.stack([seen.pixels for seen in batch])).to(self._device)
        with torch.inference_mode():
            parts = [part.cpu().numpy() for part in self._run(images)]
        return [Said(seen.shape, *rows) for seen, *rows in zip(batch, *parts, strict=True)]

    def postprocess(self, said: Said) -> dict[str, Any]:
        """Classes, scores and boxes; see `pictures.answer`."""
        return answer(said.shape, said.scores, said.classes, said.boxes, said.masks, self._outlines)


def _file(item: Any) -> Any:
    """The picture that a request brings: its body, the one file of a form, or a text in base64. Raises ValueError."""
    if not isinstance(item, dict) or len(item) != 1:
        return item
    (file,) = item.values()
    if not isinstance(file, str):
        return file
    try:
        return base64.b64decode(file, validate=True)
    except binascii.Error:
        raise ValueError("found a text that is no base64, expected the bytes of a picture in it") from None
