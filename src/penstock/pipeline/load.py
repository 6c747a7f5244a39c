"""A Graph from TOML: `load_graph` reads a file, `parse_graph` its tables. Both accept native and TorchPipe's keys."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from penstock.config.load import parse_toml
from penstock.errors import ConfigError, nearest
from penstock.pipeline import filters, lower, notation
from penstock.pipeline.check import check_structure, entry_of, linked, resolved
from penstock.pipeline.filters import check_condition, is_target
from penstock.pipeline.graph import AUTO, REQUEST, Each, Graph, Node, NodeInput, part_name
from penstock.pipeline.ops.base import DATA, NODE_NAME, RESULT, parameters_of
from penstock.plugins import located
from penstock.types import TensorSpec
from penstock.values import found, tensor_specs

MAX_BATCH, MAX_BATCH_COMPAT, MAX_BATCH_OF_USERS = 8, 1, 64

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")
_DEVICE = re.compile(rf"{AUTO}|cpu|cuda(:\d{{1,2}})?")
_GLOBAL = "global"  # the table in which TorchPipe's parse_toml puts the keys above all tables
NO_NODES = (*notation.SERVER_TABLES, _GLOBAL)  # names that a node cannot have

_STEPS = {"ops", "backend"}
_OUTPUT = ("tensor", "from")  # keys of an output in [pipeline.outputs]
_OF_AN_ALIAS = {"next", "inputs", "filter", "when", "else", "require", "map", "backend"}


def load_graph(path: str | Path, *, compat: bool = False) -> Graph:
    """The graph of a TOML file. `compat`: TorchPipe's dialect, in which unknown keys cause warnings.

    Raises ConfigError: file, line, node, key, what was found and expected.
    """
    file = Path(path).expanduser()
    tables, text = parse_toml(file)
    folder = str(located(file).parent)
    return _graph(tables, notation.TomlSource(str(path), text), name=file.stem, folder=folder, compat=compat)


def source_of(path: str | Path) -> notation.TomlSource:
    """The source of a file, for errors with lines. Raises ConfigError: no such file, or not TOML."""
    return notation.TomlSource(str(path), parse_toml(Path(path).expanduser())[1])


def read_tables(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError: no such file, or not TOML."""
    return parse_toml(Path(path).expanduser())[0]


def parse_graph(tables: Mapping[str, Any], *, name: str, folder: str, compat: bool = False) -> Graph:
    """The graph of parsed tables. Relative paths start at `folder`. Raises ConfigError."""
    return _graph(tables, notation.TomlSource(name), name=name, folder=folder, compat=compat)


def _graph(tables: Mapping[str, Any], source: notation.TomlSource, *, name: str, folder: str, compat: bool) -> Graph:
    settings = _settings(tables.get("pipeline", {}), source)
    compat = compat or bool(settings.get("compat"))
    folder = os.path.abspath(folder)
    name = settings.get("name", name)
    nodes = _tables_of_nodes(tables, re.sub(r"[^A-Za-z0-9_-]", "_", name), source)
    nodes = notation.dialect().tables(nodes, source)
    given = tables[_GLOBAL] if isinstance(tables.get(_GLOBAL), dict) else {}
    plain = {k: v for k, v in tables.items() if not isinstance(v, dict)} | given
    single = not nodes.keys() & tables.keys()
    reader = NodeReader(source, {} if single else notation.dialect().table(plain, "", source), folder, compat)
    reader.check_defaults()
    read: dict[str, Node] = {}
    for node, table in nodes.items():
        of = _aliased(node, table, nodes)
        if of:
            read[node] = _alias(node, table, read[of], source, folder)
        else:
            read[node] = reader.read(node, notation.dialect().table(table, node, source))
    reader.check_unused()
    asks = settings.get("client_request", False)
    takes = Graph("", {}, "", takes=settings.get("inputs", ("data",)), client_request=asks).begins_with
    made = linked(read, source, compat=compat, takes=takes)
    entry = entry_of(made, settings.get("entry"), source, compat=compat)
    fields = {field: settings[key] for key, field in notation.GRAPH_FIELDS.items() if key in settings}
    given = [i for name, text in settings.pop("sources", {}).items() for i in reader.inputs(REQUEST, name, text)]
    response = Node(REQUEST)
    fields["sources"] = tuple(resolved(response, i, made, source, compat, takes) for i in given)
    graph = Graph(name, made, entry, compat=compat, folder=folder, **fields)
    check_structure(graph, source)
    return graph


def _settings(table: Any, source: notation.TomlSource) -> dict[str, Any]:
    """The values of `[pipeline]`."""
    if not isinstance(table, dict):
        raise source.error("", "pipeline", f"found {found(table)}, expected a table")
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key not in notation.PIPELINE:
            raise source.error(
                "pipeline",
                key,
                f"unknown key{nearest(key, notation.PIPELINE)}; known are {', '.join(notation.PIPELINE)}",
            )
        try:
            settings[key] = notation.PIPELINE[key].read(value)
        except ConfigError as e:
            raise source.error("pipeline", key, e.message) from None
    for key, field in (("inputs", "tensors"), ("outputs", "results")):
        if isinstance(table := settings.get(key), dict):
            settings[field] = _tensors(f"pipeline.{key}", table, settings, source)
            settings[key] = tuple(table)
    return settings


def _tensors(
    where: str, table: dict[str, Any], settings: dict[str, Any], source: notation.TomlSource
) -> tuple[TensorSpec, ...]:
    """The tensors of `[pipeline.inputs]` or `[pipeline.outputs]`. The nodes' fields of outputs become `sources`."""
    specs: list[TensorSpec] = []
    for name, value in table.items():
        if name in (NODE_NAME, RESULT) and where == "pipeline.inputs":
            raise source.error(where, name, "is a field of every item, expected another name for an input")
        if isinstance(value, dict) and where == "pipeline.outputs":
            if unknown := next((key for key in value if key not in _OUTPUT), None):
                raise source.error(where, name, f"unknown key '{unknown}'{nearest(unknown, _OUTPUT)}")
            if "from" in value:
                settings.setdefault("sources", {})[name] = value["from"]
            value = value.get("tensor")
        try:
            specs += tensor_specs({name: value}, "")
        except ConfigError as e:
            raise source.error(where, name, e.message.removeprefix(f".{name}: ")) from None
    if not specs:
        raise source.error(where, "", 'found no tensor, expected for instance x = "FP32[-1,64]"')
    return tuple(specs)


def _tables_of_nodes(tables: Mapping[str, Any], name: str, source: notation.TomlSource) -> dict[str, dict[str, Any]]:
    """The table of each node and alias, in the file's order. A file without tables may be a single node."""
    nodes: dict[str, dict[str, Any]] = {}
    for node, table in tables.items():
        if isinstance(table, dict) and node not in NO_NODES:
            aliases = {k: v for k, v in table.items() if k not in notation.NODE and _is_alias(v)}
            nodes[node] = {k: v for k, v in table.items() if k not in aliases}
            if aliases and not nodes[node]:
                alias = f"{node}.{next(iter(aliases))}"
                raise source.error(
                    alias, "", f"is an alias of [{node}], which has no keys: define [{node}] with its ops first"
                )
            nodes |= {f"{node}.{k}": v for k, v in aliases.items()}
    if "models" in tables:
        raise source.error(
            "models",
            "",
            "this is a configuration of `penstock serve`; a pipeline has a table for each node, such as [decode]",
        )
    if "metrics" in tables:
        raise source.error("metrics", "", "pipelines have no such table; set metrics_host and metrics_port in [server]")
    if not nodes and notation.ONE_NODE_KEYS & tables.keys():
        nodes = {name: {k: v for k, v in tables.items() if not isinstance(v, dict)}}
    if not nodes:
        raise source.error("", "", 'found no node; expected a table such as [decode] with backend = "DecodeMat"')
    for node in nodes:
        plain = node in tables or node == name  # the name of an alias contains a dot
        if not all(_NAME.fullmatch(part) for part in ([node] if plain else node.split(".", 1))):
            raise source.error(node, "", "is not a valid node name; expected letters, digits, '_' and '-'")
    return nodes


def _is_alias(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= _OF_AN_ALIAS


def _aliased(name: str, table: Mapping[str, Any], nodes: Mapping[str, Any]) -> str:
    """The node that a table is an alias of, or ""."""
    of = name.rpartition(".")[0]
    return of if of in nodes and _is_alias(table) else ""


def _alias(name: str, table: Mapping[str, Any], of: Node, source: notation.TomlSource, folder: str) -> Node:
    """A node that shares the instances of another at its own place in the graph."""
    keys = notation.dialect().table({k: v for k, v in table.items() if k != "backend"}, name, source)
    own = NodeReader(source, {}, folder, False).read(name, keys)
    return replace(of, alias_of=of.name, **{key: getattr(own, key) for key in notation.PLACE})


class NodeReader:
    """Reads tables of native keys as nodes, with the `defaults` of the file's top level."""

    def __init__(self, source: notation.TomlSource, defaults: Mapping[str, Any], folder: str, compat: bool) -> None:
        self._source = source
        self._defaults = defaults
        self._folder = folder
        self._compat = compat
        self._used: set[str] = set()  # keys that some op accepted

    def check_defaults(self) -> None:
        """Raises ConfigError for a default that belongs to one node, or has a bad value."""
        for key, value in self._defaults.items():
            if key in notation.ONLY_IN_NODES:
                raise self._source.error("", key, "belongs to one node, but is above all tables; move it to a node")
            if key in notation.NODE:
                self._value("", key, value)

    def check_unused(self) -> None:
        """Raises ConfigError for a default that no op accepts. In TorchPipe's dialect it warns."""
        for key in self._defaults:
            if key in self._used or key in notation.NODE or key in notation.dialect().keys:
                continue
            message = f"unknown key: no op of this file has it{nearest(key, notation.NODE)}"
            if not self._compat:
                raise self._source.error("", key, message)
            self._source.warn("", key, f"{message}; ignored")

    def read(self, name: str, table: Mapping[str, Any]) -> Node:
        """The node of a table. Raises ConfigError, which names the key."""
        source = self._source
        has_steps = _STEPS & table.keys()
        keys = {k: v for k, v in self._defaults.items() if not (has_steps and k in _STEPS)} | dict(table)
        values = {key: self._value(name, key, keys[key]) for key in notation.NODE if key in keys}
        self._set_processes(name, keys, table, values)
        with self._locating(name, keys, table):
            drafts = lower.drafts_of(keys)
            for draft in drafts:
                draft.params = lower.rooted(draft.params, self._folder)
            drafts = notation.dialect().fan_out(drafts, values)
            model = lower.has_model(drafts)
            if model:
                self._set_max_batch(keys, values, drafts)
            if lower.may_use_gpu(drafts):
                values.setdefault("device", AUTO)
        for key in () if model else notation.ONLY_WITH_A_MODEL - table.keys():
            values.pop(key, None), keys.pop(key, None)
        self._check_sizes(name, values)
        free = (keys if self._compat else table).keys() - notation.NODE.keys()
        with self._locating(name, keys, table):
            steps, taken = lower.steps_of(drafts, keys, sorted(free), self._folder)
            values["filter"], used = filters.completed(values.get("filter", "swap"), keys, free - taken)
        taken |= used
        if values.get("pad_to") and not model:
            raise source.error(name, "pad_to", "applies to the input of a model, but the node has none")
        self._used |= taken
        for key in [key for key in table if key not in notation.NODE and key not in taken]:
            self._reject_unknown(name, key, drafts)
        device = values.get("device", "cpu")
        if not _DEVICE.fullmatch(device):
            raise source.error(name, "device", f"found {found(device)}, expected auto, cpu, cuda, or such as cuda:0")
        values["device"] = "cuda:0" if device == "cuda" else device
        fields = {field: values[key] for key, field in notation.FIELDS.items() if key in values}
        fields |= {field: fields[field] / 1000 for field in ("wait_s", "deadline_s") if field in fields}
        if (when := values.get("when")) is not None:
            fields["when"] = self._condition(name, when)
        elif "else" in values:
            raise source.error(name, "else", "needs 'when', the condition that items may not meet")
        if isinstance(given := values.get("inputs", {}), list):
            given = {DATA: given[0]} if len(given) == 1 else {part_name(k): v for k, v in enumerate(given)}
        inputs = tuple(i for k, v in given.items() for i in self.inputs(name, k, v))
        return Node(name=name, steps=steps, inputs=inputs, each=self._each(name, values), **fields)

    def _value(self, node: str, key: str, value: Any) -> Any:
        try:
            return notation.NODE[key].read(value)
        except ConfigError as e:
            raise self._source.error(node, key, e.message) from None

    @contextmanager
    def _locating(self, node: str, keys: Mapping[str, Any], table: Mapping[str, Any]) -> Iterator[None]:
        """Adds a position to errors: the key of the parameter that they name, otherwise the key of the ops."""
        try:
            yield
        except ConfigError as e:
            verbs = "( is| =| and|: found)"
            named = (
                key for key in keys if re.search(rf"(^|: ){re.escape(lower.parameter_name(key))}{verbs}", e.message)
            )
            key = next(named, next((key for key in _STEPS if key in table), ""))
            raise self._source.error(node, key, e.message) from None

    def _set_max_batch(self, keys: dict[str, Any], values: dict[str, Any], drafts: list[notation.OpDraft]) -> None:
        """Sets `max_batch` by dialect."""
        if "max_batch" not in values:
            usual = MAX_BATCH
            if self._compat:  # in TorchPipe, a user's op limits its batches itself
                usual = MAX_BATCH_COMPAT if lower.takes_size(drafts) else MAX_BATCH_OF_USERS
            most = max(values["sizes"]) if values.get("sizes") else usual
            keys["max_batch"] = values["max_batch"] = max(most, values.get("min_batch", 1))

    def _set_processes(self, node: str, keys: dict[str, Any], table: Mapping[str, Any], values: dict[str, Any]) -> None:
        """Sets `instances` and `device` for a number of processes. Raises ConfigError if the node has other values."""
        count = values.get("processes")
        if count is None or count == AUTO:
            return
        if "instances" in table and values["instances"] != count:
            text = f"found {count} with instances = {values['instances']}: each process is one instance; leave one out"
            raise self._source.error(node, "processes", text)
        if "device" in keys and values["device"] != "cpu":
            text = f"found {count} with device = {values['device']}: processes run on the CPU; set instances instead"
            raise self._source.error(node, "processes", text)
        keys["instances"] = values["instances"] = count
        values["device"] = "cpu"

    def _check_sizes(self, node: str, values: Mapping[str, Any]) -> None:
        least, most = values.get("min_batch", 1), values.get("max_batch")
        if most is not None and least > most:
            raise self._source.error(node, "min_batch", f"found {least}, expected at most max_batch, which is {most}")
        for key in ("sizes", "pad_to"):
            sizes = values.get(key, ())
            if list(sizes) != sorted(set(sizes)):
                raise self._source.error(node, key, f"found {', '.join(map(str, sizes))}, expected ascending sizes")
        sizes = values.get("sizes", ())
        if sizes and most is not None and sizes[-1] < most:
            raise self._source.error(
                node, "sizes", f"the largest is {sizes[-1]}, expected at least max_batch, which is {most}"
            )

    def _condition(self, node: str, text: str) -> str:
        """A condition that can be parsed or imported, with a path based on the folder."""
        if is_target(text):
            text = lower.rooted({lower.TARGET: text}, self._folder)[lower.TARGET]
        try:
            check_condition(text)
        except ConfigError as e:
            raise self._source.error(node, "when", e.message) from None
        return text

    def inputs(self, node: str, name: str, value: Any) -> list[NodeInput]:
        """`"prep.image"` is the field image of prep, `"prep"` its result. `linked` resolves node names with dots.

        A list has alternatives, and `{from = ..., default = ...}` a default.
        """
        default: Any = UNSET
        given = value
        if isinstance(value, dict) and "from" in value and value.keys() <= {"from", "default"}:
            given, default = value["from"], value.get("default", UNSET)
        inputs = []
        for text in given if isinstance(given, list) and given else [given]:
            if not isinstance(text, str) or not text.strip("."):
                raise self._source.error(
                    node,
                    "inputs",
                    f'{name}: found {found(value)}, expected a field such as "prep.result", a list of them, or'
                    ' {from = "prep.result", default = 0}',
                )
            producer, dot, field = text.rpartition(".")
            inputs.append(
                NodeInput(producer, field, name, default) if dot else NodeInput(text, "result", name, default)
            )
        return inputs

    def _each(self, node: str, values: Mapping[str, Any]) -> Each | None:
        given = {notation.EACH[key]: values[key] for key in notation.EACH if key in values}
        if given and "body" not in values:
            key = next(key for key in notation.EACH if key in values)
            raise self._source.error(node, key, "needs 'body' (TorchPipe's jump), the node where the children begin")
        if "each" in values:
            return Each(**{"gather": (RESULT,), **given})
        for key in notation.EACH:
            if key in values and key != "body":
                raise self._source.error(node, key, "needs 'each', the field to split, for a fan-out")
        return Each(**given) if given else None

    def _reject_unknown(self, node: str, key: str, drafts: list[notation.OpDraft]) -> None:
        """Raises ConfigError for a key that no op accepts. In TorchPipe's dialect it warns."""
        of_ops = [name for draft in drafts for name in parameters_of(lower.op_class(draft.op, draft.params))]
        known = [*notation.NODE, *of_ops, *notation.dialect().used_keys]
        ops = ", ".join(dict.fromkeys(draft.op for draft in drafts)) or "none"
        hint = nearest(key, known) or f" (ops of this node: {ops})"
        if not self._compat:
            raise self._source.error(node, key, f"unknown key: neither the node nor its ops have it{hint}")
        self._source.warn(node, key, f"unknown key, ignored{hint}")
