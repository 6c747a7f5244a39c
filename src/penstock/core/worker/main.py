"""Start of a worker: finds the target, loads the model and warms it up."""

import logging
import os
import sys
import threading
import traceback
from functools import partial
from typing import Any

from msgspec import structs

from penstock import errors, metrics
from penstock.config.checks import read_labels
from penstock.config.inputs import images_in, input_texts
from penstock.config.schema import BatchingConfig, check_lengths, with_options
from penstock.core.batching.ladder import DEFAULT_BATCH, Ladder, ladder_of
from penstock.core.wire.messages import Pickled
from penstock.core.worker import nesting
from penstock.core.worker.devices import runtime_threads
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.profile import RowsCoupled, warm_up
from penstock.core.worker.python_model import Helpers, PythonModel, Tensors, is_torch_module
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.plugins import is_model_file, is_pipeline_file, load_object, raised_at, resolve
from penstock.types import Graphs, ModelMetadata, Ready

log = logging.getLogger("penstock.worker")


def open_model(spec: WorkerSpec, device: str, shown_device: str | None = None) -> tuple[BatchRunner, Ready]:
    """A runner around the loaded model, and its Ready message.

    `load` receives `device`; `shown_device` is its name outside this process, if that differs.
    Raises LoadFailed, TargetNotFound, ConfigError.
    """
    sys.path[:0] = [path for path in spec.sys_path if path not in sys.path]
    helpers, opened = None, False
    # the form parser warns about every malformed body, but a request is never logged above DEBUG
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    try:
        target, tensors = _model(_found(spec.target, spec), spec)
        if nesting.importing == threading.get_ident():  # a module may run threads while it is imported
            nesting.importing = 0
        config = spec.config
        extras = {"precision": config.precision, "optimize": config.optimize, "trust": config.trust}
        options = config.options
        named = spec.target.target if isinstance(spec.target, Wrapped) else spec.target
        if isinstance(named, str) and is_pipeline_file(named):
            options = {**options, "file": named}
        model = PythonModel(target, options, tensors, **extras, threads=partial(runtime_threads, spec))
        if config.preprocess_processes:
            model.helpers = helpers = _helpers(spec, target)
        model.load(device)
        recorded = metrics.drain() or []  # before the warm-up, whose metrics do not count
        declared = model.declared_options()
        batching = with_options(spec.config.batching, declared)
        check_lengths(batching)
        if config.transport != "process" and batching.concurrency not in ("auto", 1):
            raise errors.LoadFailed(f"concurrency = {batching.concurrency} needs transport = 'process'")
        model.begin_loop(batching)
        model.pad(_ladder(batching, None))
        metadata = _metadata(model, spec)
        runner = BatchRunner(model, metadata, batching)
        coupled = ""
        try:
            profile, best = warm_up(runner, batching)
        except RowsCoupled as e:
            if isinstance(batching.sizes, tuple):
                why = (
                    'so batches cannot be padded; leave the key out, or set rows = "axis0" if its rows are independent'
                )
                raise errors.LoadFailed(f"batching.sizes: {e}, {why}") from e
            coupled, declared = str(e), {**declared, "rows": "none"}
            batching = with_options(spec.config.batching, declared)
            model.unbatch()
            model.pad(None)
            runner.describe(_metadata(model, spec), batching)
            profile, best = warm_up(runner, batching)
        if model.ladder is None:
            model.pad(_ladder(batching, best or DEFAULT_BATCH))
            if model.graphs is not None and model.graphs.sizes:  # their times are others than those of the first runs
                profile, _ = warm_up(runner, structs.replace(batching, rows="axis0"))
        opened = True
    except errors.PenstockError:
        raise
    except SystemExit as e:
        raise errors.LoadFailed(f"loading '{spec.name}' called sys.exit({e.code})") from e
    except Exception as e:
        text = "".join(traceback.format_exception(e))
        kind = errors.LoadOutOfMemory if errors.out_of_memory(e) else errors.LoadFailed
        raise kind(f"loading '{spec.name}' raised {errors.describe(e)}{raised_at(e)}", detail=text) from e
    finally:
        if helpers is not None and not opened:
            helpers.close()
    ready = Ready(runner.metadata, shown_device or device, os.getpid(), declared, profile, best, metrics=recorded)
    ready.coupled, ready.graphs, ready.asks_requests = coupled, model.graphs, model.asks_requests
    if model.graphs is not None:
        _log_graphs(spec.name, model.graphs, asked=config.optimize == "graph")
    if model.ladder is not None:
        ready.sizes = model.ladder.sizes
        if not profile:
            log.warning(
                "sizes_not_warmed model=%s: the first batch of each size is slow; give it warmup() or declared inputs",
                spec.name,
            )
    return runner, ready


def _log_graphs(name: str, graphs: Graphs, asked: bool) -> None:
    if graphs.failed:
        log.warning("graphs_failed model=%s why=%r: its kernels are launched one by one", name, graphs.failed)
    elif not (graphs.sizes or graphs.short):
        why = "they need inputs of fixed shapes and batching.sizes, and its kernels are launched one by one"
        log.log(logging.WARNING if asked else logging.INFO, "graphs_none model=%s: %s", name, why)
    else:
        log.info("graphs_captured model=%s sizes=%s bytes=%d", name, graphs.sizes, graphs.memory_bytes)
    if graphs.short:
        why = "there is no memory for their graphs, and their kernels are launched one by one"
        log.warning("graphs_out_of_memory model=%s sizes=%s: %s", name, graphs.short, why)


def _ladder(batching: BatchingConfig, best: int | None) -> Ladder | None:
    """The ladder that a model's options ask for; `best`: the size of the warm-up, if it has ended."""
    most = best if batching.max_batch_size == "auto" else batching.max_batch_size
    return None if batching.rows == "none" else ladder_of(batching.sizes, most)


def _metadata(model: PythonModel, spec: WorkerSpec) -> ModelMetadata:
    """What the loaded model and its configuration declare. Raises LoadFailed, ConfigError."""
    config = spec.config
    found = model.metadata(spec.name, spec.version, config.task)
    outputs = [output.name for output in found.outputs]
    for name in config.labels:
        if outputs and name not in outputs:
            raise errors.ConfigError(f"labels.{name}: the model has no such output{errors.nearest(name, outputs)}")
    labels = {name: read_labels(path, f"labels.{name}") for name, path in config.labels.items()}
    keys = {name: getattr(config, name) for name in ("strict_json", "strict_parameters", "typed_contents")}
    return structs.replace(found, labels=labels, **keys)


def _found(target: Any, spec: WorkerSpec) -> Any:
    """The function, class, object or file model that a spec's target names."""
    if isinstance(target, Pickled):
        try:
            target = target.load()
        except AttributeError as e:
            if not str(e).startswith("Can't get attribute"):  # the module raised it
                raise
            advice = "define it at the top level of its file, not under if __name__ == '__main__'"
            raise errors.LoadFailed(f"the target is not found in a worker ({e}): {advice}") from e
        return _found(target, spec)
    if isinstance(target, Wrapped):
        wrap: Any = load_object(target.wrapper)
        return wrap(_found(target.target, spec), **target.arguments)
    if not isinstance(target, str):
        return target
    if is_model_file(target):
        return resolve("runtime", "file")(target, spec.config, runtime_threads(spec))
    if is_pipeline_file(target):
        return resolve("runtime", "pipeline")
    return load_object(target)


def _model(found: Any, spec: WorkerSpec) -> tuple[Any, dict[str, Tensors]]:
    """The found object with the configured tensors, or a model around it if it is a torch module without `predict`."""
    config = spec.config
    if config.weights is not None or (is_torch_module(found) and not hasattr(found, "predict")):
        return resolve("runtime", "module")(found, config, runtime_threads(spec)), {}
    taken = hasattr(found, "__penstock_takes__")  # by a model file, through its settings
    if taken:
        return found, {}
    for name in images_in(config.inputs):
        raise errors.ConfigError(
            f"inputs.{name}.layout: found for a Python model, which receives images as clients send them; leave layout,"
            " mean and std out, and normalise in the model"
        )
    return found, {"inputs": input_texts(config.inputs, "inputs"), "outputs": config.outputs}


def _helpers(spec: WorkerSpec, target: Any) -> Helpers:
    """Running processes for `preprocess` of a target. Raises LoadFailed for one without it, or that fails there."""
    if not callable(getattr(target, "preprocess", None)) or hasattr(target, "__penstock_columns__"):
        raise errors.LoadFailed(
            f"preprocess_processes: found {spec.config.preprocess_processes}, but '{spec.config.target}' is no Python"
            " class with preprocess(item); leave the key out"
        )
    try:
        helpers: Helpers = resolve("runtime", "preprocess")(spec)
    except errors.PenstockError as e:
        raise errors.LoadFailed(f"preprocess_processes: {e.message}", detail=e.detail) from e
    return helpers
