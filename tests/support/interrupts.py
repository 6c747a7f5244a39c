"""A signal handler that raises at a chosen instruction of some modules, as Ctrl-C may."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupt(instruction: int, watched: Sequence[Any]) -> Iterator[list[str]]:
    """Raises KeyboardInterrupt at the `instruction`-th one of the `watched` modules in this thread, from 1. Yields a
    list that names the function then; it stays empty if there are fewer."""
    files = {module.__file__ for module in watched}
    left, raised = instruction, []

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0:
            left = -1
            raised.append(frame.f_code.co_name)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)
