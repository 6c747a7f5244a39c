"""The image model of the servers in this folder: from the bytes of an image file to its class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Set before torch is loaded. One thread by default: the web server in the same process needs the other cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cv2
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock import BadRequest, decode_image

WEIGHTS = Path(__file__).parent / "weights.safetensors"  # written by train.py
DENSENET = "densenet121"
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "no digit"]
SIDE = 32


class SmallCNN(nn.Sequential):
    """Maps grey images `[rows, 1, 32, 32]`, float32, to scores `[rows, 11]`."""

    def __init__(self) -> None:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

        super().__init__(
            *block(1, 24), *block(24, 48), *block(48, 96), nn.Flatten(), nn.Dropout(0.3), nn.Linear(1536, len(NAMES))
        )


def small_input(pixels: np.ndarray[Any, Any]) -> Tensor:
    """The input of the small network for BGR pixels, `[1, 32, 32]`: grey, with mean 0 and standard deviation 1."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
    shrinks = min(grey.shape) > SIDE
    grey = cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC)
    values = torch.from_numpy(grey)[None].float()
    return (values - values.mean()) / (values.std() + 4)  # + 4 avoids amplifying the noise of a uniform surface


class ImageModel:
    """The small network, or torchvision's DenseNet-121 with its published weights."""

    def __init__(self, weights: str = str(WEIGHTS)) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if weights == DENSENET:
            network, self.names, self._input = _densenet()
        else:
            network, self.names, self._input = SmallCNN(), NAMES, small_input
            network.load_state_dict(load_file(weights))
        self.network = network.float().eval().to(self.device)

    def batch_prediction(self, images: list[bytes]) -> list[dict[str, Any] | BadRequest]:
        """`{"class_id": 3, "class_name": "three"}` for each image file, or its error."""
        answers: list[Any] = []
        for image in images:
            try:
                answers.append(self._input(decode_image(image, "bgr")))
            except BadRequest as e:
                answers.append(e)
        good = [i for i, answer in enumerate(answers) if isinstance(answer, Tensor)]
        if good:
            with torch.inference_mode():
                scores = self.network(torch.stack([answers[i] for i in good]).to(self.device))
            for i, found in zip(good, scores.argmax(dim=1).tolist(), strict=True):
                answers[i] = {"class_id": found, "class_name": self.names[found]}
        return answers


def _densenet() -> tuple[nn.Module, list[str], Any]:
    """(network, names of its 1000 classes, its image transform). Downloads the weights on first use."""
    try:
        from torchvision.models import DenseNet121_Weights, densenet121
    except ImportError:
        raise SystemExit(f"--weights {DENSENET} needs torchvision: pip install torchvision") from None
    published = DenseNet121_Weights.IMAGENET1K_V1
    network = densenet121()
    state = published.get_state_dict(check_hash=True, weights_only=True)
    # The file uses older layer names such as "norm.1".
    for part in ("norm", "conv"):
        state = {key.replace(f".{part}.", f".{part}") if "denselayer" in key else key: w for key, w in state.items()}
    network.load_state_dict(state)
    transform = published.transforms()

    def transformed(pixels: np.ndarray[Any, Any]) -> Tensor:
        rgb = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
        return transform(torch.from_numpy(rgb).permute(2, 0, 1))

    return network, published.meta["categories"], transformed
