"""PipelineModel: a whole pipeline as the model of a worker, for every protocol that models are served by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import structs

from penstock.core.worker.python_model import Answer, model, options_of
from penstock.errors import ConfigError
from penstock.pipeline.check import check
from penstock.pipeline.graph import Graph, Node
from penstock.pipeline.load import load_graph
from penstock.pipeline.local import LocalPipeline, Started
from penstock.pipeline.lower import op_class
from penstock.pipeline.node import tune_process
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import DATA, RESULT
from penstock.pipeline.outcome import Outcome
from penstock.pipeline.placing import AUTO
from penstock.pipeline.questions import Question, answer_of, question_of, server_timing
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
