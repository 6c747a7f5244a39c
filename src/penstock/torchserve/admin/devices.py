"""Where workers belong: the GPUs that may be used, and in which turn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from penstock.core.worker.devices import visible_gpus
from penstock.torchserve.admin.settings import Settings


def usable_gpus(most: int | None, environment: Mapping[str, str] = os.environ, found: int | None = None) -> int:
    """GPUs that may be used: those that there are, that CUDA_VISIBLE_DEVICES shows, and at most `number_of_gpu`."""
    count = visible_gpus(environment, found)
    return count if most is None else min(count, most)


class Devices:
    """Hands out devices, one GPU after the other over all models; a model with deviceIds has its own."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._next = 0

    def kind(self, settings: Settings) -> str:
        """ "gpu" or "cpu": what the model's workers run on."""
        return "cpu" if not self.gpus or settings.device_type == "cpu" else "gpu"

    def take(self, settings: Settings, workers: int) -> tuple[str, ...]:
        """The devices of a model that starts so many workers, in their turn."""
        if self.kind(settings) == "cpu":
            return ("cpu",)
        own = [i for i in settings.device_ids if i < self.gpus]
        if own:
            return _named(own)
        first = self._next
        self._next = (first + workers) % self.gpus
        return _named([(first + i) % self.gpus for i in range(self.gpus)])


def _named(ids: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"cuda:{i}" for i in ids)
