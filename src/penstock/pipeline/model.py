"""PipelineModel: a whole pipeline as the model of a worker, for every protocol that models are served by."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct, structs

from penstock.core.worker.python_model import Answer, model, options_of
from penstock.errors import BadOutput, BadRequest, ConfigError, ItemFailed
from penstock.pipeline.check import check
from penstock.pipeline.graph import Graph, Node
from penstock.pipeline.load import load_graph
from penstock.pipeline.local import LocalPipeline, Started
from penstock.pipeline.lower import op_class
from penstock.pipeline.node import tune_process
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import DATA, NODE_NAME, RESULT, Fields
from penstock.pipeline.outcome import Hop, Outcome
from penstock.pipeline.placement import AUTO
from penstock.types import Headed, ModelMetadata, TensorSpec


@model(policy="fixed", max_hold_s=0, max_batch_size=32)
class PipelineModel:
    """What a worker holds whose target is the TOML file of a pipeline.

    A process works on requests side by side: `__penstock_submit__`. In other transports each batch waits for its last
    item: `predict`. The nodes of the pipeline form the batches; those of the requests only carry them here.
    """

    platform = "penstock_pipeline"

    def __init__(self, file: str, compat: bool = False) -> None:
        """`compat`: the file is in TorchPipe's dialect, whose unknown keys are warned of."""
        self._file, self._compat = file, compat
        self._tuned = False
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.parameters: dict[str, Any] = {}

    def load(self, device: str) -> None:
        """Raises ConfigError, LoadFailed."""
        graph = placed(load_graph(self._file, compat=self._compat), device)
        check(graph)
        self._graph = graph
        first = graph.nodes[graph.entry].steps[0]
        self._kind = op_class(first.op, first.params).takes
        known = self._kind == "bytes" and graph.takes == (DATA,)  # of other fields the graph tells no datatype
        self.inputs = (TensorSpec(DATA, "BYTES", (-1,)),) if known else ()
        self.parameters = {"pipeline": described(graph)}
        limits = [node.run_timeout_s for node in graph.nodes.values()]
        self.__penstock_options__ = options_of(PipelineModel) | {
            "run_timeout_s": sum(limits) + max(limits),  # more than an item alone needs that hangs in every node
            "idempotent": all(node.idempotent for node in graph.nodes.values()),
        }
        self._pipeline = LocalPipeline(graph)
        self.outputs = outputs_of(graph, self._pipeline.metadata())

    def predict(self, items: list[Any]) -> list[Any]:
        """The answers; an exception in the place of one that failed."""
        questions = [self._question(item) for item in items]
        asked = [question for question in questions if isinstance(question, Question)]
        many = [(fields, question.node) for question in asked for fields in question.fields]
        outcomes = iter(self._pipeline.infer_many(many))
        return [
            self.answer(question, [next(outcomes) for _ in question.fields])
            if isinstance(question, Question)
            else question
            for question in questions
        ]

    @property
    def __penstock_width__(self) -> int:
        """Items that are inside at once."""
        return self._pipeline.width

    def __penstock_submit__(
        self, values: list[Any], budgets_s: list[float | None], answer: Answer
    ) -> Callable[[], None]:
        """Hands in a batch of requests; each is answered as soon as its items are. The process is a worker's own."""
        if not self._tuned:
            self._tuned = True
            tune_process()
        asked = Asked(self.answer, answer)
        wrong: list[tuple[int, Any]] = []
        for place, (value, budget_s) in enumerate(zip(values, budgets_s, strict=True)):
            question = self._question(value)
            if isinstance(question, Question):
                asked.begin(self._pipeline, place, question, budget_s)
            else:
                wrong.append((place, question))
        if wrong:
            answer(wrong)
        return asked.cancel

    def __penstock_soon__(self, call: Callable[[], None]) -> None:
        """Answers that come in one turn of the pipeline's loop leave together; those of other threads at once."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            call()
        else:
            loop.call_soon(call)

    def unload(self) -> None:
        self._pipeline.close()

    def _question(self, value: Any) -> Question | Exception:
        try:
            return question_of(value, self._graph, self._kind)
        except Exception as e:
            return e

    def answer(self, question: Question, outcomes: list[Outcome]) -> Any:
        """What answers a request whose items have ended: a value, or why there is none."""
        try:
            value = answer_of(question, outcomes, self._graph.answers)
        except Exception as e:
            return e
        if not self._graph.trace:
            return value
        return Headed(value, [("server-timing", server_timing(outcomes[0].hops))])


class Asked:
    """The requests of one batch that are in the pipeline."""

    def __init__(self, make: Callable[[Question, list[Outcome]], Any], answer: Answer) -> None:
        self._make, self._answer = make, answer
        self._started: list[Started] = []

    def begin(self, pipeline: LocalPipeline, place: int, question: Question, budget_s: float | None) -> None:
        """Hands in the items of one request."""
        if len(question.fields) == 1:
            self._started.append(
                pipeline.start(
                    question.fields[0], partial(self._ended, place, question), question.node, budget_s=budget_s
                )
            )
            return
        rows = _Rows(len(question.fields), partial(self._all_ended, place, question))
        self._started += [
            pipeline.start(fields, partial(rows.ended, i), question.node, budget_s=budget_s)
            for i, fields in enumerate(question.fields)
        ]

    def cancel(self) -> None:
        """Nobody waits for the batch any more."""
        for started in self._started:
            started.cancel()

    # ---- on the pipeline's own thread

    def _ended(self, place: int, question: Question, outcome: Outcome) -> None:
        self._all_ended(place, question, [outcome])

    def _all_ended(self, place: int, question: Question, outcomes: list[Outcome]) -> None:
        self._answer([(place, self._make(question, outcomes))])


class _Rows:
    """The outcomes of several items of one request, in order; handed on when all are there."""

    def __init__(self, count: int, done: Callable[[list[Outcome]], None]) -> None:
        self._outcomes: list[Any] = [None] * count
        self._left = count
        self._done = done

    def ended(self, place: int, outcome: Outcome) -> None:
        self._outcomes[place] = outcome
        self._left -= 1
        if not self._left:
            self._done(self._outcomes)


def placed(graph: Graph, device: str) -> Graph:
    """The graph with its models on the device of the worker, unless they say cpu. Raises ConfigError for another GPU.

    A worker of a GPU sees that one alone, as cuda:0. On "cpu" the nodes run where they say.
    """
    if not device.startswith("cuda"):
        return graph
    for node in graph.nodes.values():
        if node.device not in ("cpu", AUTO, device):
            raise ConfigError(
                f"{graph.name}: node '{node.name}': device {node.device}, but this worker has {device} alone, which is"
                " its own GPU; leave the device out, or give the workers devices = ['cpu']: they see all GPUs"
            )
    nodes = {
        name: structs.replace(n, device=device) if n.device == AUTO and _wants(n) else n
        for name, n in graph.nodes.items()
    }
    return structs.replace(graph, nodes=nodes)


def outputs_of(graph: Graph, metadata: Mapping[str, ModelMetadata]) -> tuple[TensorSpec, ...]:
    """The tensors that are answered, where the result is what a model gives. `metadata`: what each node says."""
    if (
        graph.answers != (RESULT,)
        or len(graph.outputs) != 1
        or not catalog.is_model(graph.nodes[graph.outputs[0]].steps[-1].op)
    ):
        return ()
    last = metadata[graph.outputs[0]].outputs
    names = [RESULT] if len(last) == 1 else [f"{RESULT}_{i}" for i in range(len(last))]
    return tuple(TensorSpec(name, t.datatype, (-1, *t.shape[1:])) for name, t in zip(names, last, strict=True))


def _wants(node: Node) -> bool:
    """Whether a node has a model that is not said to run on the CPU."""
    models = [step for step in node.steps if catalog.is_model(step.op)]
    return any(step.params.get("runtime", "auto") not in ("cpu", "openvino") for step in models)


def described(graph: Graph) -> dict[str, Any]:
    """What clients may read of a pipeline: its nodes in order, with their ops by name, and no parameters of these."""
    return {
        "entry": graph.entry,
        "inputs": list(graph.takes),
        "outputs": list(graph.answers),
        "nodes": [
            {
                "name": node.name,
                "ops": [step.op for step in node.steps],
                "next": list(node.next),
                "instances": node.instances,
                "max_batch": node.max_batch,
            }
            for node in (graph.nodes[name] for name in graph.order())
        ],
    }


NAMELESS = "input_0"  # an array that came alone, without a name (`protocols/oip_npy.py`)
MAX_ROWS = 4096  # of one request: they enter one by one, and others wait meanwhile
_NO_TOKEN = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")


class Question(Struct):
    """One request: the fields of its items, the node that they begin at (None: the entry), whether they are rows."""

    fields: list[Fields]
    node: str | None = None
    rows: bool = False


def question_of(value: Any, graph: Graph, kind: str) -> Question:
    """What a decoded body asks. `kind` is that of the data of the entry's first op. Raises BadRequest.

    Arrays by name, as of Open Inference, are as many items as they have rows. An object or a form is the fields of one
    item: those that the graph takes of its callers, no others, for what ops tell each other is not the callers' to say.
    Any other value is its `data`.
    """
    if not isinstance(value, dict):
        return Question([{DATA: value}])
    if value.keys() == {NAMELESS} and isinstance(value[NAMELESS], np.ndarray):
        value = {DATA: value[NAMELESS]}
    for name in value:
        if name not in graph.takes:
            told = f"found the field {str(name)[:40]!r}, which the pipeline does not take; it takes"
            raise BadRequest(f"{told} {', '.join(graph.takes)}")
    if DATA not in value:
        raise BadRequest(f"found no '{DATA}' among the fields of the request; a pipeline needs it")
    if all(isinstance(one, np.ndarray) for one in value.values()):
        rows = {array.shape[:1] for array in value.values()}
        if len(rows) > 1 or not rows.isdisjoint([(), (0,)]):
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in value.items())
            raise BadRequest(f"found {shapes}; expected arrays of as many rows (axis 0), 1 or more")
        if (count := len(value[DATA])) > MAX_ROWS:
            told = f"found {count} rows, expected at most {MAX_ROWS} in one request"
            raise BadRequest(f"{told}: each is an item of its own in a pipeline")
        return Question([_row(value, i, kind) for i in range(count)], rows=True)
    node = value.get(NODE_NAME)
    if node is not None and not isinstance(node, str):
        raise BadRequest(f"{NODE_NAME}: found a {type(node).__name__}, expected the name of a node")
    return Question([{str(name): one for name, one in value.items() if name != NODE_NAME}], node)


def _row(arrays: Mapping[str, np.ndarray[Any, Any]], i: int, kind: str) -> Fields:
    """The fields of one row: bytes and text as they are, a mat `[h, w, c]`, and else a tensor `[1, ...]`."""
    return {
        name: array[i] if array.dtype.kind == "O" or (name == DATA and kind == "mat") else array[i : i + 1]
        for name, array in arrays.items()
    }


def answer_of(question: Question, outcomes: Sequence[Outcome], outputs: Sequence[str]) -> Any:
    """The value that answers a request: the one output, or several by their names. Raises what an item failed with.

    Of rows it is a dict of arrays: results `[1, ...]` are put end to end, others are rows of a new axis.
    """
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        if all(outcome.fields.get(name) is None for name in outputs):
            ended = f" at node '{outcome.node}'" if outcome.node else ""
            raise ItemFailed(f"the item ended{ended} without {' or '.join(outputs)}")
    found = [{name: plain_array(outcome.fields.get(name)) for name in outputs} for outcome in outcomes]
    if not question.rows:
        return found[0] if len(outputs) > 1 else found[0][outputs[0]]
    return {name: array for output in outputs for name, array in _joined(output, [one[output] for one in found])}


def plain_array(value: Any) -> Any:
    """A tensor of PyTorch as an array on the CPU; anything else as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") and hasattr(value, "cpu") else value


def _joined(name: str, values: list[Any]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """The outputs by name that the values of all rows make: several where each is a dict, or a list of arrays."""
    first = values[0]
    if isinstance(first, (list, tuple)) and first and all(hasattr(one, "shape") for one in first):
        values = [{f"{name}_{i}": one for i, one in enumerate(value)} for value in values]
    elif not isinstance(first, dict):
        return [(name, _array(name, values))]
    if any(not isinstance(value, dict) or value.keys() != values[0].keys() for value in values):
        raise BadOutput(f"output '{name}' has other parts for some rows than for others")
    return [(str(key), _array(str(key), [value[key] for value in values])) for key in values[0]]


def _array(name: str, values: list[Any]) -> np.ndarray[Any, Any]:
    arrays = []
    for value in map(plain_array, values):
        if isinstance(value, (bytes, str)):
            cell = np.empty(1, object)
            cell[0] = value
            arrays.append(cell)
        else:
            arrays.append(np.asarray(value))
    try:
        if all(array.ndim and len(array) == 1 for array in arrays):
            return np.concatenate(arrays)
        return np.stack(arrays)
    except ValueError:
        shapes = sorted({str(list(array.shape)) for array in arrays})
        raise BadOutput(
            f"output '{name}' has rows of different shapes, {' and '.join(shapes[:3])}; ask for one row at a time"
        ) from None


def server_timing(hops: Sequence[Hop]) -> str:
    """The way of an item as a `Server-Timing` header (W3C): each node, and the milliseconds of its run."""
    return ", ".join(
        f"{_NO_TOKEN.sub('_', hop.node)};dur={hop.run_s * 1000:.3f}"
        f';desc="batch {hop.batch_id} of {hop.size}, waited {hop.wait_s * 1000:.3f} ms"'
        for hop in hops
    )
