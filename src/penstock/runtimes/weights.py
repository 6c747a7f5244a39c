"""Weights once in a process: modules on the same device with equal parameters use the same memory.

So instances of the thread transport take the memory of one, and one copy of the weights in the caches of the processor.
Each has a module of its own, because a module may keep state in its buffers or attributes while it runs; nothing writes
parameters then. Only equality decides, so it does not matter whether files or random numbers gave the weights.
"""

import threading
import weakref
from typing import Any, Final

_lock: Final = threading.Lock()
_loaded: dict[Any, weakref.WeakSet[Any]] = {}  # modules, by the names, shapes, dtypes and devices of their parameters


def share(module: Any) -> None:
    """Has a module of PyTorch that nothing else uses take the parameters of one before it, if they are equal."""
    import torch

    plain = (torch.nn.Parameter, torch.Tensor)  # not those of subclasses, such as quantised ones
    own = {n: p for n, p in module.named_parameters() if type(p) in plain and not p.is_meta}
    key = tuple((name, p.shape, p.dtype, p.device) for name, p in own.items())
    if not key:
        return
    with _lock:
        others = _loaded.setdefault(key, weakref.WeakSet())
        for other in [*others]:
            known = dict(other.named_parameters())
            if all(torch.equal(p, known[name]) for name, p in own.items()):
                for name, p in own.items():
                    p.data = known[name].data
                break
        others.add(module)
        for gone in [kind for kind, modules in _loaded.items() if not modules]:
            del _loaded[gone]
