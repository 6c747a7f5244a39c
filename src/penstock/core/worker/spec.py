"""What a worker must know to load a model and run batches. Crosses to the child as msgpack (target may be pickled)."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from penstock.config.schema import ModelConfig


class Wrapped(Struct):
    """A target that is not called as it is: `wrapper`, "pkg.mod:obj", makes the model of it and of the arguments."""

    target: Any
    wrapper: str
    arguments: dict[str, Any] = field(default_factory=dict)


class WorkerSpec(Struct):
    """`target` is "app.py:obj", "pkg.mod:obj", the function, class or object itself, Wrapped, or one of these pickled.

    `instances` counts all workers that the model is to have, so that threads can be shared out; the engine keeps it up
    to date. `sys_path` is put in front of the child's own.
    """

    name: str
    version: str
    config: ModelConfig
    target: Any
    instances: int = 1
    sys_path: list[str] = field(default_factory=list)
    wants_headers: bool = False
    capture_output: bool = False  # what the worker prints goes line by line to the logger "penstock.model"
