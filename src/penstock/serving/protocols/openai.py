"""What the OpenAI-style routes share: the list of models, the model that a body names, and the form of errors.

Source: OpenAI's API reference for models, completions, chat completions and embeddings.
"""

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.core.contracts import Backend
from penstock.errors import BadRequest, PenstockError
from penstock.serving.protocols.bodies import decode_json, raw_list
from penstock.serving.protocols.route import POST, Template, json_route
from penstock.types import ModelMetadata

MAX_BODY_BYTES: Final = 8 * 2**20  # the server process reads the model's name in them, at more than 1 GB/s
_SERVER_ERRORS: Final = {  # codes of errors for which the client is not to blame
    "internal", "item_failed", "out_of_memory", "bad_output", "worker_died", "run_timeout", "deadline_exceeded",
    "queue_timeout", "model_not_ready", "load_failed", "cancelled",
}  # fmt: skip
_CODES: Final = {"unauthorized": "invalid_api_key", "bad_request": None}
_TOKENS: Final = re.compile(rb"\[\s*[0-9]")
_PARAMETER: Final = re.compile(r"parameter '([^']+)'|field `([^`]+)`|at `\$\.([^`]+)`")


# ---- errors


class Error(Struct):
    """The error in a body; `param` is the parameter to blame."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """The body of an error."""

    error: Error


def error_body(error: PenstockError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` without the detail of the error."""
    kind = "server_error" if error.code in _SERVER_ERRORS else "invalid_request_error"
    if error.code == "queue_full":
        kind = "rate_limit_error"
    found = _PARAMETER.search(error.message) if isinstance(error, BadRequest) else None
    param = None if found is None else next(filter(None, found.groups()))
    return msgspec.json.encode(ErrorBody(Error(error.message, kind, param, _CODES.get(error.code, error.code))))


def wrong(parameter: str, reason: str) -> BadRequest:
    """The error for a parameter of the body, which `error_body` names."""
    return BadRequest(f"parameter '{parameter[:100]}' {reason}")


def check_task(metadata: ModelMetadata | None, task: str) -> None:
    """Raises BadRequest for a model with another task."""
    found = metadata.task if metadata is not None else ""
    if found != task:
        name = metadata.name if metadata is not None else ""
        has = f"has the task {found!r}" if found else "declares no task"
        raise wrong("model", f"names '{name}', which {has}; this route needs a model with task = {task!r}")


# ---- the model of a request


class _Named(Struct):
    model: str


_named = msgspec.json.Decoder(_Named)


def name_of(body: bytes | memoryview) -> str:
    """The value of "model" in the JSON of a request. Raises BadRequest."""
    try:
        return _named.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return str(decode_json(body, _Named).model)  # raises the error with its reason


def count_inputs(raw: Raw) -> int:
    """How many inputs there are in the JSON of a text, of tokens, or of a list of those. Raises ValueError."""
    found = bytes(raw)
    several = found[:1] == b"[" and _TOKENS.match(found) is None
    return max(1, len(raw_list.decode(found))) if several else 1


def inference(path: str, summary: str, codec: str, task: str) -> Template:
    """The route of a task, whose body names the model."""
    return Template(
        path,
        summary,
        codec=codec,
        error_body=error_body,
        methods=POST,
        name_of=name_of,
        max_body_bytes=MAX_BODY_BYTES,
        task=task,
    )


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a body, with its references inlined."""
    (schema,), components = msgspec.json.schema_components((kind,))

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(each) for each in value]
        if not isinstance(value, dict):
            return value
        name = value.get("$ref", "").rpartition("/")[2]
        return inlined(components[name]) if name else {key: inlined(each) for key, each in value.items()}

    found: dict[str, Any] = inlined(schema)
    return found


# ---- models


class Model(Struct):
    """A model as OpenAI's clients see it, and as KServe's do (`name`, `ready`). `created`: seconds since 1970."""

    id: str
    object: str
    created: int
    owned_by: str
    name: str
    ready: bool


class Models(Struct):
    """The body of /v1/models: `data` for OpenAI's clients, `models` for KServe's."""

    object: str
    data: list[Model]
    models: list[str]


def _models(backend: Backend, model: str, version: str | None) -> Models:
    names = list(dict.fromkeys(status.name for status in backend.statuses()))
    return Models("list", [_model(backend, name, None) for name in names], names)


def _model(backend: Backend, name: str, version: str | None) -> Model:
    ready = backend.model_ready(name, version)
    try:
        created = backend.metadata(name, version)[0].created
    except PenstockError:  # it is not loaded yet
        created = 0
    return Model(name, "model", created, "penstock", name, ready)


_ONE: Final = "/v1/models/{model}"
ROUTES: Final = (
    json_route("/v1/models", "All models", _models, Models, error_body=error_body),
    json_route(_ONE, "Whether a model can answer", _model, Model, error_body=error_body),
    json_route(f"{_ONE}/versions/{{version}}", "Whether a version can answer", _model, Model, error_body=error_body),
)


MAX_TEXTS: Final = 128  # of one request
FinishReason = Literal["stop", "length"]

# ---- requests


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream. `include_obfuscation` is accepted, and nothing is obfuscated."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Controls(Struct, kw_only=True):
    """The parameters that the server handles itself."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_TEXTS)] | None = None


class CompletionControls(Controls, kw_only=True):
    """The server's own parameters of /v1/completions; `echo` begins the text with the prompt."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None


class ChatText(Struct, forbid_unknown_fields=True):
    """One part of the content of a message."""

    text: str
    type: Literal["text"] = "text"


class Message(Struct, forbid_unknown_fields=True):
    """A message of a chat, whose content is text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatText] | None = None
    name: str = ""
    tool_call_id: str = ""


class ChatControls(Controls, kw_only=True):
    """The server's own parameters of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: int | None = None


# ---- responses


class TextUsage(Struct):
    """The tokens of a request, if the model counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(Struct):
    """One text of a completion; in a stream, a part of it."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: None = None


class ChatMessageAnswer(Struct):
    """A message of the model."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    """One choice of a chat."""

    index: int
    message: ChatMessageAnswer
    finish_reason: FinishReason
    logprobs: None = None


class Delta(Struct, omit_defaults=True):
    """The next part of a message; the first one has the role."""

    content: str | None = None
    role: str | None = None


class ChatChunk(Struct):
    """A part of a choice of a chat."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: None = None


class Answer(Struct):
    """The body of a response, or one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: TextUsage | None = None


class CompletionAnswer(Answer):
    """The body of a completion, whole or in part."""

    choices: list[CompletionChoice]


class ChatAnswer(Answer):
    """The body of a chat response."""

    choices: list[ChatChoice]


class AnswerPart(Answer):
    """A response that is to be joined."""

    choices: list[Raw]
