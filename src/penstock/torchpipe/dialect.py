"""TorchPipe's TOML dialect: its keys, and the translation of a table to native keys.

docs/migrate-from-torchpipe.md shows the table of keys. A test keeps both equal.
"""

import re
from typing import Any, Literal

from msgspec import Struct

from penstock.core.worker.devices import visible_gpus
from penstock.errors import ConfigError
from penstock.pipeline.notation import Dialect, Key, TomlSource
from penstock.torchpipe import expressions, ops
from penstock.values import found

KeyState = Literal["used", "ignored", "rewritten", "not supported"]


class TorchPipeKey(Struct, frozen=True):
    """A key of TorchPipe's files.

    "ignored" keys change no result and cause a warning. "rewritten" keys become others before they are read (see
    `expressions`). "not supported" keys cause an error with the reason `why`.
    """

    name: str
    state: KeyState
    why: str


def _keys(state: KeyState, *rows: tuple[str, str]) -> list[TorchPipeKey]:
    """The keys of rows: names with spaces between, and the reason."""
    return [TorchPipeKey(name, state, why) for names, why in rows for name in names.split()]


_TORCHPIPE = [
    *_keys(
        "used",
        ("backend next map filter or instance_num max min batching_timeout device_id node_name", ""),
        ("model model::cache precision mean std input_reorder output_reorder", ""),  # of ops, as those that follow
        ("color data_format resize_h resize_w split_size", ""),
        ("jump split merge", ""),
    ),
    *_keys(
        "ignored",
        ("model::timingcache", "kept next to the engine"),
        ("max_workspace_size weight_budget_percentage allocator", "left to the runtime"),
        ("log_level Logger::path Logger::level", "see logging"),
        ("priority", "the runtime controls its streams"),
        ("force_range range", "batches are formed from the items that wait"),
        ("fake_instance_num", "`max` and `min` give the sizes of batches"),
        ("number_factor", "batches have one shape without sorting"),
        ("request_size", "each row of a tensor counts"),
        ("calibrate_input calibrate_cache", "int8 engines are built from quantized ONNX files"),
        ("precision::fp16 precision::output::fp16", "the node has one precision"),
        ("opt save_engine", "left to the runtime; see model::cache"),
    ),
    *_keys(
        "rewritten",
        ("Interpreter::backend PipelineV3::backend Schedule::backend scheduler node_entrypoint entrypoint", ""),
        ("preprocessor pre_processor batch_process postprocessor post_processor model_type", ""),
        ("precision::fp32 precision::output::fp32 force_layer_norm_pattern_fp32", ""),
        ("instances_grp active_instances_grp borrow_from", ""),
    ),
    *_keys(
        "not supported",
        ("Interpreter::env", "set environment variables before the server starts"),
        ("register_config", "it is of C++ backends; name a Python one in `backend`"),
        ("cal_request_size_method", "each row of a tensor counts; other weights need C++"),
        ("contiguous_batching restart", "serve language models as separate models"),
    ),
]  # fmt: skip
TORCHPIPE = {key.name: key for key in _TORCHPIPE}
"""All known keys of TorchPipe's files, by name."""

NO_EFFECT = {
    "Interpreter::env": ("Logger", "FileLogger", "SpdLogger"),
    "cal_request_size_method": ("CalTorchBatchSize", "AddRequestSizeTensor"),
    "contiguous_batching": (0, "0", False),
}
"""Values of keys that are not supported otherwise: they name what happens anyway."""

TASK_KEYS = {
    name.upper(): name
    for name in (
        "context", "cpu_result", "data", "event", "node_name", "request", "request_size", "restart", "result", "tmp",
    )
} | {"BOX": "_box", "DEFAULT_NAME": "_default_node_name", "INFO": "_info", "STACK": "_stack"}  # fmt: skip
"""Field names by the middle part of TorchPipe's constants: `TASK_DATA_KEY` is `data`."""

_TASK_KEY = re.compile(r"\bTASK_([A-Z_]+?)_KEY\b")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?")
_MAP_PART = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]")
_RENAMED = {
    "instance_num": "instances",
    "batching_timeout": "wait_ms",
    "jump": "body",
    "split": "each",
    "merge": "gather",
}


def native_table(table: dict[str, Any], node: str, source: TomlSource) -> dict[str, Any]:
    """The table with native keys instead of TorchPipe's. Other keys stay. Raises ConfigError."""
    given: dict[str, Any] = {}
    table = {key: _of_groups(key, value, node, source) for key, value in table.items()}
    for key, value in expressions.with_backend(table, node, source).items():
        known = TORCHPIPE.get(key)
        if known is not None and value in NO_EFFECT.get(key, ()):
            source.warn(node, key, f"is ignored: {known.why}")
            continue
        if known is not None and known.state == "not supported":
            raise source.error(node, key, f"is not supported: {known.why}")
        if known is None and key.endswith("::backend"):
            outer = key.removesuffix("::backend")
            raise source.error(node, key, f'is not supported: write backend = "{outer}[{value}]"')
        if known is not None and known.state == "ignored":
            source.warn(node, key, f"has no meaning here and is ignored: {known.why}")
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


def _of_groups(key: str, value: Any, node: str, source: TomlSource) -> Any:
    """The value of a node whose instances are groups, as in `model = "1.onnx&4.onnx"`: each runs other batch sizes.

    Each instance here has all of them.
    """
    if not isinstance(value, str) or "&" not in value or key not in TORCHPIPE:
        return value
    groups = ["".join(group.split()) if key == "backend" else group.strip() for group in value.split("&")]
    match key:
        case "model" | "model::cache":
            return groups
        case "max" | "min":
            return ";".join(groups)
        case "instance_num" | "batching_timeout" if all(_NUMBER.fullmatch(group) for group in groups):
            return max(groups, key=float)
    if len(set(groups)) > 1:
        varied = "model, model::cache, max, min, instance_num and batching_timeout"
        raise source.error(node, key, f"found {found(value)}: groups of a node ('&') may have other {varied} only")
    return groups[0]


def _with_field_names(value: Any, node: str, key: str, source: TomlSource) -> Any:
    """The value with field names instead of TASK_..._KEY."""
    if not isinstance(value, str):
        return value

    def field(match: re.Match[str]) -> str:
        if match[1] not in TASK_KEYS:
            known = ", ".join(f"TASK_{name}_KEY" for name in sorted(TASK_KEYS))
            raise source.error(node, key, f"found {match[0]}, expected one of {known}")
        return TASK_KEYS[match[1]]

    return _TASK_KEY.sub(field, value)


def _add(native: dict[str, Any], key: str, value: Any, given: dict[str, Any]) -> None:
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


DIALECT = Dialect(
    keys=frozenset(TORCHPIPE),
    used_keys=tuple(key.name for key in TORCHPIPE.values() if key.state == "used"),
    tables=lambda tables, source: expressions.with_calls(expressions.with_instances(tables, source)),
    table=native_table,
    flatten=expressions.flattened,
    place=expressions.set_places,
    fan_out=expressions.without_calls,
    ops=ops.OPS,
    absent_ops={name.lower(): why for name, why in ops.NOT_HERE.items()},
    filters=ops.FILTERS,
    filter_names=ops.FILTER_NAMES,
)
