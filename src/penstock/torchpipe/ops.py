"""TorchPipe's ops and filters that native pipelines do not need, and the names of those that are not available."""

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from msgspec import Struct

from penstock.errors import BadRequest, ConfigError
from penstock.pipeline.filters import OUTCOMES, Filter, swap
from penstock.pipeline.model_op import ModelOp
from penstock.pipeline.ops.base import DATA, Array, Fields, ItemOp, as_mat, as_tensor, found
from penstock.pipeline.ops.catalog import BUILTIN
from penstock.plugins import load_object
from penstock.runtimes.torch_files import import_torch
from penstock.torchpipe.boundary import to_array, to_tensor
from penstock.values import convert

ALIASES = {"cp": "Copy", "Del": "Remove", "Empty": "Identity", "mv": "Move", "rm": "Remove"}
"""TorchPipe's other names of ops."""

OPS = {
    **{name: BUILTIN[op] for name, op in ALIASES.items()},
    "BorrowReplay": "penstock.torchpipe.ops:BorrowReplay",
    "C10Exception": "penstock.pipeline.ops.data:Raise",
    "OpenvinoMat": "penstock.torchpipe.ops:OpenvinoMat",
    "PyTensor": "penstock.torchpipe.ops:PyTensor",
    "RuntimeError": "penstock.pipeline.ops.data:Raise",
}
"""The locations of ops that only TorchPipe's files need."""

_GPU = "needs a GPU library that Penstock does not use; use"
_LLM = "serve language models as separate models, not as nodes"
_NONE = "not needed"

NOT_HERE = {
    "CalTorchBatchSize": "rows are counted on the tensor's first axis",
    "CreateTensor": "it is one of TorchPipe's own tests; write a Python op",
    "CvtColorNvTensor": f"{_GPU} CvtColorTensor",
    "LastBatchTensor": _LLM,
    "LoadTensor": "write a Python op that reads the file during load",
    "LoadTensors": "write a Python op that reads the files during load",
    "PPLCopyMakeBorderTensor": f"{_GPU} ResizePadTensor",
    "PPLCropTensor": f"{_GPU} CropTensor",
    "PPLResizePadTensor": f"{_GPU} ResizePadTensor",
    "PPLResizeTensor": f"{_GPU} ResizeTensor",
    "PPLRotateTensor": f"{_GPU} a Python op",
    "PPLWarpAffineTensor": f"{_GPU} PerspectiveTransformMat or a Python op",
    "Remote": "it is not finished in TorchPipe either; serve the other model, and call it from a Python op",
    "RemoveV0": "write Remove[a,b]",
    "ResizeNvTensor": f"{_GPU} ResizeTensor",
    "ResizeTensorV1": f"{_GPU} ResizeTensor",
    "SaveTensor": "write a Python op that saves with numpy.save",
    "SubProcess": "a worker process holds the whole pipeline: use --workers",
    "Tensor2NvTensor": f"{_NONE}: tensors are arrays",
}
"""TorchPipe's ops that are not available, with a replacement. Stream scopes are removed earlier."""

# ---- filters


def _always(outcome: str) -> Callable[[], Filter]:
    return lambda: lambda fields: outcome


def _half_chance() -> Filter:
    return lambda fields: random.choice(("run", "skip"))


def _target(target: str) -> Filter:
    return lambda fields: swap(fields) if str(fields.get("target", target)) == target else "skip"


def _swap_and_copy(name: str) -> Callable[[], Filter]:
    def decide(fields: Fields) -> str:
        if (outcome := swap(fields)) == "run":
            fields[name] = fields[DATA]
        return outcome

    return lambda: decide


def _has_key(key: str = "key") -> Filter:
    return lambda fields: swap(fields) if key in fields else "skip"


def _compare_long_key(compare_target: str, key: str = "key") -> Filter:
    expected = convert(compare_target, int, "compare_target", loose=True)

    def decide(fields: Fields) -> str:
        try:
            found = operator.index(fields[key])
        except KeyError:
            raise BadRequest(f"the filter CompareLongKey found no field '{key}'") from None
        except TypeError:
            kind = type(fields[key]).__name__
            raise BadRequest(f"the filter CompareLongKey found a {kind} as '{key}', expected a whole number") from None
        return swap(fields) if found == expected else "skip"

    return decide


BRANCHES: Final = {"haskey": "HasKey", "comparelongkey": "CompareLongKey"}
"""Filters that are also TorchPipe's backends around one or two others: `HasKey[A,B]` runs A or B."""

FILTERS: Final[dict[str, Callable[..., Filter]]] = {
    **{outcome: _always(outcome) for outcome in OUTCOMES[1:]},
    "half_chance": _half_chance,
    "Target": _target,
    "result2key_1": _swap_and_copy("key_1"),
    "result2other": _swap_and_copy("other"),
    "HasKey": _has_key,
    "CompareLongKey": _compare_long_key,
}
"""Besides `run`, `swap` and `or`, which nodes follow themselves."""

FILTER_NAMES: Final = {name.lower(): name for name in FILTERS} | {
    "continue": "run", "serialskip": "serial_skip", "subgraphskip": "subgraph_skip",
}  # fmt: skip
"""All spellings of these filters, in lower case."""


# ---- ops


class PyTensor(ItemOp):
    """What the function `tensor2tensor` in your module `PyTensor` makes of a tensor: torch.Tensor -> torch.Tensor."""

    takes = "tensor"

    def __init__(self) -> None:
        self.function: Any = load_object("PyTensor:tensor2tensor")

    def __call__(self, data: Any, fields: Fields) -> Any:
        import_torch()  # the function receives a tensor even if nothing else has imported it
        return to_array(self.function(to_tensor(as_tensor(data, "PyTensor"))))


class OpenvinoMat(ModelOp):
    """Runs a model file on images: `[height, width, channels]` -> float32 `[height, width, channels]`.

    The model itself takes `[1, channels, height, width]`. Outputs of three axes lose the first, and outputs of two keep
    both. A tensor `[1, channels, height, width]` as data is accepted too.
    """

    takes = "any"
    gives = "any"

    def __call__(self, data: list[Any], fields: list[Fields]) -> Sequence[Any]:
        """As `ModelOp`."""
        results: list[Any] = []
        for value in data:
            try:
                results.append(_planes(value))
            except BadRequest as e:
                results.append(e)
        fine = [i for i, value in enumerate(results) if not isinstance(value, BadRequest)]
        for i, answer in zip(fine, super().__call__([results[i] for i in fine], []), strict=True):
            results[i] = [_mat(one) for one in answer] if isinstance(answer, list) else _mat(answer)
        return results


def _planes(value: Any) -> Any:
    """The image as `[1, channels, height, width]`. Raises BadRequest."""
    if isinstance(value, np.ndarray) and value.ndim == 4:
        return value
    mat = as_mat(value, "OpenvinoMat").astype(np.float32)
    return np.ascontiguousarray((mat[:, :, None] if mat.ndim == 2 else mat).transpose(2, 0, 1))[None]


def _mat(output: Any) -> Any:
    if not isinstance(output, np.ndarray) or output.ndim < 3 or len(output) != 1:
        return output
    one: Array = output[0]
    return np.ascontiguousarray(one.transpose(1, 2, 0)) if one.ndim == 3 else one


TYPES = ("borrow_or_insert", "borrow_all", "set_replay", "get_replay", "reset")


class _Part(Struct):
    """Rows `start` to `end` of the tensors of item `owner`, and their replay."""

    owner: Any
    tensors: list[Array]
    start: int
    end: int
    replay: Any = None


class BorrowReplay(ItemOp):
    """Lends rows of waiting items to others, and returns their results: TorchPipe's pool, one for each instance.

    The field `borrow_type` is one of:
    - "borrow_or_insert": puts the data, a list of tensors with equal rows, into the pool if it has room, without a
      result. Otherwise the result is the rows that fill the batch, as a list of lists of tensors.
    - "borrow_all": the result is all rows of the pool, which is empty then.
    - "set_replay": the data has the results of the parts that the item `id` borrowed, in their order. No result.
    - "get_replay": the result is the list of results for the rows of the item `id`, in their order.
    - "reset": empties the pool. No result.

    - `max_batch_size`: rows of a full batch.
    """

    reads = ("borrow_type", "id")

    def __init__(self, max_batch_size: int) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size = {max_batch_size}, expected 1 or more")
        self.most = max_batch_size
        self._pool: list[_Part] = []
        self._borrowed: dict[Any, list[_Part]] = {}

    def __call__(self, data: Any, fields: Fields) -> Any:
        """The result, or None for no result. Raises BadRequest."""
        kind, owner = fields.get("borrow_type"), fields.get("id")
        if kind not in TYPES or not isinstance(owner, int | str | None):
            raise BadRequest(f"BorrowReplay found borrow_type {kind!r} and id {owner!r}, expected {', '.join(TYPES)}")
        if kind == "reset":
            self._pool, self._borrowed = [], {}
        elif kind == "borrow_all":
            return self._borrow(owner, sum(part.end - part.start for part in self._pool))
        elif kind == "get_replay":
            return self._replays(owner)
        elif kind == "set_replay":
            parts = self._borrowed.get(owner, [])
            if not isinstance(data, list | tuple) or len(data) != len(parts):
                raise BadRequest(f"BorrowReplay found {found(data)}, expected a result for each of {len(parts)} parts")
            for part, replay in zip(parts, data, strict=True):
                part.replay = replay
        else:
            return self._borrow_or_insert(data, owner)
        return None

    def _borrow_or_insert(self, data: Any, owner: Any) -> list[list[Array]] | None:
        tensors = list(data) if isinstance(data, list | tuple) else []
        rows = {len(one) if isinstance(one, np.ndarray) and one.ndim else -1 for one in tensors}
        count = rows.pop() if len(rows) == 1 else -1
        if not 0 < count < self.most:
            raise BadRequest(f"BorrowReplay found {found(data)}, expected tensors with 1 to {self.most - 1} rows each")
        if sum(part.end - part.start for part in self._pool) + count >= self.most:
            return self._borrow(owner, self.most - count)
        self._pool.append(_Part(owner, tensors, 0, count))
        return None

    def _borrow(self, owner: Any, rows: int) -> list[list[Array]]:
        """Takes rows from the pool, oldest first."""
        taken: list[_Part] = []
        while rows and self._pool:
            part = self._pool[0]
            end = min(part.end, part.start + rows)
            taken.append(_Part(part.owner, part.tensors, part.start, end))
            rows -= end - part.start
            part.start = end
            if part.start == part.end:
                del self._pool[0]
        self._borrowed[owner] = taken
        return [[tensor[part.start : part.end] for tensor in part.tensors] for part in taken]

    def _replays(self, owner: Any) -> list[Any]:
        parts = [part for parts in self._borrowed.values() for part in parts if part.owner == owner]
        if not parts or any(part.replay is None for part in parts):
            raise BadRequest(f"BorrowReplay has no replay of the rows of item {owner!r} yet")
        return [part.replay for part in sorted(parts, key=lambda part: part.start)]
