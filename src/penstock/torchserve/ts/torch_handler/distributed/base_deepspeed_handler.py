"""What handlers of models on several GPUs by DeepSpeed derive from."""

from __future__ import annotations

import os
from abc import ABC
from typing import Any

from penstock.torchserve.ts.torch_handler.base_handler import BaseHandler


class BaseDeepSpeedHandler(BaseHandler, ABC):
    """`device` is the process's own GPU, as a number. The derived handler loads the model."""

    def initialize(self, ctx: Any) -> None:
        self.device = int(os.environ.get("LOCAL_RANK", "0"))
