"""The built-in handler `image_classifier`."""

from __future__ import annotations

from typing import Any

import torch

from penstock.torchserve.ts.handler_utils.timer import timed
from penstock.torchserve.ts.torch_handler.transforms import image_pipeline
from penstock.torchserve.ts.torch_handler.vision_handler import VisionHandler
from penstock.torchserve.ts.utils.util import map_class_to_label


class ImageClassifier(VisionHandler):
    """Images to {label: probability} of the `topk` most probable classes."""

    topk = 5
    image_processing = image_pipeline()

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    @timed
    def postprocess(self, data: Any) -> Any:
        """`data` are the model's scores, `[rows, classes]`."""
        probabilities, classes = torch.topk(torch.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
