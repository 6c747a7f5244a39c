"""How long the steps of a handler take, when its model-config.yaml asks: `handler: {profile: true}`."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of a handler's method: its time goes to the metric `ts_handler_<name>`, in ms, if that is asked.

    The work of a GPU is waited for, before and after.
    """

    @functools.wraps(function)
    def timing(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = self.context
        if not context or not (context.model_yaml_config.get("handler") or {}).get("profile"):
            return function(self, *args, **kwargs)
        _wait_for_gpu()
        start = time.perf_counter()
        result = function(self, *args, **kwargs)
        _wait_for_gpu()
        context.metrics.add_time(f"ts_handler_{function.__name__}", (time.perf_counter() - start) * 1000)
        return result

    return timing


def _wait_for_gpu() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
