"""ResNet-50, as in "Deep Residual Learning for Image Recognition" with the stride in the 3 x 3 convolution.

One class, as TorchServe wants of a model's file.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride of the first


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


def block(inputs: int, width: int, stride: int) -> nn.ModuleDict:
    same = stride == 1 and inputs == 4 * width
    return nn.ModuleDict(
        {
            "reduce": convolution(inputs, width, 1),
            "middle": convolution(width, width, 3, stride),
            "expand": convolution(width, 4 * width, 1),
            "shortcut": nn.Identity() if same else convolution(inputs, 4 * width, 1, stride),
        }
    )


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.ModuleList()
        inputs = 64
        for width, count, stride in STAGES:
            for i in range(count):
                self.blocks.append(block(inputs, width, 1 if i else stride))
                inputs = 4 * width
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for parts in self.blocks:
            y = functional.relu(parts["middle"](functional.relu(parts["reduce"](x))))
            x = functional.relu(parts["expand"](y) + parts["shortcut"](x))
        return self.head(x.mean((2, 3)))
