"""From an image to a tensor, step by step: torchvision's transforms, or the same arithmetic where it is not installed.

`image_pipeline` and `to_tensor_only` are what the built-in handlers use.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch

from penstock.errors import describe

log = logging.getLogger("penstock.model")

MEAN: Final = (0.485, 0.456, 0.406)  # of ImageNet's training images, red, green, blue
STD: Final = (0.229, 0.224, 0.225)


def rgb(image: Any) -> Any:
    """The image with the three channels that models are trained on."""
    return image if image.mode == "RGB" else image.convert("RGB")


class Compose:
    """Calls one step after the other."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(transforms)

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class Resize:
    """A PIL image whose shorter side has `size` pixels; the other is rounded down. Bilinear, over all pixels."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        from PIL.Image import Resampling

        width, height = image.size
        if width <= height:
            size = (self.size, int(self.size * height / width))
        else:
            size = (int(self.size * width / height), self.size)
        return image if size == image.size else image.resize(size, Resampling.BILINEAR)


class CenterCrop:
    """The middle `size` x `size` pixels of a PIL image that is at least as large; halves are rounded to even."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Any) -> Any:
        width, height = image.size
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return image.crop((left, top, left + self.size, top + self.size))


class ToTensor:
    """An RGB image as float32 `[3, height, width]` from 0 to 1."""

    def __call__(self, image: Any) -> torch.Tensor:
        pixels = np.array(image, dtype=np.uint8)
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div(255)


class Normalize:
    """`(x - mean) / std` of each channel of a float32 `[channels, height, width]`."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean).reshape(-1, 1, 1)
        self.std = torch.tensor(std).reshape(-1, 1, 1)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


def _steps() -> Any:
    try:
        return importlib.import_module("torchvision.transforms")
    except ImportError:
        pass
    except RuntimeError as e:  # it was built for another torch
        log.warning("torchvision_unusable error=%s: images are prepared without it", describe(e))
    return sys.modules[__name__]


def image_pipeline() -> Callable[[Any], torch.Tensor]:
    """What networks trained on ImageNet expect: float32 `[3, 224, 224]`."""
    steps = _steps()
    scale = [rgb, steps.Resize(256), steps.CenterCrop(224), steps.ToTensor(), steps.Normalize(mean=MEAN, std=STD)]
    pipeline: Callable[[Any], torch.Tensor] = steps.Compose(scale)
    return pipeline


def to_tensor_only() -> Callable[[Any], torch.Tensor]:
    """The whole image: float32 `[3, height, width]` from 0 to 1."""
    steps = _steps()
    pipeline: Callable[[Any], torch.Tensor] = steps.Compose([rgb, steps.ToTensor()])
    return pipeline
