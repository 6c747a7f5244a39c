"""What handlers of models on several GPUs by PiPPy derive from."""

from __future__ import annotations

import os
from abc import ABC
from typing import Any

from penstock.torchserve.ts.handler_utils.distributed.pt_pippy import initialize_rpc_workers
from penstock.torchserve.ts.torch_handler.base_handler import BaseHandler


class BasePippyHandler(BaseHandler, ABC):
    """`device` is the process's own GPU, as a number. The derived handler loads the model."""

    def initialize(self, ctx: Any) -> None:
        import torch

        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.device = self.local_rank % torch.cuda.device_count()
        initialize_rpc_workers(self.local_rank, self.world_size, ctx)
