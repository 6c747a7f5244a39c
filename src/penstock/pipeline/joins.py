"""Join: what a node takes from the nodes before it, and whether it can run without those that conditions removed."""

from collections.abc import Mapping
from copy import deepcopy

from msgspec import UNSET

from penstock.errors import ItemFailed
from penstock.pipeline.graph import Graph, Node, NodeInput, join_sources
from penstock.pipeline.ops.base import CONTEXT, DATA, RESULT, Fields


class Join:
    """The sources and inputs of a node that takes named fields. `sources` is empty for other nodes."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.sources = join_sources(graph, node.name)
        self._name = node.name
        self._any = node.require == "any"
        self._inputs = alternatives(node)
        self._unnamed = self.sources - {i.producer for i in node.inputs}
        self._first = node.inputs[0].producer if node.inputs else ""

    def is_dead(self, dead: Mapping[str, Fields]) -> bool:
        """Whether the node cannot run without its dead sources."""
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
