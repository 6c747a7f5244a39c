"""A handler for `digits_model.py`: receives 28 x 28 bytes, returns the most likely digit."""

from __future__ import annotations

from typing import Any

import torch
from ts.torch_handler.base_handler import BaseHandler


class DigitsHandler(BaseHandler):
    def initialize(self, context: Any) -> None:
        torch.set_num_threads(1)  # as many workers as cores, or more
        super().initialize(context)

    def preprocess(self, data: list[dict[str, Any]]) -> torch.Tensor:
        images = [torch.frombuffer(row["body"], dtype=torch.uint8) for row in data]
        return torch.stack(images).reshape(-1, 1, 28, 28).to(self.device, torch.float32) / 255

    def postprocess(self, data: torch.Tensor) -> list[int]:
        return data.argmax(1).tolist()
