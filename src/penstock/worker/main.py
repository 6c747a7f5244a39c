"""What a worker does before its first batch: finds the target, loads the model, warms it up."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from penstock.config.schema import with_options
from penstock.errors import LoadFailed, PenstockError, describe
from penstock.models.python import PythonModel, options_of
from penstock.plugins import load_object, raised_at
from penstock.types import Ready
from penstock.wire.messages import Pickled
from penstock.worker.loop import BatchRunner
from penstock.worker.profile import warm_up
from penstock.worker.spec import WorkerSpec, Wrapped


def open_model(spec: WorkerSpec, device: str, shown_device: str | None = None) -> tuple[BatchRunner, Ready]:
    """A runner around the loaded model, and what is told of it.

    `device` is handed to `load`; `shown_device` is its name outside of this process, when that is another one.
    Raises LoadFailed, TargetNotFound, ConfigError.
    """
    add_paths(spec.sys_path)
    # the parser of forms warns of every malformed body; a request is never logged above DEBUG
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    try:
        target = _found(spec.target)
        options = options_of(target)
        batching = with_options(spec.config.batching, options)
        model = PythonModel(target, precision=spec.config.precision, optimize=spec.config.optimize)
        model.load(device)
        metadata = model.metadata(spec.name, spec.version)
        runner = BatchRunner(model, metadata, batching)
        profile, best = warm_up(runner, batching)
    except PenstockError:
        raise
    except SystemExit as e:
        raise LoadFailed(f"loading '{spec.name}' called sys.exit({e.code})") from e
    except Exception as e:
        text = "".join(traceback.format_exception(e))
        raise LoadFailed(f"loading '{spec.name}' raised {describe(e)}{raised_at(e)}", detail=text) from e
    return runner, Ready(metadata, shown_device or device, os.getpid(), options, profile, best)


def _found(target: Any) -> Any:
    """The function, class or object that a spec's target means."""
    if isinstance(target, Pickled):
        return _found(target.load())
    if isinstance(target, Wrapped):
        wrap: Any = load_object(target.wrapper)
        return wrap(_found(target.target), **target.arguments)
    return load_object(target) if isinstance(target, str) else target


def add_paths(paths: Sequence[str]) -> None:
    """Puts `paths` in front of `sys.path`, in their order, those that are not there yet."""
    sys.path[:0] = [p for p in paths if p not in sys.path]
