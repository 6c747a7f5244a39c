"""Every key of a pipeline's TOML, once: those of a node, of `[pipeline]`, and TorchPipe's with what becomes of them.

docs/pipelines.md and docs/migrate-from-torchpipe.md have these tables; tests keep them equal.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from typing import Any, Final, Literal

from msgspec import Struct

from penstock.config.toml import found
from penstock.errors import ConfigError
from penstock.pipeline.ops.parameters import convert, describe_type

Names = tuple[str, ...]
Numbers = tuple[int, ...]

_NO_BOUND = 1e6  # bounds from here are for slips, and not told


class Key(Struct, frozen=True):
    """One key: its type, what it means, its default in words, and bounds of its number (or of each in its list)."""

    type: Any
    doc: str
    default: str = ""
    least: float | None = None
    most: float | None = None

    def read(self, value: Any) -> Any:
        """The value as the key's type; numbers may be texts. Raises ConfigError: found, expected."""
        try:
            read = convert(value, self.type, "")
        except ConfigError:
            read = None
        numbers = [n for n in (read if isinstance(read, tuple) else (read,)) if isinstance(n, int | float)]
        bounds = (-math.inf if self.least is None else self.least, math.inf if self.most is None else self.most)
        if read is None or not all(math.isfinite(n) and bounds[0] <= n <= bounds[1] for n in numbers):
            raise ConfigError(f"found {found(value)}, expected {self.expected}")
        return read

    @property
    def expected(self) -> str:
        """What it takes, in words."""
        if self.type == Numbers:
            return f"whole numbers from {self.least:g} to {self.most:g}, in a list"
        words = describe_type(self.type)
        if self.least is None or self.most is None:
            return words
        if self.most >= _NO_BOUND:
            return f"{words}, {self.least:g} or more"
        return f"{words} from {self.least:g} to {self.most:g}"


NODE: Final = {
    "ops": Key(list, 'the steps, in order: names, or tables such as `{op = "ResizeMat", resize_h = 224}`', "Identity"),
    "backend": Key(str, "the steps as an expression, in place of `ops`", "Identity"),
    "next": Key(Names, "the nodes that items go on to", "none: an output"),
    "inputs": Key(dict, 'fields taken of other nodes: `{data = "prep.result"}`', "all fields of the node before"),
    "instances": Key(int, "how many of it run at the same time, each in a thread", "1", 1, 1024),
    "max_batch": Key(int, "most items in one call", "8 with a model (1 with `compat`)", 1, 65536),
    "min_batch": Key(int, "smallest batch of the model's engine; a smaller one is padded up", "1", 1, 65536),
    "sizes": Key(Numbers, "batch sizes of the model's engine; others are padded up", "any", 1, 65536),
    "wait_ms": Key(float, "longest wait of the oldest item for a fuller batch", "0 on the CPU, 2 on a GPU", 0, 3.6e6),
    "bucket": Key(Names, "what must be equal within a batch: fields, with `.shape` or `.dtype`", "shape and dtype"),
    "pad_to": Key(
        Numbers, "sizes that sides of what a model is given are filled up to, with zeros", "no padding", 1, 65536
    ),
    "device": Key(
        str,
        "`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU that the model can use, if there is one",
        "auto with a model's file",
    ),
    "queue": Key(int, "most items that wait for it", "2 x instances x max_batch", 1, 2**31),
    "queue_bytes": Key(int, "most bytes that wait for it", "64 MiB", 1, 2**50),
    "deadline_ms": Key(
        float, "an item that the node has not answered so long after it came to it fails", "none", 0.001, 8.64e7
    ),
    "run_timeout_s": Key(float, "a batch that runs longer fails, and its instance is made anew", "60", 0.001, 86400),
    "retry_split": Key(bool, "a batch whose call raised is run again in halves", "true"),
    "idempotent": Key(bool, "items may be run again at all", "true"),
    "on_error": Key(Literal["fail", "skip"], "`skip`: an item that failed here goes on as it came", "fail"),
    "filter": Key(
        str,
        "`swap`: the result before becomes the data; `or`: only items without a result; `run`: all as they are",
        "swap",
    ),
    "when": Key(str, "a condition on fields (held, not run yet)", "none"),
    "else": Key(
        Literal["skip", "skip_branch", "stop", "fail"], "what becomes of other items (held, not run yet)", "skip"
    ),
    "require": Key(Literal["all", "any"], "which producers a join waits for (`any`: held, not run yet)", "all"),
    "each": Key(str, "the field whose elements become items (held, not run yet)", "none"),
    "body": Key(str, "the node where these begin (held, not run yet)", "none"),
    "gather": Key(Names, "their fields that are gathered (held, not run yet)", "result"),
    "max_fanout": Key(int, "most elements of one item (held, not run yet)", "any", 1, 2**31),
    "on_item_error": Key(
        Literal["null", "drop", "fail_parent"], "an element that failed (held, not run yet)", "fail_parent"
    ),
}
"""Keys of a node's table. All others are parameters of its ops."""

ONLY_IN_NODES: Final = {"next", "inputs", "filter", "when", "else", "require", "each", "body", "gather"}
"""Keys that are no default of all nodes."""

ONLY_WITH_A_MODEL: Final = {"max_batch", "min_batch", "sizes", "wait_ms", "pad_to"}
"""Keys that, as defaults of all nodes, are for those with a model: nothing is gained by batches elsewhere."""

OF_AN_ALIAS: Final = {"next", "inputs", "filter", "when", "else"}

PIPELINE: Final = {
    "name": Key(str, "the pipeline's name", "the file's, without .toml"),
    "entry": Key(str, "the node where items begin that name none", "the only one that no `next` names"),
    "compat": Key(bool | Literal["torchpipe"], "unknown keys are warned of, and not refused", "false"),
    "trace": Key(bool, "each answer tells its way", "false"),
    "in_flight": Key(int, "most items inside at once", "what its nodes and edges hold", 1, 2**31),
    "inputs": Key(Names, "the fields that callers give", "data"),
    "outputs": Key(Names, "the fields that callers get", "result"),
}
"""Keys of `[pipeline]`."""

State = Literal["used", "held", "no meaning here", "not supported"]


class TorchPipeKey(Struct, frozen=True):
    """A key of TorchPipe's files. "no meaning here": passed over, with a warning; "not supported": refused."""

    name: str
    state: State
    means: str
    native: str = ""


def _keys(state: State, *rows: tuple[str, ...]) -> list[TorchPipeKey]:
    return [TorchPipeKey(row[0], state, row[1], row[2] if len(row) > 2 else "") for row in rows]


_TORCHPIPE = [
    *_keys(
        "used",
        ("backend", "expression of ops", "backend"),
        ("next", "text with commas, or a list", "next"),
        ("map", "`src[srckey:dstkey,...],...`; the node may be left out where there is one", "inputs"),
        ("filter", "`swap`, `or` and `run`; others are held, and refused when run", "filter"),
        ("or", "true is `filter = \"or\"`", "filter"),
        ("instance_num", "", "instances"),
        ("max", "a number or a shape, whose first number counts; `;` gives the sizes of instances", "max_batch"),
        ("min", "as `max`", "min_batch"),
        ("batching_timeout", "milliseconds, with fractions", "wait_ms"),
        ("device_id", "cuda:N; without a GPU the CPU, with a warning", "device"),
        ("model", "parameter of the model op; relative paths start at the file's folder"),
        ("model::cache", "parameter of the model op, checked by a sidecar before it is used", "model_cache"),
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
        "held",
        ("jump", "the node where the items of a fan-out begin", "body"),
        ("split", "the field whose elements become items", "each"),
        ("merge", "their fields that are gathered", "gather"),
    ),
    *_keys(
        "no meaning here",
        ("Interpreter::backend", "there is one way to run nodes"),
        ("Interpreter::env", "set variables of the environment before the server starts"),
        ("PipelineV3::backend", "there is one way to run nodes"),
        ("Schedule::backend", "there is one way to form batches"),
        ("scheduler", "there is one way to form batches"),
        ("node_entrypoint", "there is one way to run nodes"),
        ("entrypoint", "there is one way to run nodes"),
        ("force_range", "batches are formed of what waits"),
        ("fake_instance_num", "instances are threads; sizes are `sizes`"),
        ("number_factor", "batches are of one shape without sorting"),
        ("model::timingcache", "kept beside the engine"),
        ("max_workspace_size", "left to the runtime"),
        ("weight_budget_percentage", "left to the runtime"),
        ("batch_process", "the runner forms batches"),
        ("allocator", "left to the runtime"),
        ("log_level", "see logging"),
        ("Logger::path", "see logging"),
        ("Logger::level", "see logging"),
        ("priority", "streams are the runtime's"),
        ("register_config", "Python backends are found by their name"),
        ("model_type", "the file's ending tells it"),
    ),
    *_keys(
        "not supported",
        ("split_size", "of a test backend"),
        ("instances_grp", "instances belong to one node"),
        ("active_instances_grp", "instances belong to one node"),
        ("borrow_from", "instances belong to one node; a table `[rec.2]` is an alias of `rec`"),
        ("request_size", "an item counts one"),
        ("cal_request_size_method", "an item counts one"),
        ("contiguous_batching", "language models are served as models of their own"),
        ("restart", "language models are served as models of their own"),
        ("calibrate_input", "engines in int8 are made from quantised ONNX files"),
        ("calibrate_cache", "engines in int8 are made from quantised ONNX files"),
        ("preprocessor", "write an op before the model"),
        ("postprocessor", "write an op behind the model, such as SoftmaxCpu"),
        ("precision::fp32", "layers keep the precision that their file has"),
        ("precision::fp16", "layers keep the precision that their file has"),
        ("precision::output::fp32", "layers keep the precision that their file has"),
        ("precision::output::fp16", "layers keep the precision that their file has"),
        ("force_layer_norm_pattern_fp32", "layers keep the precision that their file has"),
    ),
]  # fmt: skip
_BY_NAME = {key.name: key for key in _TORCHPIPE}


def torchpipe_keys() -> tuple[TorchPipeKey, ...]:
    """All keys of TorchPipe's files that are known here, with what becomes of them."""
    return tuple(_TORCHPIPE)


def torchpipe_key(name: str) -> TorchPipeKey | None:
    """What becomes of a key of TorchPipe's files; None: it is unknown."""
    return _BY_NAME.get(name)


log = logging.getLogger("penstock.pipeline")

_HEAD = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*(\"[^\"]+\"|'[^']+'|[\w.-]+)\s*=")


class Source:
    """What a pipeline is read from. `text` is the file's, where there is one: it tells lines."""

    def __init__(self, name: str, text: str = "") -> None:
        self.name = name
        self._text = text
        self._spelled: dict[tuple[str, str], str] = {}

    def spelled(self, node: str, key: str, given: str) -> None:
        """A key of a node was given in another spelling, by which messages call it."""
        self._spelled[node, key] = given

    def error(self, node: str, key: str, message: str) -> ConfigError:
        """That something is wrong at a key of a node; `node` is empty for keys above all tables."""
        return ConfigError(f"{self._where(node, key)}: {message}")

    def warn(self, node: str, key: str, message: str) -> None:
        """Tells of what is passed over."""
        log.warning("%s: %s", self._where(node, key), message)

    def _where(self, node: str, key: str) -> str:
        key = self._spelled.get((node, key), key)
        line = next((n for n, table, name in self._keys() if (table, name) == (node, key)), None)
        table = f"[{node}]" if node else ""
        parts = f"{table} {key}".strip()
        return f"{self.name}{'' if line is None else f', line {line}'}{': ' if parts else ''}{parts}"

    def _keys(self) -> Iterator[tuple[int, str, str]]:
        """Line, table and key of each key, and of each table with the key "". A sketch of TOML, good for messages."""
        table = ""
        for number, line in enumerate(self._text.splitlines(), 1):
            if head := _HEAD.match(line):
                table = ".".join(part.strip().strip("\"'") for part in head[1].split("."))
                yield number, table, ""
            elif key := _KEY.match(line):
                yield number, table, key[1].strip("\"'")
