"""The typed graph of a pipeline: what TOML in either dialect and the Python builder are lowered to. Values only."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

RUN_TIMEOUT_S = 60.0


class Step(Struct, frozen=True, omit_defaults=True):
    """One op of a node: its name as `ops.catalog` knows it, its parameters, and the filter that guards it.

    `filter`: "swap" - the result of the step before becomes the data (without one the item ends there); "or" - runs
    only if there is no result yet; "run" - runs always, as the first step of a node does; "then" - as "swap", if the
    step before ran, else it is passed over as that was: what follows in the brackets of `(or)S[A, B]`.
    """

    op: str
    params: dict[str, Any] = field(default_factory=dict)
    filter: str = "run"


class Input(Struct, frozen=True):
    """A field that a node takes of another node: `producer[source:name]` in TorchPipe's `map`."""

    producer: str
    source: str
    name: str


class Each(Struct, frozen=True):
    """A fan-out: an item for each element of `split`, run through `body`, `gather`ed in order. Held, not run yet."""

    split: str
    body: str
    gather: tuple[str, ...]
    max_fanout: int | None = None
    on_item_error: Literal["null", "drop", "fail_parent"] = "fail_parent"


class Node(Struct, frozen=True, omit_defaults=True):
    """One node: a chain of steps around at most one model, with instances and batches of its own.

    `next` empty: an output. `inputs` empty: all fields of the one producer, its `result` as `data` (filter "swap").
    `max_batch` None: 1 for a model in TorchPipe's dialect and 8 in ours; without a model as many as fit a slice of
    time. `min_batch` and `sizes` are what a model's engine is made for: a smaller batch is padded up. `wait_s` None: 0
    on the CPU, 2 ms on a GPU. `queue` None: at most 2 x instances x max_batch items wait for it. `bucket` None: shape
    and dtype of `data`, where a model is given it. `device` "auto": a GPU of the machine where it runs, if there is
    one. `alias_of`, `each`, `when`, `require` and filters beyond "run", "swap" and "or" are held, and refused by the
    runner.
    """

    name: str
    steps: tuple[Step, ...] = ()
    next: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    filter: str = "swap"
    instances: int = 1
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
    """A whole pipeline. `nodes` in the order of their definition; `entry` is where items begin that name no node.

    `in_flight`: most items inside at once, None: what fits its nodes and edges. `trace`: answers tell their way.
    `compat`: in TorchPipe's dialect, whose unknown keys are warned of. `folder`: what relative paths start from.
    `takes`: the fields that callers give; `answers`: those that they get.
    """

    name: str
    nodes: dict[str, Node]
    entry: str
    in_flight: int | None = None
    trace: bool = False
    compat: bool = False
    folder: str = "."
    takes: tuple[str, ...] = ("data",)
    answers: tuple[str, ...] = ("result",)

    def producers(self, name: str) -> tuple[str, ...]:
        """The nodes whose `next` names this one, in the order of their definition."""
        return tuple(n.name for n in self.nodes.values() if name in n.next)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The nodes without a `next`."""
        return tuple(n.name for n in self.nodes.values() if not n.next)

    def order(self) -> tuple[str, ...]:
        """All nodes, each behind its producers. Raises ValueError in a cycle (`check` has told it before)."""
        waits = {name: len(before) for name, before in self._all_producers().items()}
        places = {name: place for place, name in enumerate(self.nodes)}
        found: list[str] = []
        ready = [name for name, count in waits.items() if not count]
        while ready:
            found += ready
            freed = []
            for target in (target for name in ready for target in dict.fromkeys(self.nodes[name].next)):
                waits[target] -= 1
                if not waits[target]:
                    freed.append(target)
            ready = sorted(freed, key=places.__getitem__)
        if len(found) < len(self.nodes):
            raise ValueError(f"the nodes {', '.join(name for name in waits if waits[name])} are in a cycle")
        return tuple(found)

    def upstream(self, name: str) -> frozenset[str]:
        """All nodes from which an item may come to this one."""
        producers = self._all_producers()
        found: set[str] = set()
        stack = list(producers[name])
        while stack:
            if (node := stack.pop()) not in found:
                found.add(node)
                stack += producers[node]
        return frozenset(found)

    def downstream(self, name: str) -> frozenset[str]:
        """All nodes to which an item may come from this one."""
        found: set[str] = set()
        stack = list(self.nodes[name].next)
        while stack:
            if (node := stack.pop()) not in found:
                found.add(node)
                stack += self.nodes[node].next
        return frozenset(found)

    def _all_producers(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for target in dict.fromkeys(node.next):
                found[target].append(node.name)
        return found
