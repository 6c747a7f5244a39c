"""How long a call took, for people who look at a log."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


def timeit(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the time and the CPU time of each call are printed."""

    @functools.wraps(function)
    def timing(*args: Any, **kwargs: Any) -> Any:
        start, start_cpu = time.perf_counter(), time.process_time()
        result = function(*args, **kwargs)
        wall_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
        print(f"{function.__name__!r} took {wall_s:.4f} s, and {cpu_s:.4f} s of CPU time")
        return result

    return timing
