"""NodeModel: one instance of a node. It creates the node's ops and takes batches of visits through them.

All calls happen in the instance's thread. Each visit's fields are copied before the first op, so that a batch can run
again, and an item that fails or ends does not affect its neighbours.
"""

from __future__ import annotations

import itertools
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from penstock import errors, metrics
from penstock.core.worker.batch import LogLimiter
from penstock.core.worker.devices import visible_gpus
from penstock.pipeline import filters
from penstock.pipeline.collate import PadTo
from penstock.pipeline.filters import Filter
from penstock.pipeline.graph import AUTO, Graph, Node
from penstock.pipeline.handover import BatchStamp, Returned, Visit, fixed
from penstock.pipeline.lower import files_of
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import DATA, RESULT, BatchOp, Fields, ItemOp, Op, make_op
from penstock.pipeline.runtimes import cores
from penstock.runtimes.onnx import CUDA, TENSORRT, import_onnxruntime
from penstock.runtimes.torch_files import import_torch
from penstock.types import TensorSpec

log = logging.getLogger("penstock.pipeline")

SLICE_ROWS = 32  # most items of a batch without a model
MODEL_ROWS = 8  # most items of a batch with a model that sets no limit

_Live = list[tuple[int, Fields]]  # items that are still in the node, by their index in the batch


class SharedState(Struct, eq=False):
    """The common state of a node's instances, or of those in one process. `ids` numbers their batches."""

    compat: bool = False
    ids: Iterator[int] = field(default_factory=itertools.count)

    def __reduce__(self) -> tuple[object, ...]:
        return SharedState, (self.compat,)


class _Step(Struct, frozen=True):
    name: str
    op: Op
    filter: str | Filter


class NodeModel:
    """One instance of a node. `predict` returns (fields, BatchStamp) for each visit, or the error of the item.

    `then` are nodes that run in the same call (see `placement.chain`). For each of them that a visit reaches, the
    tuple continues with that node's result. `ops`: registered ones, for a process that does not know them.

    Loading sets the `parameters`: "model" if an op takes batches, and "takes_arrays" if that op is the first and takes
    arrays. Then only arrays of one shape can share a batch.
    """

    def __init__(
        self,
        node: Node,
        shared: SharedState | None = None,
        then: Sequence[tuple[Node, SharedState]] = (),
        ops: Mapping[str, type[Op]] = {},
    ) -> None:
        for name, op in ops.items():
            catalog.register(name, op)
        self._node = node
        self._shared = shared or SharedState()
        self._then = NodeModel(*then[0], then=then[1:]) if then else None
        self._parts: list[list[_Step]] = []  # consecutive steps of single items, or one step of batches
        self._passed: set[int] = set()  # items that skipped the last guarded step, and so each "then" after it
        self._log_limiter = LogLimiter()
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.parameters: dict[str, Any] = {}
        self.__penstock_options__: dict[str, Any] = {}

    def load(self, device: str) -> None:
        """Creates and loads the ops. Raises ConfigError, and what an op raises."""
        metrics.count_for_all()
        models: list[BatchOp] = []
        for step in self._node.steps:
            op = make_op(catalog.find(step.op), step.params)
            op.load(device)
            name = type(op).__name__ if step.op == "Python" else step.op
            guard = filters.made(step.filter) or step.filter
            made = _Step(name, op, guard)
            if isinstance(op, BatchOp):
                if self._node.pad_to and not models:
                    self._parts.append([_Step("pad_to", PadTo(self._node.pad_to), guard)])
                    made = _Step(name, op, "swap" if guard in ("run", "swap") else "then")
                models.append(op)
                self._parts.append([made])
            elif self._parts and isinstance(self._parts[-1][-1].op, ItemOp):
                self._parts[-1].append(made)
            else:
                self._parts.append([made])
        one_thread()
        first = self._parts[0][0].op if self._parts else None
        arrays = isinstance(first, BatchOp) and first.takes == "tensor"
        self.parameters = {"model": bool(models), "takes_arrays": arrays}
        self.__penstock_options__ = {"max_batch_size": self._size(models)}
        if any(op.unbatched for op in models):
            self.__penstock_options__["rows"] = "none"
        for op in models:
            self.inputs = self.inputs or tuple(getattr(op, "inputs", None) or ())
            self.outputs = tuple(getattr(op, "outputs", None) or ()) or self.outputs
        if self._then is not None:
            self._then.load(device)

    def _size(self, models: Sequence[BatchOp]) -> int:
        """Most items of a batch."""
        size = self._node.max_batch
        if size is None:
            size = SLICE_ROWS if not models else 1 if self._shared.compat else MODEL_ROWS
        return min([size, *(op.max_rows for op in models if op.max_rows is not None)])

    def unload(self) -> None:
        for part in self._parts:
            for step in part:
                step.op.unload()
        if self._then is not None:
            self._then.unload()

    # ---- a batch

    def predict(self, visits: list[Visit]) -> list[Any]:
        """For each visit (fields, BatchStamp) or a PenstockError. Raises an op's error if halves may succeed.

        In a worker process, `Returned` are in place of the tuples.
        """
        if not self._node.processes:
            return self._run_ops(visits)
        own = [fixed(visit.fields) for visit in visits]
        both = zip(self._run_ops(visits), own, strict=True)
        return [Returned(found, given) if type(found) is tuple else found for found, given in both]

    def _run_ops(self, visits: list[Visit]) -> list[Any]:
        stamp = BatchStamp(next(self._shared.ids), len(visits), time.monotonic())
        out: list[Any] = [None] * len(visits)
        self._passed.clear()
        live: _Live = []
        for i, visit in enumerate(visits):
            fields = dict(visit.fields)
            if visit.swap:
                fields[DATA] = fields.pop(RESULT)
            if visit.place < 0:
                visit.place = i
            out[i] = (fields, stamp)
            live.append((i, fields))
        for part in self._parts:
            run = self._batch if isinstance(part[0].op, BatchOp) else self._items
            live = run(part, live, out, visits)
            if not live:
                break
        stamp.run_s = time.monotonic() - stamp.start_s
        if self._then is not None:
            self._go_on(self._then, out)
        return out

    @staticmethod
    def _go_on(then: NodeModel, out: list[Any]) -> None:
        """Takes the items that have a result through the next node."""
        going = [i for i, found in enumerate(out) if type(found) is tuple and found[0].get(RESULT) is not None]
        if not going:
            return
        for i, found in zip(going, then._run_ops([Visit(out[i][0], swap=True) for i in going]), strict=True):
            out[i] += found if type(found) is tuple else (found,)

    def _admit(self, guard: str | Filter, i: int, fields: Fields) -> bool | None:
        """True: the item runs the step, its fields prepared. False: it skips the step. None: it leaves the node."""
        if guard in ("swap", "then"):
            if guard == "then" and i in self._passed:
                return False
            if fields.get(RESULT) is None:
                return None
            fields[DATA] = fields.pop(RESULT)
            return True
        if guard == "run":
            return True
        if callable(guard):
            outcome = guard(fields)
        elif guard == "else":
            outcome = filters.swap(fields) if i in self._passed else "skip"
        else:
            outcome = "run" if fields.get(RESULT) is None else "skip"
        if outcome == "error":
            raise errors.ItemFailed("the filter of the op returned Error")
        (self._passed.add if outcome == "skip" else self._passed.discard)(i)
        return {"run": True, "skip": False}.get(outcome)

    def _items(self, part: list[_Step], live: _Live, out: list[Any], visits: list[Visit]) -> _Live:
        """Takes each item through steps of single items. Returns the items that go on."""
        left: _Live = []
        chain: list[tuple[Any, str | Filter]] = [(step.op, step.filter) for step in part]
        for i, fields in live:
            done = 0
            try:
                for op, guard in chain:
                    admitted = guard == "run" or self._admit(guard, i, fields)
                    if admitted is None:
                        break
                    if admitted:
                        _store(fields, op(fields[DATA], fields))
                    done += 1
                else:
                    left.append((i, fields))
            except BaseException as e:  # also SystemExit: it is no reason to end the instance
                out[i] = self._error(e, part[done], fields, visits[i])
        return left

    def _batch(self, part: list[_Step], live: _Live, out: list[Any], visits: list[Visit]) -> _Live:
        """Runs a batch step on the items that its filter admits. Returns the items that go on, in order."""
        step = part[0]
        left: _Live = []
        given: _Live = []
        for i, fields in live:
            try:
                if (admitted := self._admit(step.filter, i, fields)) is None:
                    continue
                if admitted and DATA not in fields:
                    raise KeyError(DATA)
                (given if admitted else left).append((i, fields))
            except Exception as e:
                out[i] = self._error(e, step, fields, visits[i])
        if given:
            left += self._run(step, given, out, visits)
            left.sort(key=lambda entry: entry[0])
        return left

    def _run(self, step: _Step, given: _Live, out: list[Any], visits: list[Visit]) -> _Live:
        """The items that have not failed, with their results. Raises the op's error if the batch is to be halved."""
        op: Any = step.op
        n = len(given)
        try:
            results = op([fields[DATA] for _, fields in given], [fields for _, fields in given])
            if len(results) != n:
                found = f"{len(results)} results for {n} items"
                raise errors.WrongRowCount(f"op '{step.name}' returned {found}, expected one for each item")
        except BaseException as e:
            node = self._node
            if n > 1 and node.idempotent and (node.retry_split or errors.out_of_memory(e)):
                if isinstance(e, errors.ENDS):
                    raise errors.ItemFailed(f"op '{step.name}' raised {type(e).__name__}") from e
                raise
            for i, fields in given:
                out[i] = self._error(e, step, fields, visits[i])
            return []
        left: _Live = []
        for (i, fields), result in zip(given, results, strict=True):
            if isinstance(result, BaseException):
                out[i] = self._error(result, step, fields, visits[i])
                continue
            _store(fields, result)
            left.append((i, fields))
        return left

    # ---- errors

    def _error(self, error: BaseException, step: _Step, fields: Fields, visit: Visit) -> errors.PenstockError:
        """The error of one item. Its message may leave the process; its detail names the position."""
        node = f"node '{self._node.name}'"
        position = f"{node}, op '{step.name}'"
        where = f"{position}, item {visit.place} of its batch"
        if isinstance(error, errors.PenstockError):
            detail = f"{where}\n{error.detail}"
            named = re.match(rf"(op ')?{re.escape(step.name)}\b", error.message)
            message = f"{node if named else position}: {error.message}"
            try:  # a new instance, because several items may share the error
                return type(error)(message, retry_after_s=error.retry_after_s, detail=detail)
            except TypeError:  # a user's class with other parameters
                if not error.message.startswith(node):
                    error.message, error.args = message, (message,)
                error.detail, error.__traceback__ = detail, None
                return error
        if isinstance(error, KeyError) and error.args == (DATA,) and DATA not in fields:
            names = ", ".join(map(str, fields)) or "none"
            return errors.BadRequest(f"{position} found no field 'data', only: {names}", detail=where)
        text = "".join(traceback.format_exception(error))
        key = f"{step.name} raised {errors.describe(error)}"
        if self._log_limiter.admits(key):
            log.warning("item_failed where=%r error=%r: its caller gets an error\n%s", where, key, text)
        if errors.out_of_memory(error):
            return errors.OutOfMemory(f"{position} ran out of memory on this item", detail=f"{where}\n{text}")
        return errors.ItemFailed(f"{position} raised {type(error).__name__}", detail=f"{where}\n{text}")


def _store(fields: Fields, result: Any) -> None:
    if result is None:
        fields.pop(RESULT, None)
    else:
        fields[RESULT] = result


def one_thread() -> None:
    """Limits OpenCV, if it is loaded, to one thread per image: instances already run concurrently."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(1)


def tune_process() -> None:
    """Shortens the thread switch interval, for a process that only runs pipelines.

    Each return from native code waits for the thread that holds the interpreter lock, by default up to 5 ms.
    """
    sys.setswitchinterval(0.001)


# ---- nodes that run in the call of another

_COMPUTING = tuple(f"penstock.pipeline.ops.{name}" for name in ("decode", "geometry", "mat", "tensor"))
"""Modules of built-in ops that only compute on one image and never wait."""


def chain(graph: Graph, name: str) -> tuple[str, ...]:
    """The nodes that the instances of a node also run, in order: none if aliases share them."""
    if any(name in (node.name, node.alias_of) for node in graph.nodes.values() if node.alias_of is not None):
        return ()
    found = [name]
    while (after := _inlined(graph, found[-1])) is not None and after not in found:
        found.append(after)
    return tuple(found[1:])


def _inlined(graph: Graph, name: str) -> str | None:
    """The next node if the instances of `name` run it in the same call; None if it needs its own.

    A hand-over to another thread costs as much as resizing a small image. It gains nothing if both nodes only compute,
    the first has an instance for each core, and nothing between them waits, merges or is kept. Processes
    run only nodes that have processes too.
    """
    node = graph.nodes[name]
    if len(node.next) != 1 or node.each is not None or node.instances < cores() or not _node_computes(node):
        return None
    after = graph.nodes[node.next[0]]
    if bool(node.processes) != bool(after.processes):
        return None
    plain = Node(
        after.name, after.steps, after.next, instances=after.instances,
        processes=after.processes, max_batch=after.max_batch,
        min_batch=after.min_batch, wait_s=after.wait_s, run_timeout_s=node.run_timeout_s,
        retry_split=after.retry_split, idempotent=after.idempotent,
    )  # fmt: skip
    if after != plain or name in graph.kept or node.on_error != "fail" or graph.producers(after.name) != (name,):
        return None
    return after.name if _node_computes(after) else None


def _node_computes(node: Node) -> bool:
    return node.device == "cpu" and all(computes(catalog.find(step.op)) for step in node.steps)


def computes(op: type[Op]) -> bool:
    """Whether an op only computes on one image, on the CPU."""
    return issubclass(op, ItemOp) and op.__module__ in _COMPUTING and not op.waits


# ---- where nodes run


def placed(graph: Graph, reasons: dict[str, str] | None = None) -> Graph:
    """The graph with a device of this machine for each "auto" node, threads or processes for those with "auto", and no
    more instances than can run at once. `reasons` receives why it has threads or processes, by node."""
    nodes = {name: replace(n, device=_device(n)) if n.device == AUTO else n for name, n in graph.nodes.items()}
    graph = replace(graph, nodes={name: _limited(n) for name, n in nodes.items()})
    if all(node.processes != AUTO for node in graph.nodes.values()):
        return graph
    from penstock.pipeline.auto import chosen  # other pipelines measure nothing

    for name, choice in chosen(graph).items():
        log.info("node=%s processes=%d why=%s", name, choice.processes, choice.why)
        for place, node in graph.nodes.items():
            if name in (place, node.alias_of):
                count = choice.processes or node.instances
                graph.nodes[place] = _limited(replace(node, processes=choice.processes, instances=count))
        if reasons is not None:
            reasons[name] = f"{f'{choice.processes} processes' if choice.processes else 'threads'}: {choice.why}"
    return graph


def _limited(node: Node) -> Node:
    """The node with at most one instance per core if it only computes on the CPU.

    More threads only take turns: on 2 cores, 8 and 4 instances gave 690 images a second, 2 and 2 gave 820.
    """
    most = cores()
    if node.device != "cpu" or node.instances <= most:
        return node
    ops = [catalog.find(step.op) for step in node.steps]
    if not all(computes(op) or op.model_file for op in ops):
        return node
    log.info("node=%s instances=%d of=%d hint=the CPU has no more cores", node.name, most, node.instances)
    return replace(node, instances=most)


def _device(node: Node) -> str:
    params = next((step.params for step in node.steps if "model" in step.params), {})
    if params.get("runtime") in ("cpu", "openvino") or not visible_gpus():
        return "cpu"
    try:
        files = files_of(params)
        if not files or not all(file.lower().endswith(".onnx") for file in files):
            usable, needed = import_torch().cuda.is_available(), "a PyTorch for CUDA"
        else:
            known = import_onnxruntime().get_available_providers()
            usable, needed = bool({CUDA, TENSORRT} & set(known)), "onnxruntime-gpu"
    except errors.LoadFailed:  # loading the node reports it
        return "cpu"
    if not usable:
        log.warning("node=%s device=cpu hint=install %s to use the GPU", node.name, needed)
    return "cuda:0" if usable else "cpu"
