"""The two networks, with the inputs and outputs of PaddleOCR's: a detector of words and a recogniser of one word."""

from __future__ import annotations

import torch
from torch import nn


def conv(inputs: int, outputs: int, stride: int | tuple[int, int] = 1) -> nn.Sequential:
    """A 3 x 3 convolution of each channel, then one of 1 x 1 over all of them."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def stem(outputs: int) -> nn.Sequential:
    """The first convolution, which halves the picture."""
    return nn.Sequential(nn.Conv2d(3, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Detector(nn.Module):
    """Pixels float32 `[rows, 3, height, width]`, normalized, sides multiples of 32 -> the probability that a pixel is
    in the shrunken box of a word, `[rows, 1, height / 2, width / 2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.quarter = nn.Sequential(stem(12), conv(12, 24, 2), conv(24, 24))
        self.eighth = nn.Sequential(conv(24, 40, 2), conv(40, 40))
        self.sixteenth = nn.Sequential(conv(40, 48, 2), conv(48, 48), conv(48, 40))
        self.narrow = nn.Conv2d(40, 24, 1)
        self.head = nn.Sequential(conv(24, 24), conv(24, 24), nn.Conv2d(24, 4, 1), nn.PixelShuffle(2))
        self.twice = nn.Upsample(scale_factor=2, mode="nearest")

    def logits(self, pixels: torch.Tensor) -> torch.Tensor:
        quarter = self.quarter(pixels)
        eighth = self.eighth(quarter)
        eighth = eighth + self.twice(self.sixteenth(eighth))
        return self.head(quarter + self.twice(self.narrow(eighth)))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.logits(pixels))


class Recogniser(nn.Module):
    """Lines float32 `[rows, 3, 48, width]`, from -1 to 1 -> probabilities of blank and letters, `[rows, width / 8,
    1 + letters]`."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            stem(16), conv(16, 32, 2), conv(32, 48, (2, 2)), conv(48, 64, (2, 1)), conv(64, 64),
            nn.Conv2d(64, 64, (3, 1), bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        )  # fmt: skip
        self.along = nn.Sequential(
            nn.Conv2d(64, 64, (1, 5), padding=(0, 2), groups=64, bias=False), nn.BatchNorm2d(64),
            nn.Conv2d(64, 96, 1), nn.ReLU(), nn.Conv2d(96, 1 + letters, 1),
        )  # fmt: skip

    def logits(self, lines: torch.Tensor) -> torch.Tensor:
        return self.along(self.body(lines)).squeeze(2).transpose(1, 2)

    def forward(self, lines: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.logits(lines), dim=2)
