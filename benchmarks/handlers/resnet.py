"""A handler of `resnet_model.py`: 3 x 224 x 224 bytes in, the number of the likeliest class out.

`model-config.yaml` says `precision` (fp32, fp16) and `compile`.
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
        self.size = context.system_properties["batch_size"]
        with torch.inference_mode():
            for _ in range(3):
                self.model(self._room())

    def _room(self) -> torch.Tensor:
        return torch.zeros((self.size, *SHAPE), dtype=self.dtype, device=self.device)

    def preprocess(self, data: list[dict[str, Any]]) -> torch.Tensor:
        images = torch.stack([torch.frombuffer(row["body"], dtype=torch.uint8) for row in data])
        self.count, room = len(data), self._room()  # of one size, so that nothing is compiled twice
        room[: self.count] = images.reshape(-1, *SHAPE).to(self.device).to(self.dtype) / 255
        return room

    def postprocess(self, data: torch.Tensor) -> list[int]:
        return data[: self.count].argmax(1).tolist()
