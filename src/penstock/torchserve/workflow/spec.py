"""The specification of a workflow: its models, its functions and the graph that both form.

Source: the YAML file in a .war archive, as TorchServe 0.12.0 reads it. A node of `dag` that `models` does not name is a
function of the archive's handler file.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, ValidationError, convert
from msgspec.structs import fields

from penstock.config.schema import Count, Positive
from penstock.errors import ArchiveError, nearest
from penstock.pipeline.graph import Graph, Node, NodeInput, cycle_in
from penstock.pipeline.ops.base import RESULT
from penstock.torchserve.archive.manifest import check_model_name
from penstock.torchserve.protocol.api import ApiError
from penstock.values import found

log = logging.getLogger("penstock.torchserve")

TAKEN: Final = "from "
"""Prefix of a field with the answer of one of several previous nodes."""


class NodeSettings(Struct, frozen=True, kw_only=True, rename="kebab"):
    """The keys of a model, which `models` can also set for all."""

    min_workers: Positive = 1
    max_workers: Positive = 1
    batch_size: Positive = 1
    max_batch_delay: Count = 50  # ms
    retry_attempts: Count = 1  # after the first attempt
    timeout_ms: Positive = 10_000  # of one attempt

    @property
    def workers(self) -> int:
        """The workers to start: `max-workers`, as in TorchServe, but never fewer than `min-workers`."""
        return max(self.min_workers, self.max_workers)


class WorkflowNode(Struct, frozen=True):
    """A node: a model with the archive at `url`, or, without one, the function of its name."""

    name: str
    model: str  # the name that the model is registered with
    settings: NodeSettings
    url: str | None = None


class WorkflowSpec(Struct, frozen=True):
    """A workflow. `dag` has the nodes after each node as the file lists them."""

    name: str
    settings: NodeSettings
    nodes: dict[str, WorkflowNode]
    graph: Graph
    dag: dict[str, list[str]]

    @property
    def dag_text(self) -> str:
        """The DAG in the notation of TorchServe's description: `{a=[b, c], b=[d]}`."""
        return "{" + ", ".join(f"{name}=[{', '.join(after)}]" for name, after in self.dag.items()) + "}"


def make_workflow(name: str, source: Any) -> WorkflowSpec:
    """The workflow in the value of a YAML file. Raises ApiError: InvalidWorkflowException, InvalidDAGException."""
    if not isinstance(source, Mapping):
        raise invalid(f"found {found(source)}, expected the keys models and dag")
    if unknown := [str(key)[:100] for key in source if key not in ("models", "dag")]:
        log.warning("workflow=%s unknown_keys=%s consequence=they_have_no_effect", name, unknown[:10])
    settings, models = _models(source.get("models") or {})
    dag = _dag(source.get("dag"))
    nodes: dict[str, WorkflowNode] = {}
    for node in dict.fromkeys([*dag, *(after for following in dag.values() for after in following)]):
        try:
            model = check_model_name(f"{name}__{node}")
        except ArchiveError as e:
            raise invalid(f"dag: {e.message}") from None
        own = models.get(node)
        if own is None:
            one = NodeSettings(
                max_batch_delay=0, retry_attempts=settings.retry_attempts, timeout_ms=settings.timeout_ms
            )
            nodes[node] = WorkflowNode(node, model, one)
        else:
            nodes[node] = WorkflowNode(node, model, own[0], own[1])
    return WorkflowSpec(name, settings, nodes, _graph(name, nodes, dag), dag)


def invalid(message: str) -> ApiError:
    return ApiError("InvalidWorkflowException", f"workflow specification: {message}")


def _models(source: Any) -> tuple[NodeSettings, dict[str, tuple[NodeSettings, str]]]:
    """The settings for all models, and the settings and URL of each."""
    if not isinstance(source, Mapping):
        raise invalid(f"models: found {found(source)}, expected models by name")
    keys = [each.encode_name for each in fields(NodeSettings)]
    common = {key: value for key, value in source.items() if key in keys}
    models: dict[str, tuple[NodeSettings, str]] = {}
    for name, own in source.items():
        if name in keys:
            continue
        if not isinstance(own, Mapping) or not isinstance(name, str):
            hint = nearest(str(name), keys)
            raise invalid(f"models: {str(name)[:100]}: found {found(own)}, expected a model's keys{hint}")
        url = own.get("url")
        if not isinstance(url, str) or not url:
            raise invalid(f"models: {name[:100]}: found no url, expected the archive's name or URL")
        if unknown := [str(key)[:100] for key in own if key != "url" and key not in keys]:
            log.warning("workflow_model=%s unknown_keys=%s consequence=they_have_no_effect", name, unknown[:10])
        own = {key: value for key, value in own.items() if key in keys}
        models[name] = (_settings(f"models: {name[:100]}", {**common, **own}), url)
    return _settings("models", common), models


def _settings(where: str, values: Mapping[str, Any]) -> NodeSettings:
    try:
        return convert(values, NodeSettings)
    except ValidationError as e:
        raise invalid(f"{where}: {e}") from None


def _dag(source: Any) -> dict[str, list[str]]:
    if not isinstance(source, Mapping):
        raise invalid(f"dag: found {found(source)}, expected nodes, each with a list of the nodes after it")
    dag: dict[str, list[str]] = {}
    for name, after in source.items():
        after = [] if after is None else after
        if not isinstance(name, str) or not isinstance(after, list):
            raise invalid(f"dag: {str(name)[:100]}: found {found(after)}, expected a list of the nodes after it")
        if wrong := next((each for each in after if not isinstance(each, str | None)), None):
            raise invalid(f"dag: {name[:100]}: found {found(wrong)}, expected names of nodes")
        dag[name] = list(dict.fromkeys(each for each in after if each and each.strip()))
    return dag


def _graph(workflow: str, nodes: Mapping[str, WorkflowNode], dag: Mapping[str, list[str]]) -> Graph:
    """The nodes as a pipeline: one that follows several takes the answer of each."""
    before: dict[str, list[str]] = {name: [] for name in nodes}
    for name, following in dag.items():
        for after in following:
            if after == name:
                raise ApiError("InvalidDAGException", f"Self loop exception: {name}")
            before[after].append(name)
    starts = [name for name in nodes if not before[name]]
    if len(starts) != 1:
        named = ", ".join(starts) or "none"
        raise ApiError("InvalidDAGException", f"DAG should have only one start node; found {named}")
    made: dict[str, Node] = {}
    for name in nodes:
        taken = before[name] if len(before[name]) > 1 else ()
        inputs = tuple(NodeInput(producer, RESULT, TAKEN + producer) for producer in taken)
        made[name] = Node(name, next=tuple(dag.get(name, ())), inputs=inputs)
    if cycle := cycle_in(made):
        raise ApiError("InvalidDAGException", f"Not a valid DAG: {cycle}")
    return Graph(workflow, made, starts[0])
