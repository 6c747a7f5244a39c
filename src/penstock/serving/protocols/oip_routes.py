"""Open Inference Protocol v2 over HTTP: the routes, and what the server process reads of a request."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock._version import __version__
from penstock.core.contracts import Backend
from penstock.errors import ModelNotFound, PenstockError, UnsupportedType
from penstock.serving.protocols.bodies import ACCEPT_ENCODING, accepted_coding
from penstock.serving.protocols.oip_binary import head_bytes
from penstock.serving.protocols.oip_heads import facts_of, large_parameters, terms_of
from penstock.serving.protocols.oip_messages import HEADER_LENGTH, parse_length
from penstock.serving.protocols.route import POST, Read, Template, Terms, json_route
from penstock.types import Item, TensorSpec

CODED: Final = "_coded"  # ends the names of the codecs that compress responses
_LENGTH_HEADER: Final = HEADER_LENGTH.lower().encode()
EXTENSIONS: Final = (
    "binary_tensor_data", "classification", "logging", "model_configuration", "model_repository", "parameters",
    "schedule_policy", "sequence", "statistics", "system_shared_memory", "trace",
)  # fmt: skip


def error_body(error: PenstockError) -> bytes:
    """`{"error": "..."}` without the detail of the error."""
    return msgspec.json.encode({"error": error.message})


# ---- what the server process reads of a request


def read_terms(item: Item) -> Terms | None:
    """The parameters `timeout` and `priority` of a request; None without them. The worker reports faults."""
    codec, body = item.codec.removesuffix(CODED), getattr(item.payload, "view", item.payload)
    if codec == "oip_binary":
        return facts_of(bytes(body[: head_bytes(item)])).terms
    if codec == "oip_npy":
        return None
    # JSON in a Buffer has more than 64 KiB
    return terms_of(bytes(body) if body is item.payload else large_parameters(body))


# ---- routes


def select_codec(special: Mapping[bytes, bytes], content_type: bytes) -> tuple[str, int]:
    """The codec of a request that is not plain JSON, otherwise "", and the length of the JSON before binary tensors.

    Raises BadRequest, UnsupportedType for a pickle.
    """
    kind = content_type.lower()
    if b"pickle" in kind:
        raise UnsupportedType("the body is a pickle, which is never loaded here; send JSON, or binary tensors")
    length = special.get(_LENGTH_HEADER)
    head_bytes = 0 if length is None else parse_length(length)
    codec = "oip_binary" if length is not None else "oip_npy" if b"x-npy" in kind else ""
    if accepted_coding(special.get(ACCEPT_ENCODING, b"")):
        codec = (codec or "oip_json") + CODED
    return codec, head_bytes


class Live(Struct):
    """The body of /v2/health/live."""

    live: bool


class Ready(Struct):
    """The body of /v2/health/ready."""

    ready: bool


class ModelReady(Struct):
    """The body of /v2/models/{m}/ready."""

    name: str
    ready: bool


class ServerDescription(Struct):
    """The body of /v2."""

    name: str
    version: str
    extensions: Sequence[str]


class Description(Struct):
    """The body of /v2/models/{m}."""

    name: str
    versions: list[str]
    platform: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    parameters: dict[str, Any]


class VersionState(Struct):
    """A version of a model in /v2/models."""

    name: str
    version: str
    state: str
    default: bool


class ModelList(Struct):
    """The body of /v2/models: the names as KServe lists them, and every version."""

    models: list[str]
    versions: list[VersionState]


def live(backend: Backend, model: str, version: str | None) -> Live:
    """Whether the server is alive: true."""
    return Live(True)


def ready(backend: Backend, model: str, version: str | None) -> Ready:
    """Whether every model can answer."""
    return Ready(backend.ready())


def _server(backend: Backend, model: str, version: str | None) -> ServerDescription:
    return ServerDescription("penstock", __version__, EXTENSIONS)


def _models(backend: Backend, model: str, version: str | None) -> ModelList:
    statuses = backend.statuses()
    versions = [VersionState(s.name, s.version, s.state, s.default) for s in statuses]
    return ModelList(list(dict.fromkeys(s.name for s in statuses)), versions)


def _metadata(backend: Backend, model: str, version: str | None) -> Description:
    m, versions = backend.metadata(model, version)
    return Description(
        m.name, versions if version is None else [version], m.platform, m.inputs, m.outputs, m.parameters
    )


def _model_ready(backend: Backend, model: str, version: str | None) -> ModelReady:
    return ModelReady(model, backend.model_ready(model, version))


def _model_ready_or_not(backend: Backend, model: str, version: str | None) -> ModelReady:
    """As over HTTP, but a model that does not exist is not ready: gRPC has no status for that answer."""
    try:
        return _model_ready(backend, model, version)
    except ModelNotFound:
        return ModelReady(model, False)


def _infer(path: str) -> Template:
    return Template(
        path,
        "Infer by the Open Inference Protocol",
        codec="oip_json",
        error_body=error_body,
        select=select_codec,
        select_headers=(_LENGTH_HEADER, ACCEPT_ENCODING),
        read_terms=read_terms,
    )


def _generate(path: str, summary: str, codec: str) -> Template:
    return Template(path, summary, codec=codec, error_body=error_body, methods=POST, own_events=True)


def _get(path: str, summary: str, read: Read, response: type[Struct], open: bool = False) -> Template:
    return json_route(path, summary, read, response, open=open, error_body=error_body)


_MODEL: Final = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
ROUTES: Final = (
    *(_infer(f"{path}/infer") for path in _MODEL),
    *(_generate(f"{path}/generate", "Infer by Triton's plain JSON", "oip_generate") for path in _MODEL),
    *(
        _generate(f"{path}/generate_stream", "Infer by Triton's plain JSON, with events", "oip_generate_stream")
        for path in _MODEL
    ),
    _get("/v2", "Name and version of the server", _server, ServerDescription),
    _get("/v2/health/live", "Whether the server is alive", live, Live, open=True),
    _get("/v2/health/ready", "Whether every model can answer", ready, Ready, open=True),
    _get("/v2/models", "All models and their versions", _models, ModelList),
    *(_get(path, "Inputs and outputs of a model", _metadata, Description) for path in _MODEL),
    *(_get(f"{path}/ready", "Whether a model can answer", _model_ready, ModelReady) for path in _MODEL),
)
# the same by the names of the gRPC calls
CALLS: Final[Mapping[str, Read]] = {
    "ServerLive": live,
    "ServerReady": ready,
    "ServerMetadata": _server,
    "ModelReady": _model_ready_or_not,
    "ModelMetadata": _metadata,
}
