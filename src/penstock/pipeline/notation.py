"""The notation of pipelines' files: each native key, expressions of ops, and Dialect, which adds another notation.

Each key is defined once. docs/pipelines.md shows the tables, and a test keeps both equal. Expressions are the values of
`backend`: `A[B]` is A around B, `A[B, C]` A around both, `A(k=v)[B]` gives A a parameter, `(f)A` puts the filter f
before A. White space is ignored. Positions count from 1 in the original text.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from penstock.config.schema import Config
from penstock.errors import ConfigError
from penstock.plugins import BUILTIN, load_object
from penstock.values import convert

log = logging.getLogger("penstock.pipeline")

Names = tuple[str, ...]
Size = Annotated[int, Meta(ge=1, le=65536)]
Instances = Annotated[int, Meta(ge=1, le=1024)]
Processes = Instances | Literal["auto"]
# the bounds below only catch typing errors
Count = Annotated[int, Meta(ge=1, le=2**31)]
Bytes = Annotated[int, Meta(ge=1, le=2**50)]
Wait = Annotated[float, Meta(ge=0, le=3.6e6)]  # ms
Deadline = Annotated[float, Meta(ge=0.001, le=8.64e7)]  # ms
RunTime = Annotated[float, Meta(ge=0.001, le=86400)]  # s

_HEAD = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*(\"[^\"]+\"|'[^']+'|[\w.-]+)\s*=")


class Key(Struct, frozen=True):
    """One key: its type with the bounds of its numbers, its meaning, and its default in words."""

    type: Any
    doc: str
    default: str = ""

    def read(self, value: Any) -> Any:
        """The value as the key's type. Numbers may be strings. Raises ConfigError: found, expected."""
        return convert(value, self.type, loose=True)


NODE: Final = {
    "ops": Key(list, 'the steps, in order: names, or tables such as `{op = "ResizeMat", resize_h = 224}`', "Identity"),
    "backend": Key(str, "the steps as an expression, instead of `ops`", "Identity"),
    "next": Key(Names, "the nodes that receive the items next", "none: an output"),
    "inputs": Key(
        dict | list,
        'fields taken from other nodes: `{data = "prep.result"}`; a list has alternatives, and `{from = "prep.score",'
        ' default = 0}` a default; `["prep.result", "mask"]` is the data alone, a list of two; the name of an input of'
        " the pipeline is a field of the request",
        "all fields of the previous node",
    ),
    "instances": Key(Instances, "how many copies run at the same time, each in its own thread", "1"),
    "processes": Key(
        Processes,
        "how many copies run at the same time, each in its own process, instead of `instances`; `auto`: threads or"
        " processes, as measured when the pipeline is loaded",
        "none: threads",
    ),
    "max_batch": Key(Size, "most items in one call", "8 with a model (1 with `compat`)"),
    "min_batch": Key(Size, "smallest batch of the model's engine; smaller batches are padded", "1"),
    "sizes": Key(tuple[Size, ...], "batch sizes of the model's engine; other batches are padded", "any"),
    "wait_ms": Key(Wait, "longest wait of the oldest item for a fuller batch", "0 on the CPU, 2 on a GPU"),
    "bucket": Key(Names, "fields that are equal within a batch, with `.shape` or `.dtype`", "shape and dtype"),
    "pad_to": Key(tuple[Size, ...], "sizes to which the sides of the model's input are padded with zeros", "none"),
    "device": Key(
        str,
        "`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU that the model can use, otherwise the CPU",
        "auto with a model file",
    ),
    "queue": Key(Count, "most items that wait for the node", "2 x instances x max_batch"),
    "queue_bytes": Key(Bytes, "most bytes that wait for the node", "64 MiB"),
    "deadline_ms": Key(Deadline, "an item fails if the node has not run it after this time", "none"),
    "run_timeout_s": Key(RunTime, "a batch that runs longer fails, and its instance is replaced", "60"),
    "retry_split": Key(bool, "a batch whose call raised is run again in halves", "true"),
    "idempotent": Key(bool, "items may be run more than once", "true"),
    "on_error": Key(Literal["fail", "skip"], "`skip`: an item that fails here continues unchanged", "fail"),
    "filter": Key(
        str,
        "`swap`: the previous result becomes the data; `or`: only items without a result run; `run`: all items run"
        " unchanged",
        "swap",
    ),
    "when": Key(str, "a condition on the item's fields, or a predicate `pkg.mod:func`", "none: all items run"),
    "else": Key(
        Literal["skip", "skip_branch", "stop", "fail"],
        "items that do not meet `when` pass unchanged (`skip`), leave this branch (`skip_branch`), end here with their"
        " fields as the response (`stop`), or fail",
        "skip",
    ),
    "require": Key(
        Literal["all", "any"],
        "`any`: a join runs if one of its sources ran; `all`: if each input has a source that ran, or a default",
        "all",
    ),
    "each": Key(
        str,
        "the field, a list or an array, whose elements go through `body` one by one, each as a child of the item",
        "none",
    ),
    "body": Key(
        str, "the node where the children begin; without `each`, the item itself goes through the body", "none"
    ),
    "gather": Key(
        Names, "the fields of the children that become lists of the item, in the order of the elements", "result"
    ),
    "max_fanout": Key(Count, "most elements of one item; an item with more fails", "any"),
    "on_item_error": Key(
        Literal["null", "drop", "fail_parent"],
        "a child that fails: the item fails (`fail_parent`), its values are None (`null`), or it is left out (`drop`)",
        "fail_parent",
    ),
}
"""The keys of a node's table. All other keys are parameters of its ops."""

ONLY_IN_NODES: Final = {"next", "inputs", "filter", "when", "else", "require", "each", "body", "gather", "processes"}
"""Keys that cannot be defaults for all nodes."""

ONLY_WITH_A_MODEL: Final = {"max_batch", "min_batch", "sizes", "wait_ms", "pad_to"}
"""Keys whose defaults apply to nodes with a model only. Other nodes gain nothing from batches."""

EACH: Final = {
    "each": "split", "body": "body", "gather": "gather", "max_fanout": "max_fanout", "on_item_error": "on_item_error",
}  # fmt: skip
"""The fields of `graph.Each` by their keys."""

PLACE: Final = ("name", "next", "inputs", "filter", "when", "otherwise", "require")
"""The fields of `graph.Node` that belong to its place in the graph. An alias has its own, and shares all others."""

_RENAMED = {"else": "otherwise", "wait_ms": "wait_s", "deadline_ms": "deadline_s"}
FIELDS: Final = {key: _RENAMED.get(key, key) for key in NODE if key not in ("ops", "backend", "inputs", *EACH)}
"""The fields of `graph.Node` by their keys. Keys in milliseconds are fields in seconds."""

PIPELINE: Final = {
    "name": Key(str, "the pipeline's name", "the file's, without .toml"),
    "entry": Key(str, "the node where an item begins unless it names one", "the only node that no `next` names"),
    "compat": Key(bool | Literal["torchpipe"], "unknown keys cause warnings instead of errors", "false"),
    "client_request": Key(bool, "each item has this field: the `penstock.Request` that it came with", "false"),
    "trace": Key(bool, "each response includes the item's path", "false"),
    "in_flight": Key(Count, "most items inside at once", "the sum of what nodes and queues hold"),
    "inputs": Key(Names | dict, 'the fields that callers send, or tensors: `{x = "FP32[-1,64]"}`', "data"),
    "outputs": Key(
        Names | dict,
        'the fields that callers receive, or tensors: `{y = "FP32[-1,10]"}`, `{y = {tensor = "FP32[-1,10]", from ='
        ' "net.result"}}`',
        "result",
    ),
}
"""The keys of `[pipeline]`."""

GRAPH_FIELDS: Final = {
    "client_request": "client_request", "trace": "trace", "in_flight": "in_flight", "inputs": "takes",
    "outputs": "gives", "tensors": "tensors", "results": "results",
}  # fmt: skip
"""The fields of `graph.Graph` by their keys in `[pipeline]`, whose tables of tensors are two more fields."""


SERVER_TABLES: Final = ("auth", "limits", "metrics", "models", "pipeline", "server")  # any other table is a node
ONE_NODE_KEYS: Final = {"backend", "ops", "model"}  # above all tables: the file is a pipeline of one node


def is_pipeline(tables: Mapping[str, Any]) -> bool:
    """Whether the tables of a TOML file describe a pipeline, and not a configuration of `penstock serve`."""
    configured = {*SERVER_TABLES, *Config.__struct_fields__}
    nodes = any(isinstance(value, dict) and name not in configured for name, value in tables.items())
    return "models" not in tables and (nodes or "pipeline" in tables or bool(ONE_NODE_KEYS & tables.keys()))


class TomlSource:
    """The origin of a pipeline. `text`, if it comes from a file, gives line numbers to errors and warnings."""

    def __init__(self, name: str, text: str = "") -> None:
        self.name = name
        self._text = text
        self._original: dict[tuple[str, str], str] = {}

    def renamed(self, node: str, key: str, original: str) -> None:
        """Records the original spelling of a native key. Messages use it."""
        self._original[node, key] = original

    def error(self, node: str, key: str, message: str) -> ConfigError:
        """An error at a key of a node. `node` is empty for keys above all tables."""
        return ConfigError(f"{self._where(node, key)}: {message}")

    def warn(self, node: str, key: str, message: str) -> None:
        """Logs a warning at a key of a node."""
        log.warning("%s: %s", self._where(node, key), message)

    def _where(self, node: str, key: str) -> str:
        key = self._original.get((node, key), key)
        line = next((n for n, table, name in self._keys() if (table, name) == (node, key)), None)
        table = f"[{node}]" if node else ""
        parts = f"{table} {key}".strip()
        return f"{self.name}{'' if line is None else f', line {line}'}{': ' if parts else ''}{parts}"

    def _keys(self) -> Iterator[tuple[int, str, str]]:
        """Line, table and key of each key, and of each table with the key "". Approximate: only messages use it."""
        table = ""
        for number, line in enumerate(self._text.splitlines(), 1):
            if head := _HEAD.match(line):
                table = ".".join(part.strip().strip("\"'") for part in head[1].split("."))
                yield number, table, ""
            elif key := _KEY.match(line):
                yield number, table, key[1].strip("\"'")


# ---- expressions of ops, and dialects

_NAME = re.compile(r"[\w.:/-]+")  # an op, or the target in its brackets: pkg.mod:Class, app/post.py:Boxes
_DEPTH = 20  # brackets; only typing errors and attacks have more


class Expression(Struct, frozen=True):
    """One name with its filter, parameters and arguments. `filter` is empty if there is none."""

    name: str
    args: tuple[Expression, ...] = ()
    params: dict[str, str] = field(default_factory=dict)
    filter: str = ""
    position: int = 1


def parse(text: str) -> Expression:
    """The tree of an expression. Raises ConfigError: what was found, at which character, what was expected."""
    return _Parser(text).whole()


def text_of(expression: Expression) -> str:
    """The expression as text again, without white space."""
    guard = f"({expression.filter})" if expression.filter else ""
    params = ",".join(f"{key}={value}" for key, value in expression.params.items())
    args = ",".join(map(text_of, expression.args))
    return f"{guard}{expression.name}{f'({params})' if params else ''}{f'[{args}]' if args else ''}"


class _Parser:
    def __init__(self, text: str) -> None:
        places = [(c, i) for i, c in enumerate(text, 1) if not c.isspace()]
        self._source = text
        self._text = "".join(c for c, _ in places)
        self._places = [i for _, i in places] + [len(text) + 1]
        self._at = 0

    def whole(self) -> Expression:
        found = self._expression(0)
        if self._at < len(self._text):
            raise self._error("the end")
        return found

    def _expression(self, depth: int) -> Expression:
        if depth > _DEPTH:
            raise self._error(f"brackets at most {_DEPTH} deep")
        position = self._places[self._at]
        guard = ""
        if self._next("("):
            guard = self._name("the name of a filter")
            self._expect(")", "')' after the filter")
        name = self._name("a name")
        params = self._params() if self._next("(") else {}
        args: list[Expression] = []
        if self._next("["):
            args.append(self._expression(depth + 1))
            while self._next(","):
                args.append(self._expression(depth + 1))
            self._expect("]", "',' or ']'")
        return Expression(name, tuple(args), params, guard, position)

    def _params(self) -> dict[str, str]:
        """`k=v, k=v)`. A part without "=" continues the previous value, as in `mean=1,2,3`."""
        end = self._text.find(")", self._at)
        if end < 0:
            self._at = len(self._text)
            raise self._error("')' after the parameters")
        params: dict[str, str] = {}
        key = ""
        for part in self._text[self._at : end].split(","):
            name, equals, value = part.partition("=")
            if equals and name in params:
                raise self._error(f"'{name}' once")
            if not (name if equals else key):
                raise self._error("a parameter such as resize_h=224")
            key, params[name if equals else key] = (name, value) if equals else (key, f"{params[key]},{part}")
            self._at += len(part) + 1
        return params

    def _name(self, expected: str) -> str:
        match = _NAME.match(self._text, self._at)
        if match is None:
            raise self._error(expected)
        self._at = match.end()
        return match[0]

    def _next(self, char: str) -> bool:
        if not self._text.startswith(char, self._at):
            return False
        self._at += 1
        return True

    def _expect(self, char: str, expected: str) -> None:
        if not self._next(char):
            raise self._error(expected)

    def _error(self, expected: str) -> ConfigError:
        found = f"'{self._text[self._at]}'" if self._at < len(self._text) else "the end"
        where = f"at character {self._places[self._at]} of '{self._source[:200]}'"
        return ConfigError(f"{where}: found {found}, expected {expected}")


class OpDraft(Struct):
    """An op before the node's keys are added: its own parameters, and the filter before it.

    Keys may have one value for each of the `places` in a sequence, as in `color = "rgb|bgr"`; the op is in `place`.
    """

    op: str
    params: dict[str, Any]
    filter: str = ""
    place: int = 0
    places: int = 1

    def own(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        """The keys with the values for this op."""
        found = {}
        for key, value in keys.items():
            parts = value.split("|") if isinstance(value, str) and self.places > 1 else []
            if len(parts) != self.places:
                found[key] = value
            elif part := parts[self.place].strip():
                found[key] = part
        return found


class Dialect(Struct, frozen=True):
    """What a dialect adds. The native notation works without any; the package of a dialect may be deleted.

    - `keys`: its known keys. `used_keys` are proposed for misspelled ones.
    - `tables`: returns the nodes' tables in the native structure; `table`: one table with native keys.
    - `flatten`: returns the ops of an expression that is more than one op, otherwise None.
    - `place`: sets the places of a `backend`'s ops, for keys with one value for each of them.
    - `fan_out`: returns the ops that are left when those which fan out have become values of the node's keys.
    - `ops`, `filters`: further ones, by name. `filter_names` has all spellings by their lower case.
    - `absent_ops`: why an op is not available, by its name in lower case.
    """

    keys: frozenset[str] = frozenset()
    used_keys: tuple[str, ...] = ()
    tables: Callable[[dict[str, dict[str, Any]], TomlSource], dict[str, dict[str, Any]]] = lambda tables, source: tables
    table: Callable[[dict[str, Any], str, TomlSource], dict[str, Any]] = lambda table, node, source: table
    flatten: Callable[[Expression], list[OpDraft] | None] = lambda expression: None
    place: Callable[[Expression, list[OpDraft]], None] = lambda expression, drafts: None
    fan_out: Callable[[list[OpDraft], dict[str, Any]], list[OpDraft]] = lambda drafts, values: drafts
    ops: Mapping[str, str] = {}
    absent_ops: Mapping[str, str] = {}
    filters: Mapping[str, Callable[..., Callable[[dict[str, Any]], str]]] = {}
    filter_names: Mapping[str, str] = {}


@cache
def dialect() -> Dialect:
    """TorchPipe's dialect, or one that adds nothing if its package is not there."""
    known = BUILTIN.get("dialect", {})
    found: Any = load_object(known["torchpipe"]) if known else Dialect()
    return found  # type: ignore[no-any-return]
