"""A handler for `resnet_model.py`: receives 3 x 224 x 224 bytes, returns the most likely class.

`model-config.yaml` sets `precision` (fp32, fp16) and `compile`.
"""

from __future__ import annotations

from typing import Any

import torch
from ts.torch_handler.base_handler import BaseHandler

SHAPE = (3, 224, 224)


class ResNetHandler(BaseHandler):
    def initialize(self, context: Any) -> None:
        super().initialize(context)
        config = context.model_yaml_config
        self.dtype = torch.float16 if config["precision"] == "fp16" else torch.float32
        self.model = self.model.to(dtype=self.dtype, memory_format=torch.channels_last)
        if config["compile"]:
            self.model = torch.compile(self.model, dynamic=False)
        size = context.system_properties["batch_size"]
        self.least = size if config["compile"] else 1  # images a call: one shape, so that nothing is compiled twice
        with torch.inference_mode():
            for _ in range(3):
                self.model(torch.zeros((size, *SHAPE), dtype=self.dtype, device=self.device))

    def preprocess(self, data: list[dict[str, Any]]) -> torch.Tensor:
        self.count = len(data)
        images = torch.zeros((max(self.count, self.least), *SHAPE), dtype=torch.uint8)
        for image, row in zip(images, data, strict=False):
            image.copy_(torch.frombuffer(row["body"], dtype=torch.uint8).reshape(SHAPE))
        return images.to(self.device).to(self.dtype) / 255

    def postprocess(self, data: torch.Tensor) -> list[int]:
        return data[: self.count].argmax(1).tolist()
