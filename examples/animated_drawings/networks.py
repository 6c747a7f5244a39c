"""The detectors behind one interface: the small network of this folder, and torchvision's Mask R-CNN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from network import MOST, FigureNet
from pictures import SIDE
from torch import Tensor, nn
from torch.nn import functional

SMALL, MASK_RCNN = "small", "maskrcnn"
NETWORKS = (SMALL, MASK_RCNN)
WEIGHTS = Path(__file__).parent / "weights.safetensors"  # written by train.py


def load_network(name: str, weights: str = "") -> nn.Module:
    """The network with the weights of a file, or its own; in evaluation mode, on the CPU.

    Raises LoadFailed if a library or the file is missing.
    """
    from penstock.runtimes.torch_files import load_weights

    if name == SMALL:
        return load_weights(FigureNet(), weights or str(WEIGHTS))
    network = MaskRcnn(published=not weights)
    if weights:
        load_weights(network.inner, weights)
    return network.eval()


class MaskRcnn(nn.Module):
    """Mask R-CNN with a ResNet-50 and FigureNet's interface; it reports people and animals."""

    def __init__(self, published: bool) -> None:
        """Loads the `published` weights, which are downloaded on first use. Raises LoadFailed."""
        from penstock.errors import LoadFailed

        super().__init__()
        try:
            from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights, maskrcnn_resnet50_fpn
        except ImportError:
            raise LoadFailed("network maskrcnn needs torchvision: pip install torchvision") from None
        state: Any = MaskRCNN_ResNet50_FPN_Weights.COCO_V1 if published else None
        self.inner = maskrcnn_resnet50_fpn(weights=state, weights_backbone=None, box_detections_per_img=MOST)
        self.most, self.cells = MOST, SIDE // 4
        self.halves = False  # torchvision computes boxes in the precision of the features

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same outputs as FigureNet's."""
        colours = images.permute(0, 3, 1, 2).flip(1).float() / 255  # red first
        pictures = [picture for picture in colours]
        if torch.jit.is_scripting():
            _, found = self.inner(pictures)
        else:
            found = self.inner(pictures)
        scores, classes, boxes, masks = [], [], [], []
        for one in found:
            label = one["labels"]  # of 90 classes: 1 is a person, 16 to 25 are animals
            known = torch.nonzero((label == 1) | ((label >= 16) & (label < 26))).flatten()
            free = self.most - len(known)
            scores.append(functional.pad(one["scores"][known], [0, free]))
            classes.append(functional.pad((label[known] != 1).long(), [0, free]))
            boxes.append(functional.pad(one["boxes"][known], [0, 0, 0, free]))
            cells = colours.new_zeros((0, self.cells, self.cells))
            if len(known) > 0:
                cells = functional.avg_pool2d(one["masks"][known], 4)[:, 0]
            masks.append(functional.pad((cells * 255).to(torch.uint8), [0, 0, 0, 0, 0, free]))
        return torch.stack(scores), torch.stack(classes), torch.stack(boxes), torch.stack(masks)
