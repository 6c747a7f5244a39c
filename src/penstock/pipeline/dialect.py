"""TorchPipe's TOML dialect: its keys, and the translation of a table to native keys.

docs/migrate-from-torchpipe.md shows the table of keys. A test keeps both equal.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from msgspec import Struct

from penstock.config.toml import found
from penstock.core.worker.devices import visible_gpus
from penstock.errors import ConfigError
from penstock.pipeline.keys import Key, TomlSource

KeyState = Literal["used", "accepted", "ignored", "not supported"]


class TorchPipeKey(Struct, frozen=True):
    """A key of TorchPipe's files.

    "accepted" keys are kept, but a graph that has them does not run yet. "ignored" keys cause a warning, and
    "not supported" keys an error.
    """

    name: str
    state: KeyState
    means: str
    native: str = ""


def _keys(state: KeyState, *rows: tuple[str, ...]) -> list[TorchPipeKey]:
    return [TorchPipeKey(row[0], state, row[1], row[2] if len(row) > 2 else "") for row in rows]


_TORCHPIPE = [
    *_keys(
        "used",
        ("backend", "expression of ops", "backend"),
        ("next", "text with commas, or a list", "next"),
        ("map", "`src[srckey:dstkey,...],...`; the node may be omitted if there is only one", "inputs"),
        ("filter", "`swap`, `or` and `run`; others are accepted, but rejected when run", "filter"),
        ("or", "true means `filter = \"or\"`", "filter"),
        ("instance_num", "", "instances"),
        ("max", "a number, or a shape whose first number counts; `;` separates the sizes of instances", "max_batch"),
        ("min", "as `max`", "min_batch"),
        ("batching_timeout", "milliseconds, with fractions", "wait_ms"),
        ("device_id", "cuda:N; without a GPU the CPU, with a warning", "device"),
        ("model", "parameter of the model op; relative paths start at the file's folder"),
        ("model::cache", "parameter of the model op; used only after a sidecar file confirms it", "model_cache"),
        ("precision", "parameter of the model op; fp16 on a CPU runs in fp32, with a warning"),
        ("mean", "parameter of the model op"),
        ("std", "parameter of the model op"),
        ("input_reorder", "parameter of the model op"),
        ("output_reorder", "parameter of the model op"),
        ("color", "parameter of CvtColorMat"),
        ("data_format", "parameter of Mat2Tensor"),
        ("resize_h", "parameter of the resizing ops"),
        ("resize_w", "parameter of the resizing ops"),
        ("node_name", "in an item: the node where it begins"),
    ),
    *_keys(
        "accepted",
        ("jump", "the node where the items of a fan-out begin", "body"),
        ("split", "the field whose elements become items", "each"),
        ("merge", "the fields gathered from these items", "gather"),
    ),
    *_keys(
        "ignored",
        ("Interpreter::backend", "there is one way to run nodes"),
        ("Interpreter::env", "set environment variables before the server starts"),
        ("PipelineV3::backend", "there is one way to run nodes"),
        ("Schedule::backend", "there is one way to form batches"),
        ("scheduler", "there is one way to form batches"),
        ("node_entrypoint", "there is one way to run nodes"),
        ("entrypoint", "there is one way to run nodes"),
        ("force_range", "batches are formed from the items that wait"),
        ("fake_instance_num", "instances are threads; set `sizes` for sizes"),
        ("number_factor", "batches have one shape without sorting"),
        ("model::timingcache", "kept next to the engine"),
        ("max_workspace_size", "left to the runtime"),
        ("weight_budget_percentage", "left to the runtime"),
        ("batch_process", "the runner forms batches"),
        ("allocator", "left to the runtime"),
        ("log_level", "see logging"),
        ("Logger::path", "see logging"),
        ("Logger::level", "see logging"),
        ("priority", "the runtime controls its streams"),
        ("register_config", "Python backends are found by name"),
        ("model_type", "the file extension determines it"),
    ),
    *_keys(
        "not supported",
        ("split_size", "it belongs to a test backend"),
        ("instances_grp", "instances belong to one node"),
        ("active_instances_grp", "instances belong to one node"),
        ("borrow_from", "instances belong to one node; a table `[rec.2]` is an alias of `rec`"),
        ("request_size", "an item counts as one"),
        ("cal_request_size_method", "an item counts as one"),
        ("contiguous_batching", "serve language models as separate models"),
        ("restart", "serve language models as separate models"),
        ("calibrate_input", "int8 engines are built from quantized ONNX files"),
        ("calibrate_cache", "int8 engines are built from quantized ONNX files"),
        ("preprocessor", "write an op before the model"),
        ("postprocessor", "write an op after the model, such as SoftmaxCpu"),
        ("precision::fp32", "layers keep the precision of their file"),
        ("precision::fp16", "layers keep the precision of their file"),
        ("precision::output::fp32", "layers keep the precision of their file"),
        ("precision::output::fp16", "layers keep the precision of their file"),
        ("force_layer_norm_pattern_fp32", "layers keep the precision of their file"),
    ),
]  # fmt: skip
TORCHPIPE = {key.name: key for key in _TORCHPIPE}
"""All known keys of TorchPipe's files, by name."""

TASK_KEYS = {
    "BOX": "_box",
    "CONTEXT": "context",
    "CPU_RESULT": "cpu_result",
    "DATA": "data",
    "DEFAULT_NAME": "_default_node_name",
    "EVENT": "event",
    "INFO": "_info",
    "NODE_NAME": "node_name",
    "REQUEST": "request",
    "REQUEST_SIZE": "request_size",
    "RESTART": "restart",
    "RESULT": "result",
    "STACK": "_stack",
    "TMP": "tmp",
}
"""Field names by the middle part of TorchPipe's constants: `TASK_DATA_KEY` is `data`."""

_TASK_KEY = re.compile(r"\bTASK_([A-Z_]+?)_KEY\b")
_MAP_PART = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]")
_RENAMED = {
    "instance_num": "instances",
    "batching_timeout": "wait_ms",
    "jump": "body",
    "split": "each",
    "merge": "gather",
}
_MAY_HAVE_BARS = ("map", "model", "model::cache")  # `map` reports them itself, and paths may contain them
_PER_OP_VALUES = "values per op ('|') are not read: write them at the ops, as in ResizeMat(resize_h=224)"
_GROUPS = "groups of a node ('&') are not supported: write one value"


def native_table(table: dict[str, Any], node: str, source: TomlSource) -> dict[str, Any]:
    """The table with native keys instead of TorchPipe's. Other keys stay. Raises ConfigError."""
    given: dict[str, Any] = {}
    for key, value in table.items():
        known = TORCHPIPE.get(key)
        if known is not None and known.state == "not supported":
            raise source.error(node, key, f"is not supported: {known.means}")
        if known is not None and known.state == "ignored":
            source.warn(node, key, f"has no meaning here and is ignored: {known.means}")
            continue
        if key == "node_name" and value == node:  # TorchPipe's parse_toml writes it
            continue
        given[key] = _with_field_names(value, node, key, source)
    native: dict[str, Any] = {}
    for key, value in given.items():
        known_before = set(native)
        try:
            _add(native, key, value, given)
        except ConfigError as e:
            raise source.error(node, key, e.message) from None
        for name in native.keys() - known_before - {key}:
            source.renamed(node, name, key)
        if key == "device_id" and native["device"] == "cpu":
            source.warn(node, key, "there is no GPU: the node runs on the CPU")
    return native


def _with_field_names(value: Any, node: str, key: str, source: TomlSource) -> Any:
    """The value with field names instead of TASK_..._KEY."""
    if not isinstance(value, str):
        return value

    def field(match: re.Match[str]) -> str:
        if match[1] not in TASK_KEYS:
            known = ", ".join(f"TASK_{name}_KEY" for name in TASK_KEYS)
            raise source.error(node, key, f"found {match[0]}, expected one of {known}")
        return TASK_KEYS[match[1]]

    return _TASK_KEY.sub(field, value)


def _add(native: dict[str, Any], key: str, value: Any, given: dict[str, Any]) -> None:
    if isinstance(value, str) and key in TORCHPIPE:
        if "&" in value:
            raise ConfigError(f"found {found(value)}: {_GROUPS}")
        if "|" in value and key not in _MAY_HAVE_BARS:
            raise ConfigError(f"found {found(value)}: {_PER_OP_VALUES}")
    match key:
        case "max" | "min":
            entries = _batch(key, value)
        case "map":
            entries = {"inputs": map_inputs(value)}
        case "device_id":
            entries = {"device": _device(value)}
        case "or":
            entries = {"filter": "or"} if Key(bool, "").read(value) else {}
        case _:
            entries = {_RENAMED.get(key, key): value}
    for name in entries:
        if name in native or (name != key and name in given):
            raise ConfigError(f"is another spelling of '{name}', which is also set; remove one of them")
    native.update(entries)


def _batch(key: str, value: Any) -> dict[str, Any]:
    """The native keys for `max` and `min`.

    The value is a number, or a shape `4x3x224x224` whose first number is the batch's. `;` separates instances, and `,`
    the inputs of the model, which must agree.
    """
    instances = [{_first(shape, value) for shape in part.split(",")} for part in str(value).split(";")]
    if any(len(inputs) > 1 for inputs in instances):
        raise ConfigError(f"found {found(value)}, expected the same batch for each input of the model")
    sizes = sorted({size for inputs in instances for size in inputs})
    if key == "min":
        return {"min_batch": sizes[0]}
    return {"max_batch": sizes[-1]} | ({"sizes": sizes} if len(sizes) > 1 else {})


def _first(shape: str, value: Any) -> int:
    numbers = shape.strip().split("x")
    if not all(n.strip().isdecimal() for n in numbers) or int(numbers[0]) < 1:
        raise ConfigError(f"found {found(value)}, expected a whole number, 1 or more, or a shape such as 4x3x224x224")
    return int(numbers[0])


def _device(value: Any) -> str:
    text = str(value).strip()
    if not text.isdecimal():
        raise ConfigError(f"found {found(value)}, expected the number of a GPU, such as 0")
    return f"cuda:{text}" if visible_gpus() else "cpu"


def map_inputs(value: Any) -> dict[str, str]:
    """`src[srckey:dstkey,...],...` as `{dstkey: "src.srckey"}`; without a node name, as `{dstkey: ".srckey"}`."""
    text = "".join(str(value).split())
    parts = _MAP_PART.findall(text)
    if not parts or ",".join(f"{node}[{pairs}]" for node, pairs in parts) != text.strip(","):
        raise ConfigError(f"found {found(value)}, expected for instance prep[result:data,box:box]")
    inputs: dict[str, str] = {}
    for node, pairs in parts:
        for pair in filter(None, pairs.split(",")):
            source, colon, name = pair.partition(":")
            if not colon or not source or not name or ":" in name or "|" in pair:
                raise ConfigError(f"found '{pair}', expected a pair such as result:data")
            if name in inputs:
                raise ConfigError(f"found the field '{name}' twice; each may come from one place")
            inputs[name] = f"{node}.{source}"
    return inputs
