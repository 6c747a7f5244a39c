"""The values that floors hand to each other. Plain data: no behaviour, no I/O.

Structs are `msgspec.Struct`: cheap to make (they are made per request) and typed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct, field

from penstock.errors import PenstockError

Headers = list[tuple[bytes, bytes]]

# Open Inference datatypes and the NumPy dtypes that hold their values
DTYPES: Final = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "float32",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "object",
}
DATATYPES: Final = {dtype: datatype for datatype, dtype in DTYPES.items() if datatype != "BF16"}
# bytes of an element; of BYTES, which have no size, those of its length
SIZES: Final = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8, "BYTES": 4,
}  # fmt: skip


class Item(Struct, omit_defaults=True):
    """One unit of work as the user sees it. The payload is opaque to the core.

    `payload` is what `codec` says: "object" - any Python value (in-process callers); other codecs - the request body
    as `bytes`, a read-only `memoryview`, or a `wire.slabs.Slab` when it is large. `rows` is how many rows of the
    batch it fills. `many` (codec "object" only): the payload is a list of `rows` separate items, which the model sees
    one by one, and the result is the list of their results. `budget_s`: seconds left of its deadline when it was sent;
    told only to models that work on batches side by side.
    """

    payload: Any
    codec: str = "object"
    content_type: str = ""
    rows: int = 1
    many: bool = False
    request_id: str = ""
    headers: Headers | None = None
    start: int = 0  # a part of a split item: rows [start, stop) of it; stop < 0 means all
    stop: int = -1
    budget_s: float | None = None


class ItemResult(Struct, omit_defaults=True):
    """The answer to one Item, or one part of it when it streams.

    `body` is bytes for wire codecs, any value for codec "object". Errors are data: `error` set means that this item
    failed. Every item gets any number of results with `final=False` and exactly one with `final=True`.
    """

    body: Any = b""
    content_type: str = ""
    status: int = 200
    headers: list[tuple[str, str]] | None = None
    error: PenstockError | None = None
    final: bool = True
    reason: str | None = None  # phrase beside the status; None: that of the front-end


Sink = Callable[[ItemResult], None]
"""Called on the event loop's thread, once a part, exactly once with `final=True`."""


class Response:
    """What `predict` may return for an item to choose content type, status and headers itself."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        body: bytes | str,
        content_type: str | None = None,
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        if not isinstance(body, (bytes, bytearray, memoryview, str)):
            raise TypeError(f"Response body must be bytes or str, found {type(body).__name__}")
        if not 200 <= status <= 599:
            raise ValueError(f"Response status must be from 200 to 599, found {status}")
        self.body = body
        self.content_type = content_type or (
            "text/plain; charset=utf-8" if isinstance(body, str) else "application/octet-stream"
        )
        self.status = int(status)
        self.headers = headers or {}


class Headed(Struct):
    """What a model of ours may return for an item: a value as it is otherwise, and headers beside the answer."""

    value: Any
    headers: list[tuple[str, str]]


class TensorSpec(Struct, frozen=True, omit_defaults=True):
    """Name, Open Inference datatype ("FP32", "INT64", "BYTES" ...) and shape; -1 is any size, axis 0 is rows.

    An `optional` input may be left out of a request; the model says which of them belong together.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class ModelMetadata(Struct, frozen=True):
    """What a loaded model says of itself.

    `parameters` are plain values that clients may read beside the tensors. A `revision` among them tells what weights
    and settings answer: it stands in every Open Inference answer of the model.
    """

    name: str
    version: str
    platform: str = "python"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)


class ModelStatus(Struct, frozen=True):
    """One line of the table of models. `state` is one of LOADING, READY, FAILED, DRAINING.

    `traffic` is the version's part of the requests that name no version.
    """

    name: str
    version: str
    state: str
    instances: int
    ready_instances: int
    max_batch_size: int
    devices: tuple[str, ...]
    queue: int = 0
    default: bool = True
    traffic: float = 1.0


class Batch(Struct):
    """What a Transport is given to run on one slot.

    `more`: another batch for this slot follows at once, and may be written together with this one.
    """

    id: int
    slot: int
    items: list[Item]
    more: bool = False


class Ready(Struct):
    """What a worker tells when its model is loaded.

    `options` are those of `@penstock.model`. `profile` holds (rows, seconds) of the warm-up runs, `max_batch_size`
    the size that the warm-up found best, None without a warm-up. `width`: with more than 1, the worker takes batches
    side by side, as long as so many rows are in flight on it.
    """

    metadata: ModelMetadata
    device: str = "cpu"
    pid: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    profile: list[tuple[int, float]] = field(default_factory=list)
    max_batch_size: int | None = None
    width: int = 1


class BatchPart(Struct, omit_defaults=True):
    """One message of a Transport about a batch: any number with `final=False`, then exactly one with `final=True`.

    `results` is aligned with the batch's items; None where this part has nothing for an item. In the final part None
    means that the item had its final result in an earlier part. With `at` (of a batch beside others) `results` are
    final, and of the items at those places, each of which comes once. `run_s` is the worker's own time on the batch,
    `prepare_s` what decoding it took before, where that is done while another batch runs. `stages_s` are the seconds of
    preprocessing (with decoding), predicting and postprocessing (with encoding); None where they overlap.
    `oom` is (fewest rows that ran out of memory, most rows that ran) when the device ran out. With `error` the whole
    batch failed and `results` is empty; `started` False then says that it still waited behind another batch.
    """

    batch_id: int
    results: list[ItemResult | None] = field(default_factory=list)
    final: bool = True
    run_s: float = 0.0
    prepare_s: float = 0.0
    stages_s: tuple[float, float, float] | None = None
    oom: tuple[int, int] | None = None
    error: PenstockError | None = None
    started: bool = True
    metrics: list[MetricDelta] | None = None
    at: list[int] | None = None


class MetricDelta(Struct, array_like=True):
    """A change of one of a model's own metrics since the last batch.

    `kind` is "counter", "gauge", "timer" or "histogram". `unit` and `request_id` are those of TorchServe's metrics.
    """

    kind: str
    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)
    unit: str = ""
    request_id: str = ""
