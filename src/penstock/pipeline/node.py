"""NodeModel: what one instance of a node runs. It makes the node's ops, and takes batches of visits through them.

All calls are made in the instance's thread. A visit's fields are copied before the first op, so that a batch can be run
again, and an item that fails or ends never moves its neighbours.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from penstock import metrics
from penstock.core.worker.batch import ENDS, out_of_memory
from penstock.errors import BadOutput, BadRequest, ConfigError, ItemFailed, OutOfMemory, PenstockError, describe
from penstock.pipeline.collate import PadTo
from penstock.pipeline.graph import Node
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.base import DATA, RESULT, BatchOp, Fields, ItemOp, Op
from penstock.pipeline.ops.parameters import make_op
from penstock.types import TensorSpec

log = logging.getLogger("penstock.pipeline")

SLICE_ROWS = 32  # most items of a batch without a model
MODEL_ROWS = 8  # of one with a model that says nothing else
LOG_AGAIN_S = 60.0
MAX_LOGGED = 100

_Live = list[tuple[int, Fields]]


class Stamp(Struct):
    """One batch of a node as its thread saw it: `start_s` on the monotonic clock, `run_s` seconds."""

    batch_id: int
    size: int
    start_s: float
    run_s: float = 0.0


class Visit:
    """One item at one node, as the node sees it: `fields`, never changed here, and its `place` in the batch, from 0.

    `swap`: the `result` of the node before is the `data` of this one.
    """

    __slots__ = ("fields", "place", "swap")

    def __init__(self, fields: Fields, swap: bool) -> None:
        self.fields = fields
        self.swap = swap
        self.place = -1  # not in a batch yet


class Shared(Struct, eq=False):
    """What the instances of a node have in common. `ids` numbers their batches.

    Known once one is loaded: `model`, it has an op that takes batches; `given`, that is the first one and takes
    arrays, so that only those of one shape fit together.
    """

    compat: bool = False
    ids: Iterator[int] = field(default_factory=itertools.count)
    model: bool = False
    given: bool = False


class _Step(Struct, frozen=True):
    name: str
    op: Op
    filter: str


class NodeModel:
    """One instance of a node. `predict` gives for each visit (fields, Stamp), or the error that it failed with.

    `then` are nodes that it runs in the same call (`pipeline/inline.py`): for each that a visit came to, the tuple goes
    on with what `predict` gives there.
    """

    def __init__(self, node: Node, shared: Shared | None = None, then: Sequence[tuple[Node, Shared]] = ()) -> None:
        self._node = node
        self._shared = shared or Shared()
        self._then = NodeModel(*then[0], then=then[1:]) if then else None
        self._parts: list[list[_Step]] = []  # steps that are one call: those of items in a row, or one of batches
        self._passed: set[int] = set()  # items that the last "or" passed over, and so each "then" behind it
        self._logged: dict[str, float] = {}
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self.__penstock_options__: dict[str, Any] = {}

    # ---- life

    def load(self, device: str) -> None:
        """Makes and loads the ops. Raises ConfigError, and what an op raises."""
        metrics.count_for_all()
        models: list[BatchOp] = []
        for step in self._node.steps:
            op = make_op(catalog.find(step.op), step.params)
            op.load(device)
            made = _Step(step.op, op, step.filter)
            if isinstance(op, BatchOp):
                if self._node.pad_to and not models:
                    self._parts.append([_Step("pad_to", PadTo(self._node.pad_to), step.filter)])
                    made = _Step(step.op, op, "swap" if step.filter in ("run", "swap") else "then")
                models.append(op)
                self._parts.append([made])
            elif self._parts and isinstance(self._parts[-1][-1].op, ItemOp):
                self._parts[-1].append(made)
            elif isinstance(op, ItemOp):
                self._parts.append([made])
            else:
                raise ConfigError(f"op '{step.op}' is a {type(op).__name__}, expected an ItemOp or a BatchOp")
        one_thread()
        self._shared.model = bool(models)
        first = self._parts[0][0].op if self._parts else None
        self._shared.given = isinstance(first, BatchOp) and first.takes == "tensor"
        self.__penstock_options__ = {"max_batch_size": self._size(models)}
        for op in models:
            self.inputs = self.inputs or tuple(getattr(op, "inputs", None) or ())
            self.outputs = tuple(getattr(op, "outputs", None) or ()) or self.outputs
        if self._then is not None:
            self._then.load(device)

    def _size(self, models: Sequence[BatchOp]) -> int:
        """The most items of a batch."""
        size = self._node.max_batch
        if size is None:
            size = SLICE_ROWS if not models else 1 if self._shared.compat else MODEL_ROWS
        return min([size, *(op.max_rows for op in models if op.max_rows is not None)])

    def unload(self) -> None:
        """Unloads the ops."""
        for part in self._parts:
            for step in part:
                step.op.unload()
        if self._then is not None:
            self._then.unload()

    # ---- a batch

    def predict(self, visits: list[Visit]) -> list[Any]:
        """For each visit (fields, Stamp) or a PenstockError. Raises what a batch op did, if halves may do better."""
        stamp = Stamp(next(self._shared.ids), len(visits), time.monotonic())
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
            if isinstance(part[0].op, BatchOp):
                live = self._batch(part[0], live, out, visits)
            else:
                live = self._items(part, live, out, visits)
            if not live:
                break
        stamp.run_s = time.monotonic() - stamp.start_s
        if self._then is not None:
            self._go_on(self._then, out)
        return out

    @staticmethod
    def _go_on(then: NodeModel, out: list[Any]) -> None:
        """Takes the items that have a result through the node that follows."""
        going = [i for i, found in enumerate(out) if type(found) is tuple and found[0].get(RESULT) is not None]
        if not going:
            return
        for i, found in zip(going, then.predict([Visit(out[i][0], swap=True) for i in going]), strict=True):
            out[i] += found if type(found) is tuple else (found,)

    def _items(self, part: list[_Step], live: _Live, out: list[Any], visits: list[Visit]) -> _Live:
        """Takes each item through steps that look at one; what is left goes on."""
        left: _Live = []
        chain: list[tuple[Any, str]] = [(step.op, step.filter) for step in part]
        for i, fields in live:
            done = 0
            try:
                for op, guard in chain:
                    if guard == "then" and i in self._passed:
                        done += 1
                        continue
                    if guard in ("swap", "then"):
                        if fields.get(RESULT) is None:
                            break
                        fields[DATA] = fields.pop(RESULT)
                    elif guard == "or" and fields.get(RESULT) is not None:
                        self._passed.add(i)
                        done += 1
                        continue
                    result = op(fields[DATA], fields)
                    if result is None:
                        fields.pop(RESULT, None)
                    else:
                        fields[RESULT] = result
                    done += 1
                else:
                    left.append((i, fields))
            except ENDS:
                raise
            except BaseException as e:
                out[i] = self._error(e, part[done], fields, visits, i)
        return left

    def _batch(self, step: _Step, live: _Live, out: list[Any], visits: list[Visit]) -> _Live:
        """Gives a step all items that are left; those with a result of their own go on."""
        left: _Live = []  # in the order of the visits
        given: _Live = []
        for i, fields in live:
            has = fields.get(RESULT) is not None
            if step.filter == "then" and i in self._passed:
                left.append((i, fields))
                continue
            if step.filter in ("swap", "then"):
                if not has:
                    continue
                fields[DATA] = fields.pop(RESULT)
            elif step.filter == "or" and has:
                self._passed.add(i)
                left.append((i, fields))
                continue
            if DATA in fields:
                given.append((i, fields))
            else:
                out[i] = self._error(KeyError(DATA), step, fields, visits, i)
        if given:
            left += self._run(step, given, out, visits)
            left.sort(key=_place)
        return left

    def _run(self, step: _Step, given: _Live, out: list[Any], visits: list[Visit]) -> _Live:
        """The items of `given` that have not failed, with their results. Raises what the op did, to be halved."""
        op: Any = step.op
        n = len(given)
        try:
            results = op([fields[DATA] for _, fields in given], [fields for _, fields in given])
            if len(results) != n:
                found = f"{len(results)} results for {n} items"
                raise BadOutput(f"op '{step.name}' returned {found}, expected one for each item")
        except ENDS:
            raise
        except BaseException as e:
            node = self._node
            again = node.idempotent and (node.retry_split or out_of_memory(e)) and not isinstance(e, BadOutput)
            if n > 1 and again:
                raise
            for i, fields in given:
                out[i] = self._error(e, step, fields, visits, i)
            return []
        left: _Live = []
        for (i, fields), result in zip(given, results, strict=True):
            if isinstance(result, BaseException):
                out[i] = self._error(result, step, fields, visits, i)
                continue
            if result is None:
                fields.pop(RESULT, None)
            else:
                fields[RESULT] = result
            left.append((i, fields))
        return left

    # ---- errors

    def _error(self, error: BaseException, step: _Step, fields: Fields, visits: list[Visit], i: int) -> PenstockError:
        """The error of one item; its message may leave the process, where it happened stands in its detail."""
        where = f"node '{self._node.name}', op '{step.name}', item {visits[i].place} of its batch"
        if isinstance(error, PenstockError):
            detail = f"{where}\n{error.detail}"
            try:  # anew: one error may be that of several items
                return type(error)(error.message, retry_after_s=error.retry_after_s, detail=detail)
            except TypeError:  # a class of the user's, that is made otherwise
                error.detail, error.__traceback__ = detail, None
                return error
        if isinstance(error, KeyError) and error.args == (DATA,) and DATA not in fields:
            names = ", ".join(map(str, fields)) or "none"
            return BadRequest(f"op '{step.name}' found no field 'data', only: {names}", detail=where)
        text = "".join(traceback.format_exception(error))
        self._warn(f"{step.name} raised {describe(error)}", where, text)
        if out_of_memory(error):
            return OutOfMemory(f"op '{step.name}' ran out of memory on this item", detail=f"{where}\n{text}")
        return ItemFailed(f"op '{step.name}' raised {type(error).__name__}", detail=f"{where}\n{text}")

    def _warn(self, key: str, where: str, text: str) -> None:
        """Logs each distinct error at most once a minute."""
        now = time.monotonic()
        if now - self._logged.get(key, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return
        if len(self._logged) >= MAX_LOGGED:
            self._logged.clear()
        self._logged[key] = now
        log.warning("item_failed where=%r error=%r: its caller gets an error\n%s", where, key, text)


def _place(entry: tuple[int, Fields]) -> int:
    return entry[0]


def one_thread() -> None:
    """Keeps OpenCV, if it is loaded, from making threads of its own for one image: there are other images."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(1)


def tune_process() -> None:
    """Makes threads change places sooner: for a process that does nothing but run pipelines.

    Each return from native code waits for the thread that runs Python, by default up to 5 ms.
    """
    sys.setswitchinterval(0.001)
