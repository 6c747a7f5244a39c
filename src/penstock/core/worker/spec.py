"""What a worker needs to load a model and run batches. Sent to the child pickled."""

from typing import Any

from msgspec import Struct, field

from penstock.config.schema import ModelConfig


class Wrapped(Struct):
    """A wrapped target: `wrapper` ("pkg.mod:obj") makes the model from the target and the arguments."""

    target: Any
    wrapper: str
    arguments: dict[str, Any] = field(default_factory=dict)


class WorkerSpec(Struct):
    """`target` is "app.py:obj", "pkg.mod:obj", the function, class or object itself, Wrapped, or one of these pickled.

    `instances` counts all workers of the model, so that they can share the cores; the engine keeps it current.
    `sys_path` is prepended to the child's own.
    """

    name: str
    version: str
    config: ModelConfig
    target: Any
    instances: int = 1
    sys_path: list[str] = field(default_factory=list)
    wants_headers: bool = False
    capture_output: bool = False  # log the output of a worker process, line by line, to "penstock.model"
    lends: bool = False  # large objects stay in shared memory, see `wire.lending`
    traced: bool = False  # spans of a worker process leave with its metrics
    log_level: str = ""  # also log the records of a worker process from this level on, under their own names; "": none
