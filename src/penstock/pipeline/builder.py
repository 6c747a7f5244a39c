"""Pipeline: builds a graph in Python, node by node. The result equals a graph from TOML."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypedDict

from msgspec import Struct

from penstock.errors import ConfigError, nearest
from penstock.pipeline.check import check
from penstock.pipeline.convert import to_toml
from penstock.pipeline.graph import Graph
from penstock.pipeline.load import NO_NODES, load_graph, parse_graph
from penstock.pipeline.local import LocalPipeline
from penstock.pipeline.steps import StepChain, Target, importable, steps_of

if TYPE_CHECKING:
    from typing import Unpack


class NodeKeys(TypedDict, total=False):
    """The keys of a node in Python. docs/pipelines.md explains them."""

    instances: int
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
    filter: Literal["swap", "or"]


class NodeField(Struct, frozen=True):
    """A field of the items that leave a node."""

    node: str
    name: str


class NodeRef:
    """A node of a pipeline. Call it with the node before it. Its attributes are its fields: `decode.result`."""

    def __init__(self, pipeline: Pipeline, name: str) -> None:
        self._pipeline = pipeline
        self._name = name

    def __call__(self, source: NodeRef | NodeField | None = None, /, **inputs: NodeRef | NodeField) -> NodeRef:
        """Puts the node after `source`, whose fields it takes, or after the nodes of `inputs`: `data=prep.result`.

        A node as an input stands for its result. Raises ConfigError.
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
            fields = {k: v if isinstance(v, NodeField) else NodeField(v._name, "result") for k, v in inputs.items()}
            nodes[name]["inputs"] = {k: f"{field.node}.{field.name}" for k, field in fields.items()}
        return self

    def __getattr__(self, name: str) -> NodeField:
        if name.startswith("__"):
            raise AttributeError(name)
        return NodeField(self._name, name)

    def __repr__(self) -> str:
        return f"<node {self._name}>"


class Pipeline:
    """A pipeline built in Python.

    - `folder`: base of relative paths, by default the working directory.
    - `entry`: where an item begins unless it names a node.
    - `inputs`: the fields that callers send.
    - `trace`: answers include the item's path.
    - `in_flight`: most items inside at once.
    """

    def __init__(
        self,
        name: str,
        *,
        folder: str | os.PathLike[str] = ".",
        entry: str | None = None,
        inputs: tuple[str, ...] = ("data",),
        trace: bool = False,
        in_flight: int | None = None,
    ) -> None:
        self._name = name
        self._folder = os.path.abspath(folder)
        self._settings: dict[str, Any] = {"inputs": list(inputs), "trace": trace}
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
        made._nodes = tables
        return made

    def node(self, name: str, steps: StepChain | Target, **keys: Unpack[NodeKeys]) -> NodeRef:
        """A new node. It is an entry until it is called with the node before it. Raises ConfigError."""
        if name in self._nodes:
            raise ConfigError(f"there is already a node '{name}'; names must be unique")
        if name in NO_NODES:
            raise ConfigError(f"'{name}' cannot be a node's name: TOML files use that table for other settings")
        self._nodes[name] = {**keys, "ops": list(steps_of(steps).tables)}
        return NodeRef(self, name)

    def __getitem__(self, name: str) -> NodeRef:
        """The node of that name. Raises ConfigError."""
        if name not in self._nodes:
            raise ConfigError(f"there is no node '{name}'{nearest(name, self._nodes)}")
        return NodeRef(self, name)

    def output(self, *ends: NodeRef | NodeField) -> None:
        """Declares where items end. Fields also declare the answer: `p.output(net.label, net.score)`."""
        fields = [end.name for end in ends if isinstance(end, NodeField)]
        if fields:
            self._settings["outputs"] = list(dict.fromkeys([*self._settings.get("outputs", ()), *fields]))
        self._ends |= {end.node if isinstance(end, NodeField) else end._name for end in ends}

    def each(self, *_: object, **__: object) -> NoReturn:
        """Raises ConfigError: fan-outs cannot be run yet."""
        raise ConfigError("a fan-out (each) cannot be run yet; write a step that takes the whole list")

    @property
    def graph(self) -> Graph:
        """The current graph. Raises ConfigError."""
        graph = parse_graph({"pipeline": self._settings, **self._nodes}, name=self._name, folder=self._folder)
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
        nodes = {name: {**table, "ops": importable(table["ops"])} for name, table in self._nodes.items()}
        graph = parse_graph({"pipeline": self._settings, **nodes}, name=self._name, folder=self._folder)
        return to_toml(graph, folder=None if folder is None else os.fspath(folder))

    def local(self) -> LocalPipeline:
        """The pipeline, running in threads of this process. The caller closes it. Raises ConfigError, LoadFailed."""
        self.check()
        return LocalPipeline(self.graph)
