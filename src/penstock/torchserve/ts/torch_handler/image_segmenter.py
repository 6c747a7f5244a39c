"""The built-in handler `image_segmenter`."""

from __future__ import annotations

from typing import Any

import torch

from penstock.torchserve.ts.torch_handler.transforms import image_pipeline
from penstock.torchserve.ts.torch_handler.vision_handler import VisionHandler


class ImageSegmenter(VisionHandler):
    """Images to the class and its probability of each pixel, `[height][width][class, probability]`."""

    image_processing = image_pipeline()

    def postprocess(self, data: Any) -> Any:
        """`data["out"]` are the model's scores, `[rows, classes, height, width]`."""
        best = torch.max(torch.softmax(data["out"], dim=1), dim=1)
        return torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()
