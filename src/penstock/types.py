"""The values that layers exchange, also those of models with a known task. Plain data, no I/O.

`msgspec.Struct` is typed and cheap to create, which happens for every request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

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
# bytes per element; for BYTES the size of the length field
SIZES: Final = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8, "BYTES": 4,
}  # fmt: skip


class SequenceRequest(Struct, omit_defaults=True):
    """One request of a sequence: of requests that an instance answers in order, with a state that it keeps.

    `start` begins the sequence (None: unless it is in progress), `end` ends it after this request; both may be set.
    `state` is set in the worker, for a `predict(items, sequences)`: any value that `predict` stored there before, None
    at the start.
    """

    id: str
    start: bool | None = False
    end: bool = False
    state: Any = None


class Trace(Struct, array_like=True, omit_defaults=True):
    """A span of a traced request: the ids of its trace, of itself, and of its parent or "", in lower-case hex."""

    id: str
    span: str
    parent: str = ""


class Item(Struct, omit_defaults=True):
    """One unit of work as the user sees it. The payload is opaque to the core.

    `codec` determines the `payload`: any Python value for "object" (in-process callers), else the request body as
    `bytes`, a read-only `memoryview`, or a `wire.slabs.Slab` if it is large. `rows` is its share of the batch. `many`
    (codec "object" only): the payload is a list of `rows` separate items, which the model receives one by one, and the
    result is the list of their results. `budget_s`: seconds until its deadline when it is submitted or sent; None
    without one. `priority`: its class; 0 is the most urgent. `arrived_s`: when it was handed over, on the clock of
    `time.monotonic`, if it did not reach the event loop at once. `behind_s`: how much later it may be served than
    others that arrive with it. `wait_s`: the longest wait in the queue, if it is shorter than the model allows.
    `sequence`: for models with `max_sequences`. `ended`: ids of sequences of the instance that ended since its last
    batch, of which it drops the state; set on the first item of a batch.
    `parameters` is set in the worker, by the codec, for a `predict(items, parameters)`, and `files` for the file names
    of a form. `head_bytes`: where the values begin in a payload with a head, if the server process knows it. `length`:
    of its longest row, for models with `bucket = "length"`. `source`: in the server process, what received the request;
    see `penstock.request`. `trace`: its span, if it is traced; see `penstock.tracing`.
    """

    payload: Any
    codec: str = "object"
    content_type: str = ""
    rows: int = 1
    many: bool = False
    request_id: str = ""
    headers: Headers | None = None
    start: int = 0  # part of a split item: rows [start, stop); stop < 0 means all
    stop: int = -1
    budget_s: float | None = None
    priority: int = 0
    arrived_s: float | None = None
    behind_s: float = 0.0
    wait_s: float | None = None
    sequence: SequenceRequest | None = None
    parameters: dict[str, Any] | None = None
    ended: tuple[str, ...] = ()
    head_bytes: int = 0
    length: int = 0
    files: dict[str, list[str]] | None = None
    source: Any = None
    trace: Trace | None = None


class ItemResult(Struct, omit_defaults=True):
    """The response to one Item, or one part of a streamed response.

    `body` is bytes for wire codecs, any value for codec "object". Errors are data: with `error` the item failed. Every
    item gets any number of results with `final=False` and exactly one with `final=True`.
    """

    body: Any = b""
    content_type: str = ""
    status: int = 200
    headers: list[tuple[str, str]] | None = None
    error: PenstockError | None = None
    final: bool = True
    reason: str | None = None  # HTTP reason phrase; None: the default of the status


Sink = Callable[[ItemResult], None]
"""Called on the event loop's thread, or with the guard of a portal: once per part, exactly once with `final=True`."""


class Response:
    """A result of `predict` that sets its own content type, status and headers."""

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


class Step(Struct, frozen=True, omit_defaults=True):
    """What one step of a step model gave for one state.

    A `part` other than None is sent to the client at once, as the parts of a stream are. `done` ends the item.
    """

    part: Any = None
    done: bool = False


class Headed(Struct):
    """A result of our own models: the plain value, and headers for the response."""

    value: Any
    headers: list[tuple[str, str]]


class Many(list[Any]):
    """What a codec decodes from a body of several items: the model receives each of them, the codec all results."""


class Parts(list[Any]):
    """In place of a result for a codec that decoded `Many`: the parts that the model streamed for one item."""


class TensorSpec(Struct, frozen=True, omit_defaults=True):
    """Name, Open Inference datatype ("FP32", "INT64", "BYTES" ...) and shape; -1 is any size, axis 0 is rows (except
    with `rows = "none"`).

    A request may omit an `optional` input; the model documents which of them belong together. `pad` fills up the only
    free axis beside the rows, so that requests of different lengths share a batch.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    pad: bool | int | float | str | None = None


class ModelSchemas(Struct, frozen=True):
    """JSON schemas of one item and one result of a model; {}: unknown. `components` are what they refer to as
    `#/components/schemas/NAME`."""

    item: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    components: dict[str, Any] = field(default_factory=dict)


class ModelMetadata(Struct, frozen=True):
    """What a loaded model declares about itself.

    `parameters` are plain values for clients. A `revision` among them identifies weights and settings; every Open
    Inference response of the model carries it. `created`: when it was loaded, in seconds since 1970. `streams`: an
    answer may have any number of parts. `task` is "" or one of `penstock.types.TASKS`. `takes_parameters`: clients may
    send parameters of their own. `unbatched`: axis 0 of its tensors is not rows (`rows = "none"`). `labels`: names of
    the classes of an output, by their index. `strict_parameters`, `typed_contents` and `strict_json`
    are its keys in the configuration.
    """

    name: str
    version: str
    platform: str = "python"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    created: int = 0
    schemas: ModelSchemas = ModelSchemas()
    streams: bool = False
    task: str = ""
    takes_parameters: bool = False
    unbatched: bool = False
    strict_parameters: bool = False
    typed_contents: bool = False
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    strict_json: bool = False


class ModelStatus(Struct, frozen=True):
    """One line of the table of models. `state` is one of LOADING, READY, IDLE, FAILED, DRAINED, DRAINING.

    `traffic` is the version's share of the requests that name no version.
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
    model_batch_size: int | None = None  # of a model that forms its own batches
    model_devices: tuple[str, ...] = ()  # of a model that uses others than its instances', such as a pipeline


class Batch(Struct):
    """A batch for one slot of a Transport.

    `more`: another batch for this slot follows at once and may be written together with this one. `limit_s`: most
    seconds of its run, if that is less than `run_timeout_s`.
    """

    id: int
    slot: int
    items: list[Item]
    more: bool = False
    limit_s: float = float("inf")


class Graphs(Struct, frozen=True):
    """CUDA graphs of a model: the sizes of batches that have one, ascending, and the memory of the device that they
    take together. `short`: sizes for which there was no more. `failed`: why there is none at all, "" if none was tried.
    """

    sizes: tuple[int, ...] = ()
    memory_bytes: int = 0
    short: tuple[int, ...] = ()
    failed: str = ""


class Ready(Struct):
    """The message of a worker whose model is loaded.

    `options` come from `@penstock.model`. `profile` holds (rows, seconds) of the warm-up runs, `max_batch_size` the
    best size of the warm-up, None without one. With a `concurrency` above 1 the worker runs batches concurrently, up to
    that many rows in flight: in `mode` "continuous", the active items of a step model. `metrics` are what the model
    recorded while it loaded. `coupled`: how the warm-up showed that its rows depend on each other, "" if it did not.
    `sizes`: the batches that it runs, to which others are padded; empty for any. `graphs`: None for a model that needs
    none. `asks_requests`: the model reads the requests of its items; see `penstock.request`.
    """

    metadata: ModelMetadata
    device: str = "cpu"
    pid: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    profile: list[tuple[int, float]] = field(default_factory=list)
    max_batch_size: int | None = None
    concurrency: int = 1
    mode: Literal["batch", "continuous"] = "batch"
    metrics: list[MetricDelta] = field(default_factory=list)
    coupled: str = ""
    sizes: tuple[int, ...] = ()
    graphs: Graphs | None = None
    asks_requests: bool = False


class BatchPart(Struct, omit_defaults=True):
    """One message of a Transport about a batch: any number with `final=False`, then exactly one with `final=True`.

    `results` is aligned with the batch's items; None where this part has nothing for an item. In the final part None
    means that an earlier part held the item's final result. With `at` (concurrent batches) `results` are final and
    belong to the items at those places; each place occurs once. `run_s` is the worker's time on the batch, or with
    `on_device` that of its device for this batch alone; `prepare_s` is the time of decoding it while another batch ran.
    `stages_s` are the seconds of preprocessing (with decoding), prediction and postprocessing (with encoding); None if
    they overlap. `hooks_s` are the shares of the model's own `preprocess` and `postprocess` in the first and the last
    of them. `oom` is (fewest rows that ran out of memory, most rows that ran); `miscounted`: they came back as
    another number of rows instead. With `error` the whole batch failed and `results` is empty; `started` False then
    means that it still waited behind another batch.
    """

    batch_id: int
    results: list[ItemResult | None] = field(default_factory=list)
    final: bool = True
    run_s: float = 0.0
    prepare_s: float = 0.0
    stages_s: tuple[float, float, float] | None = None
    hooks_s: tuple[float, float] | None = None
    oom: tuple[int, int] | None = None
    error: PenstockError | None = None
    started: bool = True
    metrics: list[MetricDelta] | None = None
    at: list[int] | None = None
    miscounted: bool = False
    on_device: bool = False


class MetricDelta(Struct, array_like=True):
    """A change of one of a model's own metrics since the last batch.

    `kind` is "counter", "gauge", "timer" or "histogram". TorchServe's metrics also have a `unit` and a `request_id`.
    """

    kind: str
    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)
    unit: str = ""
    request_id: str = ""


# ---- what models of a known task receive and return behind OpenAI-style routes


Task = Literal["text-generation", "embedding"]
TASKS: Final = ("text-generation", "embedding")
MAX_STOPS: Final = 16


class ChatMessage(Struct, forbid_unknown_fields=True):
    """One message of a conversation. `role` is "system", "developer", "user", "assistant" or "tool"."""

    role: str
    content: str = ""
    name: str = ""


class TextRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a text generator receives. A parameter that the client left out is None.

    `prompt` is a text, or tokens. For a chat it is a plain rendering of the `messages`, for models without a template
    of their own. The model stops before a text in `stop`; `StopScanner` finds them. It raises BadRequest for parameters
    that it does not support. A subclass may add fields: clients may then send parameters of these names.
    """

    prompt: str | list[int] = ""
    messages: list[ChatMessage] = []
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)] = []
    seed: int | None = None


class TextPart(Struct):
    """A part of a generated text with facts about the whole: plain `str` is enough for all parts but the last.

    `finish_reason` is "stop" (the default) or "length", for a text that `max_tokens` or the context ended. The counts
    are those of the whole prompt and of the text up to this part.
    """

    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What an embedding model receives if it annotates its items with this class; otherwise it receives the text.

    `input` is a text, or tokens; `dimensions` is the length of the vector that the client wants.
    """

    input: str | list[int]
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class Embedding(Struct):
    """A result of an embedding model with its number of tokens; a vector alone counts as none.

    `vector` is one-dimensional: an array or a list of finite numbers.
    """

    vector: Any
    tokens: int = 0


def plain_result(result: Any) -> Any:
    """The text of a TextPart and the vector of an Embedding, for formats that carry nothing else; others unchanged."""
    if isinstance(result, TextPart):
        return result.text
    return result.vector if isinstance(result, Embedding) else result


class StopScanner:
    """Cuts a text that arrives in parts before the `stop` text that is complete first."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = list(stop)
        self._held = ""  # the end of the text so far, which may be the beginning of a stop text
        self.stopped = False

    def feed(self, part: str) -> str:
        """The text that is certain; `stopped` is set if a stop text is complete. Then nothing follows."""
        if self.stopped:
            return ""
        text = self._held + part
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """The rest of a text that has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
