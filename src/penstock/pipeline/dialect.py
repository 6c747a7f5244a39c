"""TorchPipe's spelling of a table, as native keys: names, separators, shapes, `map`."""

from __future__ import annotations

import re
from typing import Any

from penstock.config.toml import found
from penstock.core.worker.devices import visible_gpus
from penstock.errors import ConfigError
from penstock.pipeline.keys import Key, Source, torchpipe_key

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
"""Fields by the middle of the names that TorchPipe gives them: `TASK_DATA_KEY` is `data`."""

_TASK_KEY = re.compile(r"\bTASK_([A-Z_]+?)_KEY\b")
_MAP_PART = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]")
_RENAMED = {"instance_num": "instances", "batching_timeout": "wait_ms", "jump": "body", "split": "each"}
_WITH_BARS = ("map", "model", "model::cache")  # map says more of it, paths may have it
_POSITIONS = "values for one op each ('|') are not read: write them at the ops, as ResizeMat(resize_h=224)"
_GROUPS = "groups of a node ('&') are not run here: write one value"


def native_table(table: dict[str, Any], node: str, source: Source) -> dict[str, Any]:
    """The table with native keys in place of TorchPipe's; other keys stay. Raises ConfigError."""
    given: dict[str, Any] = {}
    for key, value in table.items():
        known = torchpipe_key(key)
        if known is not None and known.state == "not supported":
            raise source.error(node, key, f"is not supported: {known.means}")
        if known is not None and known.state == "no meaning here":
            source.warn(node, key, f"has no meaning here and is passed over: {known.means}")
            continue
        if key == "node_name" and value == node:  # TorchPipe's parse_toml writes it
            continue
        given[key] = _spelled(value, node, key, source)
    native: dict[str, Any] = {}
    for key, value in given.items():
        known_before = set(native)
        try:
            _add(native, key, value, given)
        except ConfigError as e:
            raise source.error(node, key, e.message) from None
        for name in native.keys() - known_before - {key}:
            source.spelled(node, name, key)
        if key == "device_id" and native["device"] == "cpu":
            source.warn(node, key, "there is no GPU: the node runs on the CPU")
    return native


def _spelled(value: Any, node: str, key: str, source: Source) -> Any:
    """The value with names of fields for TASK_..._KEY."""
    if not isinstance(value, str):
        return value

    def field(match: re.Match[str]) -> str:
        if match[1] not in TASK_KEYS:
            known = ", ".join(f"TASK_{name}_KEY" for name in TASK_KEYS)
            raise source.error(node, key, f"found {match[0]}, expected one of {known}")
        return TASK_KEYS[match[1]]

    return _TASK_KEY.sub(field, value)


def _add(native: dict[str, Any], key: str, value: Any, given: dict[str, Any]) -> None:
    name = _RENAMED.get(key, key)
    entries: dict[str, Any] = {name: value}
    if isinstance(value, str) and "&" in value and torchpipe_key(key) is not None:
        raise ConfigError(f"found {found(value)}: {_GROUPS}")
    if isinstance(value, str) and "|" in value and torchpipe_key(key) is not None and key not in _WITH_BARS:
        raise ConfigError(f"found {found(value)}: {_POSITIONS}")
    if key in ("max", "min"):
        entries = _batch(key, value)
    elif key == "map":
        entries = {"inputs": map_inputs(value)}
    elif key == "device_id":
        entries = {"device": _device(value)}
    elif key == "or":
        entries = {"filter": "or"} if Key(bool, "").read(value) else {}
    elif key == "merge":
        entries = {"gather": value}
    for name in entries:
        if name in native or (name != key and name in given):
            raise ConfigError(f"is '{name}' in other words, which is set, too; leave one of them out")
    native.update(entries)


def _batch(key: str, value: Any) -> dict[str, Any]:
    """`max` and `min`: a number, a shape `4x3x224x224` whose first number is the batch's, one for each instance (`;`),
    or one for each input of the model (`,`), which must agree in it."""
    text = str(value)
    instances = [{_first(shape, value) for shape in part.split(",")} for part in text.split(";")]
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
    """`src[srckey:dstkey,...],...` as `{dstkey: "src.srckey"}`; without a node's name as `{dstkey: ".srckey"}`."""
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
