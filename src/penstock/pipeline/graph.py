"""The typed graph of a pipeline, the target of both TOML dialects and of the Python builder, and routes through it.

Everything here is a value or a pure function.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, field

from penstock.errors import BadRequest, ItemFailed
from penstock.pipeline import filters
from penstock.pipeline.ops.base import CLIENT_REQUEST, CONTEXT, DATA, NODE_NAME, RESULT, Fields
from penstock.request import Request
from penstock.types import TensorSpec

AUTO = "auto"  # the device of a node that runs on a GPU if there is one
RUN_TIMEOUT_S = 60.0
NODE_FILTERS = ("run", "swap", "or")
STEP_FILTERS = (*NODE_FILTERS, "then", "else")


class NodeStep(Struct, frozen=True, omit_defaults=True):
    """One op of a node: its name in `ops.catalog`, its parameters, and the filter that guards it.

    `filter` is one of:
    - "run": the op always runs. This is the filter of a node's first step.
    - "swap": the previous result becomes the data. An item without a result leaves the node here.
    - "or": the op runs only if there is no result yet.
    - "then": as "swap" if the previous step ran, otherwise skipped like it. It guards B in `(or)S[A, B]`.
    - "else": as "swap" if the previous guarded step was skipped. It guards B in `HasKey[A, B]`.
    - another of `filters`, with its parameters: `HasKey(key=box)`.
    """

    op: str
    params: dict[str, Any] = field(default_factory=dict)
    filter: str = "run"


REQUEST: Final = "pipeline"  # as a producer, the fields of the request: no node can have the name of this table


class NodeInput(Struct, frozen=True):
    """A field that a node takes from another node, or from the REQUEST: `producer[source:name]` in TorchPipe's `map`.

    Several inputs of one name are alternatives: the node takes the first whose producer ran. `default` is the value if
    none did. The parts of a list have the names `part_name` and become the field `data`.
    """

    producer: str
    source: str
    name: str
    default: Any = UNSET


class Each(Struct, frozen=True):
    """A fan-out: after the node's own steps, one child per element of the field `split` goes through `body`.

    The fields `gather` of the children become lists in the order of the elements. `split` None: the item itself goes
    through the body and keeps all its fields.
    """

    body: str
    split: str | None = None
    gather: tuple[str, ...] = ()
    max_fanout: int | None = None
    on_item_error: Literal["null", "drop", "fail_parent"] = "fail_parent"


class Node(Struct, frozen=True, omit_defaults=True):
    """A chain of steps around at most one model, with its own instances and batches.

    The fields are the keys of `keys.NODE`, which explains them, in seconds instead of milliseconds. None is a default
    that depends on the machine or the steps. Without a model, a batch has as many items as fit a slice of time.

    - `steps`: the ops; a node may have none.
    - `processes`: 0 if the instances are threads, otherwise as `instances`; "auto": measured where it runs.
    - `device` "auto": a GPU of the machine that runs the node, if it has one.
    - `otherwise`: the key `else`, what happens to items that do not meet `when`. "skip": they pass the node unchanged;
      "skip_branch": they are dead until the next join or output; "stop": they end here; "fail".
    - `alias_of`: the node whose queue and instances this one shares; everything but its place in the graph is equal.

    The runner rejects filters that are neither built in nor registered.
    """

    name: str
    steps: tuple[NodeStep, ...] = ()
    next: tuple[str, ...] = ()
    inputs: tuple[NodeInput, ...] = ()
    filter: str = "swap"
    instances: int = 1
    processes: int | Literal["auto"] = 0
    max_batch: int | None = None
    min_batch: int = 1
    sizes: tuple[int, ...] = ()
    wait_s: float | None = None
    bucket: tuple[str, ...] | None = None
    pad_to: tuple[int, ...] = ()
    device: str = "cpu"
    queue: int | None = None
    queue_bytes: int | None = None
    deadline_s: float | None = None
    run_timeout_s: float = RUN_TIMEOUT_S
    retry_split: bool = True
    idempotent: bool = True
    alias_of: str | None = None
    each: Each | None = None
    when: str | None = None
    otherwise: Literal["skip", "skip_branch", "stop", "fail"] = "skip"
    on_error: Literal["fail", "skip"] = "fail"
    require: Literal["all", "any"] = "all"


class Graph(Struct, frozen=True, omit_defaults=True):
    """A whole pipeline, with its nodes in the order of their definition.

    - `entry`: where an item begins unless it names a node.
    - `in_flight`: most items inside at once. None: the sum of what nodes and queues hold.
    - `client_request`: items have that field, the request that they came with.
    - `trace`: responses include the item's path.
    - `compat`: TorchPipe's dialect, in which unknown keys cause warnings instead of errors.
    - `folder`: base of relative paths.
    - `takes`, `gives`: the fields that callers send and receive.
    - `tensors`, `results`: the same as declared tensors; (): not declared.
    - `sources`: the results that are fields of certain nodes.
    """

    name: str
    nodes: dict[str, Node]
    entry: str
    in_flight: int | None = None
    client_request: bool = False
    trace: bool = False
    compat: bool = False
    folder: str = "."
    takes: tuple[str, ...] = ("data",)
    gives: tuple[str, ...] = ("result",)
    tensors: tuple[TensorSpec, ...] = ()
    results: tuple[TensorSpec, ...] = ()
    sources: tuple[NodeInput, ...] = ()

    @property
    def starts(self) -> tuple[str, ...]:
        """Where items begin: the entry, and the nodes that follow none and take fields of the request."""
        first = [n.name for n in self.nodes.values() if starts_item(n) and not self.producers(n.name)]
        return (self.entry, *(name for name in first if name != self.entry and not self.callers(name)))

    @property
    def begins_with(self) -> tuple[str, ...]:
        """The fields of an item when it begins: those that callers send, and its request."""
        return (*self.takes, CLIENT_REQUEST) if self.client_request else self.takes

    @property
    def kept(self) -> frozenset[str]:
        """The nodes whose fields later nodes or the response take, and the REQUEST if its fields are taken."""
        inputs = (i for node in self.nodes.values() for i in node.inputs)
        return frozenset(i.producer for i in (*inputs, *self.sources))

    def begun(self, fields: Fields) -> Fields:
        """The fields with `data`: unless it is an input itself, the only input, or the list of all.

        Raises BadRequest for a missing input.
        """
        if self.client_request and CLIENT_REQUEST not in fields:
            fields = {**fields, CLIENT_REQUEST: Request()}
        if DATA in fields or DATA in self.takes:
            return fields
        names = [name for name in self.takes if name != NODE_NAME]
        if missing := [name for name in names if name not in fields]:
            raise BadRequest(f"input '{missing[0]}' is missing; the pipeline needs {', '.join(names)}")
        return {**fields, DATA: fields[names[0]] if len(names) == 1 else [fields[name] for name in names]}

    def edges(self) -> Iterator[tuple[str, str, bool]]:
        """Producer, consumer, and whether the edge begins a fan-out, for each edge in the order of the producers."""
        for node in self.nodes.values():
            yield from ((node.name, after, False) for after in node.next)
            if node.each is not None:
                yield node.name, node.each.body, True

    def producers(self, name: str) -> tuple[str, ...]:
        """The nodes whose `next` names this one, in the order of their definition."""
        return tuple(n.name for n in self.nodes.values() if name in n.next)

    def callers(self, body: str) -> tuple[str, ...]:
        """The nodes whose fan-outs go through the body that begins at a node."""
        return tuple(n.name for n in self.nodes.values() if n.each is not None and n.each.body == body)

    @property
    def bodies(self) -> dict[str, frozenset[str]]:
        """The nodes of each fan-out's body, without bodies inside it, by its first node."""
        firsts = dict.fromkeys(n.each.body for n in self.nodes.values() if n.each is not None)
        return {first: frozenset({first}) | self.downstream(first) for first in firsts}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The nodes without a `next`, except in bodies of fan-outs."""
        inner = frozenset[str]().union(*self.bodies.values())
        return tuple(n.name for n in self.nodes.values() if not n.next and n.name not in inner)

    def order(self) -> tuple[str, ...]:
        """All nodes in topological order. Raises ValueError for a cycle, which `check` reports first."""
        if found := cycle_in(self.nodes):
            raise ValueError(f"the nodes {found} are in a cycle")
        places = {name: place for place, name in enumerate(self.nodes)}
        sorter = TopologicalSorter(self._all_producers())
        sorter.prepare()
        order: list[str] = []
        while sorter:
            ready = sorted(sorter.get_ready(), key=places.__getitem__)
            order += ready
            sorter.done(*ready)
        return tuple(order)

    def upstream(self, name: str) -> frozenset[str]:
        """All nodes from which an item may reach this one."""
        return _reachable(name, self._all_producers().__getitem__)

    def downstream(self, name: str) -> frozenset[str]:
        """All nodes that an item may reach from this one."""
        return _reachable(name, lambda other: self.nodes[other].next)

    def _all_producers(self) -> dict[str, list[str]]:
        """The nodes directly before each node. A fan-out is before its body, which is before the next nodes.

        A body of several fan-outs is before none, because one of them may follow another.
        """
        bodies = self.bodies
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            ends = [node.name]
            if node.each is not None:
                found[node.each.body].append(node.name)
                if len(self.callers(node.each.body)) == 1:
                    ends += [name for name in bodies[node.each.body] if not self.nodes[name].next]
            for target in dict.fromkeys(node.next):
                found[target] += ends
        return found


def part_name(place: int) -> str:
    """The name of a part of `data`."""
    return f"{DATA}[{place}]"


def starts_item(node: Node) -> bool:
    """Whether a node takes fields of the request only."""
    return bool(node.inputs) and all(i.producer == REQUEST for i in node.inputs)


def reached_by(nodes: Mapping[str, Node], start: str) -> frozenset[str]:
    """A node and all nodes that an item or its children may reach from it."""
    return frozenset({start}) | _reachable(start, lambda name: _following(nodes[name]))


def outside(graph: Graph, body: str) -> frozenset[str]:
    """The nodes outside the body that begins at `body` of which nodes in it take fields."""
    inner = reached_by(graph.nodes, body)
    return frozenset(i.producer for name in inner for i in graph.nodes[name].inputs) - inner


def _following(node: Node) -> tuple[str, ...]:
    return node.next if node.each is None else (*node.next, node.each.body)


def cycle_in(nodes: Mapping[str, Node]) -> str:
    """A cycle as "a -> b -> a", or ""."""
    try:
        TopologicalSorter({name: _following(node) for name, node in nodes.items()}).prepare()
    except CycleError as e:
        return " -> ".join(reversed(e.args[1]))
    return ""


def _reachable(start: str, following: Callable[[str], Iterable[str]]) -> frozenset[str]:
    found: set[str] = set()
    stack = list(following(start))
    while stack:
        if (node := stack.pop()) not in found:
            found.add(node)
            stack += following(node)
    return frozenset(found)


def chain_of(graph: Graph, name: str) -> tuple[str, ...]:
    """The chain that begins at a node: up to a branch, a join or the end."""
    chain = [name]
    while len(after := graph.nodes[chain[-1]].next) == 1 and not join_sources(graph, after[0]):
        chain.append(after[0])
    return tuple(chain)


def subgraph_of(graph: Graph, name: str) -> tuple[str, ...]:
    """A node, and the nodes after it that items reach only through it."""
    found = [name, *(other for other in graph.order() if other in graph.downstream(name))]
    while outer := {n for n in found[1:] if not set(graph.producers(n)) <= {*found}}:
        found = [n for n in found if n not in outer]
    return tuple(found)


class ItemRoute(Struct, frozen=True):
    """Where items that begin at `start` go.

    `outputs` are the outputs they reach, in the graph's order. `waits` is the number of nodes that must finish before
    each join on the route. `starts` are all nodes where they begin, and `sources` the fields that the response takes
    from nodes.
    """

    start: str
    outputs: tuple[str, ...]
    waits: Mapping[str, int]
    starts: tuple[str, ...] = ()
    sources: tuple[NodeInput, ...] = ()


def join_sources(graph: Graph, name: str) -> frozenset[str]:
    """The nodes that must finish before a join: its producers, and the nodes whose fields it takes. Empty: no join.

    In a body, the nodes outside have finished before.
    """
    node = graph.nodes[name]
    producers = graph.producers(name)
    if not node.inputs and len(producers) < 2:
        return frozenset()
    found = (frozenset(producers) | {i.producer for i in node.inputs}) - {REQUEST}
    return found.intersection(*(nodes for nodes in graph.bodies.values() if name in nodes))


def route(graph: Graph, start: str, passed: frozenset[str] = frozenset()) -> ItemRoute:
    """The route of items that begin at `start` and have `passed` other nodes before.

    Raises BadRequest if a node needs a field of a node that is not on the route.
    """
    starts = graph.starts if start == graph.entry else (start,)
    reach = {*starts}.union(*map(graph.downstream, starts))
    waits = {}
    for node in (graph.nodes[name] for name in graph.nodes if name in reach):
        sources = join_sources(graph, node.name) if node.name not in starts else frozenset()
        if sources:
            waits[node.name] = len(sources)
        needed = sources if node.each is None else sources | outside(graph, node.each.body)
        if missing := sorted(needed - reach - passed - {REQUEST}):
            raise BadRequest(
                f"an item cannot begin at node '{start}': node '{node.name}' needs a field of node '{missing[0]}',"
                " which the item does not pass"
            )
    ends = tuple(name for name, n in graph.nodes.items() if name in reach and not n.next)
    return ItemRoute(start, ends, waits, starts, () if graph.callers(start) else graph.sources)


def unknown_filters(nodes: Sequence[Node]) -> list[str]:
    """The filters that are neither built in nor registered, in words."""
    named = [(n, n.filter, "") for n in nodes]
    named += [(n, s.filter, f" of op '{s.op}'") for n in nodes for s in n.steps]
    return [
        f"[{node.name}] filter '{name}'{of} is unknown: the program registers it (register_filter), or write `when`"
        for node, name, of in named
        if name not in (STEP_FILTERS if of else NODE_FILTERS) and not filters.is_known(name)
    ]


# ---- what a node takes from the nodes before it


class Join:
    """The sources and inputs of a node that takes named fields. `sources` is empty for other nodes."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.sources = join_sources(graph, node.name)
        self._name = node.name
        self._any = node.require == "any"
        self._inputs = alternatives(node)
        self._unnamed = self.sources - {i.producer for i in node.inputs}
        self._first = node.inputs[0].producer if node.inputs else ""
        self._parts = [name for name in self._inputs if name.startswith(f"{DATA}[")]

    def is_dead(self, dead: Mapping[str, Fields]) -> bool:
        """Whether a source that the node requires was skipped."""
        if self._any:
            return bool(self.sources) and all(source in dead for source in self.sources)
        return any(source in dead for source in self._unnamed) or any(
            choices[-1].default is UNSET and all(i.producer in dead for i in choices)
            for choices in self._inputs.values()
        )

    def before(self, kept: Mapping[str, Fields], dead: Mapping[str, Fields]) -> Fields:
        """The fields of an item whose join is dead: its first source's."""
        return kept[self._first] if self._first in kept else dead[self._first]

    def fields(self, kept: Mapping[str, Fields]) -> Fields | None:
        """The fields that the node takes. None: a filter ended the item on a branch, so it ends here.

        Raises ItemFailed: a node that ran does not give a field.
        """
        fields: Fields = {}
        for name, choices in self._inputs.items():
            alive = [i for i in choices if i.producer in kept]
            for i in alive:
                if CONTEXT in kept[i.producer]:
                    fields.setdefault(CONTEXT, kept[i.producer][CONTEXT])
            taken = next((i for i in alive if i.source in kept[i.producer]), None)
            if taken is not None:
                fields[name] = kept[taken.producer][taken.source]
            elif choices[-1].default is not UNSET:
                fields[name] = deepcopy(choices[-1].default)
            elif not alive:
                fields[name] = None
            elif alive[0].source == RESULT:
                return None
            else:
                raise ItemFailed(self._missing(alive[0], kept[alive[0].producer]))
        if self._parts:
            fields[DATA] = [fields.pop(name) for name in self._parts]
        return fields

    def _missing(self, given: NodeInput, found: Fields) -> str:
        names = ", ".join(map(str, found)) or "none"
        taken = f"field '{given.source}' of node '{given.producer}'"
        return f"node '{self._name}' takes {taken}, which has only: {names}"


def alternatives(node: Node) -> dict[str, list[NodeInput]]:
    """The inputs of a node by the name of the field."""
    found: dict[str, list[NodeInput]] = {}
    for i in node.inputs:
        found.setdefault(i.name, []).append(i)
    return found


def arriving(fields: Fields) -> Fields:
    """The fields of an item as the next node receives them: the previous result is also the data."""
    return {**fields, DATA: fields[RESULT]}


def unchanged(fields: Fields) -> Fields:
    """The fields of an item that passes a node: at an entry or a join, its data is also the result."""
    return fields if RESULT in fields or DATA not in fields else {**fields, RESULT: fields[DATA]}
