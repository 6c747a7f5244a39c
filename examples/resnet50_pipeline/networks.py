"""The networks of this example, with reproducible random weights: nothing is downloaded.

With plain random weights, activations vanish or explode over fifty layers, and every image gets the same logits.
Therefore the networks are calibrated on synthetic images: each batch normalization takes their mean and variance, and
the classifier is scaled to logits of about 1 that differ between images.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    MobileNetV1Config,
    MobileNetV1ForImageClassification,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

SIDE = 224
SMALL_SIDE = 128
CLASSES = 1000
MEAN = (123.675, 116.28, 103.53)  # ImageNet's usual statistics of RGB pixels, 0 to 255
STD = (58.395, 57.12, 57.375)


class Logits(nn.Module):
    """Pixels float32 `[rows, 3, 224, 224]`, normalized -> logits `[rows, 1000]`, from a classifier of transformers."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.classifier(pixels, return_dict=False)[0]


def resnet50(seed: int = 0) -> Logits:
    """ResNet-50 (25.6 million weights, 4.1 GFLOP an image), in evaluation mode."""
    return _settled(lambda: ResNetForImageClassification(ResNetConfig(num_labels=CLASSES)), seed)


def mobilenet(seed: int = 0) -> Logits:
    """MobileNetV2 (3.5 million weights, 0.3 GFLOP an image), in evaluation mode."""
    config = MobileNetV2Config(num_labels=CLASSES, tf_padding=False, image_size=SIDE)
    return _settled(lambda: MobileNetV2ForImageClassification(config), seed)


def small(seed: int = 0) -> Logits:
    """MobileNetV1, a quarter as wide, for 128 pixels (0.5 million weights, 0.03 GFLOP an image), in evaluation mode."""
    config = MobileNetV1Config(num_labels=CLASSES, tf_padding=False, image_size=SMALL_SIDE, depth_multiplier=0.25)
    return _settled(lambda: MobileNetV1ForImageClassification(config), seed)


def _settled(make, seed: int) -> Logits:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Logits(make())
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        images = _images(16)
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average of the following batches
    with torch.inference_mode():
        network.train(True)
        network(images)
        network.train(False)
        _scale(network, images)
    return network


def _scale(network: Logits, images: torch.Tensor) -> None:
    """Adjusts the last layer for features with mean 0 and variance 1 over the images."""
    last = [m for m in network.modules() if isinstance(m, nn.Linear)][-1]
    seen: list[torch.Tensor] = []
    hook = last.register_forward_hook(lambda _, given, __: seen.append(given[0].flatten(1)))
    network(images)
    hook.remove()
    spread, middle = seen[0].std(0).clamp_min(1e-3), seen[0].mean(0)
    nn.init.normal_(last.weight, std=last.in_features**-0.5, generator=torch.Generator().manual_seed(1))
    last.weight /= spread
    last.bias.copy_(-(last.weight @ middle))


def _images(count: int) -> torch.Tensor:
    """Colored clouds: noise on five scales, with about the spectrum of photos. float32 `[count, 3, 224, 224]`."""
    pixels = torch.zeros(count, 3, SIDE, SIDE)
    for side in (3, 7, 14, 56, SIDE):
        noise = torch.randn(count, 3, side, side) * (7 / (side + 4)) ** 0.5
        pixels += nn.functional.interpolate(noise, size=(SIDE, SIDE), mode="bilinear")
    return pixels + torch.randn(count, 3, 1, 1) * 0.5
