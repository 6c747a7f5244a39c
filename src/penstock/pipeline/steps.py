"""Pipelines built in Python, node by node, of steps such as `Decode("rgb") >> Resize(224, 224) >> ToTensor()`.

The graph of a `Pipeline` equals a graph from TOML.
"""

from __future__ import annotations

import inspect
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from msgspec import UNSET, Struct

from penstock.errors import ConfigError, nearest
from penstock.pipeline.check import check
from penstock.pipeline.describe import to_toml
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import NO_NODES, load_graph, parse_graph
from penstock.pipeline.local import LocalPipeline
from penstock.pipeline.lower import TARGET
from penstock.values import found

if TYPE_CHECKING:
    from typing import Unpack

Color = Literal["rgb", "bgr", "gray"]
Target = str | type[Any] | Callable[..., Any]
"""An op's name, or a user's class or function."""


class StepChain:
    """Consecutive ops, as tables of a node's `ops`. `>>` appends more."""

    def __init__(self, *tables: dict[str, Any]) -> None:
        self.tables = tables

    def __rshift__(self, other: StepChain | Target) -> StepChain:
        return StepChain(*self.tables, *steps_of(other).tables)

    def __rrshift__(self, other: Target) -> StepChain:
        return StepChain(*steps_of(other).tables, *self.tables)

    def __repr__(self) -> str:
        return " >> ".join(str(table.get(TARGET, table["op"])) for table in self.tables)


def steps_of(value: StepChain | Target) -> StepChain:
    """The steps of a value. Raises ConfigError: not an op, or a class that cannot be found by name."""
    return value if isinstance(value, StepChain) else Use(value)


def Use(target: Target, /, **params: Any) -> StepChain:
    """Any op by name, or a user's class or function, with its parameters."""
    given = {key: value for key, value in params.items() if value is not None}
    if isinstance(target, str):
        return StepChain({"op": "Python", TARGET: target, **given} if ":" in target else {"op": target, **given})
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        name = type(target).__name__
        raise ConfigError(
            f"found {found(target)}, expected a class or a function; write Use({name}, ...) with its parameters"
        )
    name = f"{target.__module__}:{target.__qualname__}"
    if "<" in name:
        raise ConfigError(f"{name} cannot be found by its name: define it at the top of a module")
    return StepChain({"op": "Python", TARGET: name, **given})


def importable(tables: Sequence[dict[str, Any] | str]) -> list[dict[str, Any] | str]:
    """The ops with the running program's file instead of `__main__`, which other programs do not have."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    changed: list[dict[str, Any] | str] = []
    for table in tables:
        name = str(table.get(TARGET, "")) if isinstance(table, dict) else ""
        if isinstance(table, dict) and name.startswith("__main__:"):
            if file is None:
                raise ConfigError(f"{name} is not defined in a file; define it in a module to write it to a TOML file")
            table = {**table, TARGET: f"{os.path.abspath(file)}:{name.partition(':')[2]}"}
        changed.append(table)
    return changed


def Decode(color: Color = "bgr", *, scale: tuple[int, int] | None = None) -> StepChain:
    """Bytes of an image -> `[height, width, 3]` uint8.

    `scale` is the height and width needed later. It speeds up the decoding of JPEGs and changes pixels slightly.
    """
    height, width = scale or (None, None)
    decoded = Use("DecodeMat", scale_h=height, scale_w=width)
    return decoded if color == "bgr" else decoded >> Use("CvtColorMat", color=color)


def Convert(color: Color) -> StepChain:
    """`[height, width, 3]` -> the same in another color order."""
    return Use("CvtColorMat", color=color)


def Resize(height: int, width: int, *, pillow: bool = False) -> StepChain:
    """`[h, w, channels]` -> `[height, width, channels]`. `pillow`: bit-identical to Pillow, but slower."""
    return Use("PillowResizeMat" if pillow else "ResizeMat", resize_h=height, resize_w=width)


def Letterbox(height: int, width: int | None = None, *, pad_value: float | None = None) -> StepChain:
    """`[h, w, channels]` -> `[height, width, channels]`, proportions kept, centered. Default: a square."""
    return Use("ResizeCenterPadMat", max_h=height, max_w=width or height, pad_value=pad_value)


def ToTensor(data_format: Literal["nchw", "nhwc"] = "nchw") -> StepChain:
    """`[height, width, channels]` -> `[1, channels, height, width]`."""
    return Use("Mat2Tensor", data_format=None if data_format == "nchw" else data_format)


def Onnx(
    model: str | os.PathLike[str],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    precision: Literal["fp32", "fp16", "bf16", "int8", "best"] | None = None,
    runtime: Literal["auto", "cpu", "cuda", "tensorrt", "openvino"] | None = None,
    model_cache: str | None = None,
    threads: int | None = None,
) -> StepChain:
    """`[1, ...]` -> `[1, ...]` by an ONNX file, in batches, after `(x - mean) / std` per channel.

    The keyword parameters are the op's.
    """
    options = {"precision": precision, "runtime": runtime, "model_cache": model_cache, "threads": threads}
    return Use("OnnxTensor", model=os.fspath(model), mean=_list(mean), std=_list(std), **options)


def TorchScript(
    model: str | os.PathLike[str],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
) -> StepChain:
    """`[1, ...]` -> `[1, ...]` by a PyTorch file, in batches."""
    return Use("TorchScriptTensor", model=os.fspath(model), mean=_list(mean), std=_list(std), precision=precision)


def Softmax() -> StepChain:
    """`[rows, classes]` -> probabilities that sum to 1."""
    return Use("SoftmaxCpu")


def ArgMax() -> StepChain:
    """`[1, classes]` -> the best class, an int."""
    return Use("ArgMax")


def _list(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else list(values)


# ---- nodes and their edges


class PlaceKeys(TypedDict, total=False):
    """The keys of a node's place in the graph. An alias has no others."""

    filter: Literal["swap", "or"]
    when: str
    otherwise: Literal["skip", "skip_branch", "stop", "fail"]  # the key `else`
    require: Literal["all", "any"]


class NodeKeys(PlaceKeys, total=False):
    """The keys of a node in Python. docs/pipelines.md explains them."""

    instances: int
    processes: int | Literal["auto"]
    max_batch: int
    min_batch: int
    sizes: list[int]
    wait_ms: float
    bucket: list[str]
    pad_to: list[int]
    device: str
    queue: int
    queue_bytes: int
    deadline_ms: float
    run_timeout_s: float
    retry_split: bool
    idempotent: bool
    on_error: Literal["fail", "skip"]


class EachKeys(NodeKeys, total=False):
    """The keys of a fan-out's node."""

    gather: Sequence[str]
    max_fanout: int
    on_item_error: Literal["fail_parent", "null", "drop"]


class NodeField(Struct, frozen=True):
    """A field of the items that leave a node, and the value if a condition skipped that node."""

    node: str
    name: str
    fallback: Any = UNSET

    def default(self, value: Any) -> NodeField:
        """The field with a default value, for an input of a join."""
        return NodeField(self.node, self.name, value)


Input: TypeAlias = "NodeRef | NodeField | tuple[NodeRef | NodeField, ...]"
"""What a node takes as an input. Of several fields it takes the first whose node ran."""


class NodeRef:
    """A node of a pipeline. Call it with the node before it. Its attributes are its fields: `decode.result`."""

    def __init__(self, pipeline: Pipeline, name: str) -> None:
        self._pipeline = pipeline
        self._name = name

    def __call__(self, source: NodeRef | NodeField | None = None, /, **inputs: Input) -> NodeRef:
        """Puts the node after `source`, whose fields it takes, or after the nodes of `inputs`: `data=prep.result`.

        A node as an input stands for its result, and a tuple for alternatives. Raises ConfigError.
        """
        name, nodes = self._name, self._pipeline._nodes
        if isinstance(source, NodeField):
            inputs = {"data": source, **inputs}
        elif source is None and not inputs:
            raise ConfigError(f"[{name}] follows nothing: call it with a node, or with fields such as data=prep.result")
        elif source is not None:
            if inputs:
                raise ConfigError(f"[{name}] takes either all fields of {source} or the named ones, not both")
            if source._pipeline is not self._pipeline:
                raise ConfigError(f"[{name}] cannot follow {source}, which belongs to another pipeline")
            before = nodes[source._name]
            before["next"] = [*before.get("next", []), name]
        if inputs:
            nodes[name]["inputs"] = {key: _input(value) for key, value in inputs.items()}
        return self

    def __getattr__(self, name: str) -> NodeField:
        if name.startswith("__"):
            raise AttributeError(name)
        return NodeField(self._name, name)

    def __repr__(self) -> str:
        return f"<node {self._name}>"


def _input(value: Input) -> Any:
    """The value of an input in TOML."""
    given = value if isinstance(value, tuple) else (value,)
    fields = [v if isinstance(v, NodeField) else NodeField(v._name, "result") for v in given]
    names = [f"{field.node}.{field.name}" for field in fields]
    source: Any = names if len(names) > 1 else names[0]
    default = next((field.fallback for field in fields if field.fallback is not UNSET), UNSET)
    return source if default is UNSET else {"from": source, "default": default}


def _first(added: Mapping[str, dict[str, Any]], name: str) -> str:
    """The only one of the added nodes that follows none of the others. Raises ConfigError."""
    after = {target for table in added.values() for target in (*table.get("next", ()), table.get("body"))}
    for key, table in added.items():
        given = [i["from"] if isinstance(i, dict) else i for i in table.get("inputs", {}).values()]
        texts = [text for value in given for text in (value if isinstance(value, list) else [value])]
        after |= {key} if any(text.rpartition(".")[0] in added for text in texts) else set()
    firsts = [key for key in added if key not in after]
    if len(firsts) != 1:
        names = ", ".join(firsts) or "no node"
        raise ConfigError(f"[{name}] the body begins at {names}, expected one node that the others follow")
    return firsts[0]


def _native(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys as in TOML: `else` is no name in Python."""
    return {"else" if key == "otherwise" else key: value for key, value in keys.items()}


class Pipeline:
    """A pipeline built in Python.

    - `folder`: base of relative paths, by default the working directory.
    - `entry`: where an item begins unless it names a node.
    - `inputs`: the fields that callers send.
    - `client_request`: items have the field of this name, the `penstock.Request` that they came with.
    - `trace`: responses include the item's path.
    - `in_flight`: most items inside at once.
    """

    def __init__(
        self,
        name: str,
        *,
        folder: str | os.PathLike[str] = ".",
        entry: str | None = None,
        inputs: tuple[str, ...] = ("data",),
        client_request: bool = False,
        trace: bool = False,
        in_flight: int | None = None,
    ) -> None:
        self._name = name
        self._folder = os.path.abspath(folder)
        self._settings: dict[str, Any] = {"inputs": list(inputs), "client_request": client_request, "trace": trace}
        optional = {"entry": entry, "in_flight": in_flight}
        self._settings |= {key: value for key, value in optional.items() if value is not None}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._ends: set[str] = set()

    @classmethod
    def from_toml(cls, path: str | Path, *, compat: bool = False) -> Pipeline:
        """The pipeline of a TOML file in either dialect, to be changed or run. Raises ConfigError."""
        graph = load_graph(path, compat=compat)
        made = cls(graph.name, folder=graph.folder)
        tables = tomllib.loads(to_toml(graph))
        made._settings |= tables.pop("pipeline")
        made._nodes = {name: tables[name] for name in graph.nodes if name in tables}
        for name, node in graph.nodes.items():
            if node.alias_of is not None:
                made._nodes[name] = made._nodes[node.alias_of].pop(name.removeprefix(f"{node.alias_of}."))
        return made

    def node(self, name: str, steps: StepChain | Target, **keys: Unpack[NodeKeys]) -> NodeRef:
        """A new node. It is an entry until it is called with the node before it. Raises ConfigError."""
        return self._add(name, {**_native(keys), "ops": list(steps_of(steps).tables)})

    def alias(self, node: NodeRef, name: str, **keys: Unpack[PlaceKeys]) -> NodeRef:
        """The node at another place of the graph, as `[node.name]`: it shares the queue and instances.

        Raises ConfigError.
        """
        return self._add(f"{node._name}.{name}", _native(keys))

    def _add(self, name: str, table: dict[str, Any]) -> NodeRef:
        if name in self._nodes:
            raise ConfigError(f"there is already a node '{name}'; names must be unique")
        if name in NO_NODES:
            raise ConfigError(f"'{name}' cannot be a node's name: TOML files use that table for other settings")
        self._nodes[name] = table
        return NodeRef(self, name)

    def _parsed(self, nodes: Mapping[str, dict[str, Any]]) -> Graph:
        tables: dict[str, Any] = {name: dict(table) for name, table in nodes.items() if "ops" in table}
        for name in nodes.keys() - tables.keys():  # aliases
            of, _, place = name.rpartition(".")
            tables[of][place] = nodes[name]
        return parse_graph({"pipeline": self._settings, **tables}, name=self._name, folder=self._folder)

    def __getitem__(self, name: str) -> NodeRef:
        """The node of that name. Raises ConfigError."""
        if name not in self._nodes:
            raise ConfigError(f"there is no node '{name}'{nearest(name, self._nodes)}")
        return NodeRef(self, name)

    def output(self, *ends: NodeRef | NodeField) -> None:
        """Declares where items end. Fields also declare the response: `p.output(net.label, net.score)`."""
        fields = [end.name for end in ends if isinstance(end, NodeField)]
        if fields:
            self._settings["outputs"] = list(dict.fromkeys([*self._settings.get("outputs", ()), *fields]))
        self._ends |= {end.node if isinstance(end, NodeField) else end._name for end in ends}

    def each(
        self,
        field: NodeField,
        body: NodeRef | Callable[[NodeField], object],
        name: str | None = None,
        **keys: Unpack[EachKeys],
    ) -> NodeRef:
        """A node after the field's node that takes each element of the field through `body`, as a child of its item.

        `body` is the first node for the children, which have the item's fields with the element in place of `field`.
        Or it is a function that adds the nodes of the body, and is called with the element. The fields `gather`, by
        default `result`, become lists. The node is `each_{field}` unless `name` is given. Raises ConfigError.
        """
        if not isinstance(field, NodeField):
            raise ConfigError(f"found {found(field)}, expected a field such as boxes.box")
        name = name or f"each_{field.name}"
        fan_out = self._add(name, {**_native(keys), "ops": ["Identity"], "each": field.name})(self[field.node])
        if isinstance(body, NodeRef):
            first = body._name
        else:
            before = set(self._nodes)
            body(NodeField(name, field.name))
            first = _first({key: table for key, table in self._nodes.items() if key not in before}, name)
        self._nodes[name]["body"] = first
        return fan_out

    @property
    def graph(self) -> Graph:
        """The current graph. Raises ConfigError."""
        graph = self._parsed(self._nodes)
        if self._ends and (other := self._ends ^ set(graph.outputs)):
            name = min(other)
            problem = "an output, but other nodes follow it" if name in self._ends else "the last, but not an output"
            raise ConfigError(f"{self._name}: [{name}] is {problem}")
        return graph

    def check(self) -> None:
        """Returns if the pipeline can run. Raises ConfigError: node, what was found, what was expected."""
        check(self.graph)

    def to_toml(self, folder: str | os.PathLike[str] | None = None) -> str:
        """The text of a TOML file in `folder` that describes the same pipeline. Raises ConfigError."""
        nodes = {
            name: {**table, "ops": importable(table["ops"])} if "ops" in table else table
            for name, table in self._nodes.items()
        }
        return to_toml(self._parsed(nodes), folder=None if folder is None else os.fspath(folder))

    def local(self) -> LocalPipeline:
        """The pipeline, running in this process and its own. The caller closes it. Raises ConfigError, LoadFailed."""
        self.check()
        return LocalPipeline(self.graph)
