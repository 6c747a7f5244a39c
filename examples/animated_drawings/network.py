"""A small instance detector in plain torch: classes, boxes and masks of the figures in a picture.

Each cell of a grid of 8 pixels predicts the likelihood of a figure's centre, the distances to the four sides, and the
weights that mix its mask from a few shared masks. Figures are the peaks of the likelihood, so the device needs no
non-maximum suppression, and a batch is one pass from bytes to boxes. The code can be scripted by TorchScript.
"""

from __future__ import annotations

import torch
from pictures import CLASSES, SIDE
from torch import Tensor, nn
from torch.nn import functional

STRIDE = 8  # pixels per grid cell
MOST = 12  # figures per picture
SHARED = 16  # number of shared masks
REACH = 32.0  # pixels: the unit of side distances, which keeps them near one


def conv(inputs: int, outputs: int, stride: int = 1, side: int = 3) -> nn.Sequential:
    """A convolution with batch normalization and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(conv(width, width), conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class FigureNet(nn.Module):
    """Detects figures in pictures uint8 `[rows, 320, 320, 3]`, blue first; 0.4 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.stride, self.reach, self.most = SIDE, STRIDE, REACH, MOST  # TorchScript cannot use globals
        self.halves = True  # supports half precision
        self.to4 = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2), Block(32))
        self.to8 = nn.Sequential(conv(32, 64, 2), Block(64))
        self.to16 = nn.Sequential(conv(64, 64, 2), Block(64))
        self.to32 = nn.Sequential(conv(64, 64, 2), Block(64))
        self.join16, self.join8 = conv(128, 64, side=1), conv(128, 64, side=1)
        self.join4 = nn.Sequential(conv(96, 32, side=1), conv(32, 32))
        self.shared = nn.Conv2d(32, SHARED, 1)
        self.head = conv(64, 64)
        self.figures, self.sides, self.mix = (nn.Conv2d(64, n, 1) for n in (len(CLASSES), 4, SHARED))
        nn.init.constant_(self.figures.bias, -4.0)  # few cells contain a centre

    def maps(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Figure logits `[rows, 2, 40, 40]`, side distances in REACH `[rows, 4, 40, 40]`, mask weights
        `[rows, 16, 40, 40]`, shared masks `[rows, 16, 80, 80]`."""
        x = images.permute(0, 3, 1, 2).to(self.shared.weight.dtype) / 128 - 1
        at4 = self.to4(x)
        at8 = self.to8(at4)
        at16 = self.to16(at8)
        at32 = self.to32(at16)
        at16 = self.join16(torch.cat([at16, functional.interpolate(at32, scale_factor=2.0)], 1))
        at8 = self.join8(torch.cat([at8, functional.interpolate(at16, scale_factor=2.0)], 1))
        at4 = self.join4(torch.cat([at4, functional.interpolate(at8, scale_factor=2.0)], 1))
        found = self.head(at8)
        return self.figures(found), functional.softplus(self.sides(found)), self.mix(found), self.shared(at4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The twelve likeliest figures of each picture, best first: scores float32 `[rows, 12]` from 0 to 1, classes
        int64 `[rows, 12]`, boxes float32 `[rows, 12, 4]` in pixels, masks uint8 `[rows, 12, 80, 80]`, above 127 inside
        the figure."""
        logits, sides, mixes, shared = self.maps(images)
        likely = logits.float().sigmoid()
        peaks = likely * (functional.max_pool2d(likely, 3, 1, 1) == likely)
        rows, _, high, wide = peaks.shape
        scores, places = peaks.flatten(1).topk(self.most)
        classes = torch.div(places, high * wide, rounding_mode="floor")
        places = places % (high * wide)
        y, x = torch.div(places, wide, rounding_mode="floor"), places % wide
        middles = (torch.stack([x, y, x, y], 2) + 0.5) * self.stride
        away = sides.float().flatten(2).transpose(1, 2).gather(1, places.unsqueeze(2).expand(-1, -1, 4)) * self.reach
        signs = torch.tensor([-1.0, -1.0, 1.0, 1.0], device=away.device)
        boxes = (middles + away * signs).clamp(0, self.side)
        mix = mixes.flatten(2).transpose(1, 2).gather(1, places.unsqueeze(2).expand(-1, -1, mixes.shape[1]))
        masks = torch.bmm(mix, shared.flatten(2)).float().sigmoid() * 255
        return scores, classes, boxes, masks.to(torch.uint8).view(rows, self.most, shared.shape[2], shared.shape[3])
