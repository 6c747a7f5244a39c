"""Pickles in a broker's messages, in a file of its own that only programs with `allow_pickle` load.

Loading a pickle can run any code, so everyone who can write to the broker can then run code in callers and workers.
"""

import pickle
from typing import Any


def dumps(value: Any) -> bytes:
    """Raises the errors of pickle."""
    return pickle.dumps(value, 5)


def loads(data: memoryview) -> Any:
    """Raises the errors of pickle, and of the objects."""
    return pickle.loads(data)
