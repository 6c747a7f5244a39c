"""POST /v1/embeddings: each text of a request is a row, so that the texts of all requests share batches."""

from base64 import b64encode
from typing import Any, Final, Literal

import msgspec
from msgspec import Raw, Struct

from penstock.core.contracts import Codec
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols.bodies import JSON, decode_json, is_countable
from penstock.serving.protocols.openai import check_task, count_inputs, inference, schema_of, wrong
from penstock.types import Embedding, EmbeddingRequest, Item, ItemResult, Many, ModelMetadata
from penstock.values import prepare

TASK: Final = "embedding"
MAX_INPUTS: Final = 2048  # the limit of OpenAI's API


class EmbeddingsBody(Struct, forbid_unknown_fields=True):
    """The body of a request. `input` is a text, or tokens, or a list of those."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class EmbeddingUsage(Struct):
    """The tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingVector(Struct):
    """The embedding of one input: numbers, or the Base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingsAnswer(Struct):
    """The body of a response."""

    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class _Peek(Struct):
    input: Raw


_peek = msgspec.json.Decoder(_Peek)
prepare(EmbeddingsBody, EmbeddingsAnswer)


class EmbeddingsCodec(Codec):
    """Codec of `/v1/embeddings`."""

    divisible = True

    def __init__(self, model: str, version: str, metadata: ModelMetadata | None = None, item_type: Any = None) -> None:
        self._model = model
        self._metadata = metadata
        self._request: type[EmbeddingRequest] | None = item_type and item_type.subclass(EmbeddingRequest)

    @staticmethod
    def peek(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
        """(number of inputs, "") unless there may be very many."""
        if not is_countable(body):
            return None
        try:
            return count_inputs(_peek.decode(body).input), ""
        except (msgspec.DecodeError, ValueError, RecursionError):  # the worker reports the error
            return None

    @staticmethod
    def request_content(model: ModelMetadata) -> dict[str, Any]:
        """The same for all models."""
        return {JSON: schema_of(EmbeddingsBody)}

    @staticmethod
    def response_content(model: ModelMetadata) -> dict[str, Any]:
        """The same for all models."""
        return {JSON: schema_of(EmbeddingsAnswer)}

    def decode(self, item: Item) -> tuple[Many, str]:
        """(`Many` texts, or requests for a model that annotates its items so; the encoding of the response)."""
        check_task(self._metadata, TASK)
        body: EmbeddingsBody = decode_json(item.payload, EmbeddingsBody)
        inputs: list[Any] = body.input if isinstance(body.input, list) else [body.input]
        if inputs and isinstance(inputs[0], int):
            inputs = [inputs]
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise wrong("input", f"has {len(inputs)} texts, expected 1 to {MAX_INPUTS}")
        for each in inputs:
            self._check(each)
        if body.dimensions is not None and self._request is None:
            raise wrong("dimensions", "is not supported by this model")
        if item.stop >= 0:
            inputs = inputs[item.start : item.stop]
        if self._request is not None:
            fields = {} if body.dimensions is None else {"dimensions": body.dimensions}
            inputs = [self._made({"input": each, **fields}) for each in inputs]
        return Many(inputs), body.encoding_format

    def _check(self, given: Any) -> None:
        """Raises BadRequest for an input that is empty, or that the model does not take."""
        if not given:
            raise wrong("input", "holds an empty text or a 0, expected texts or lists of tokens")
        if isinstance(given, str):
            return
        if self._request is None:
            raise wrong("input", "holds tokens; this model takes texts")
        if not isinstance(given, list) or not all(type(token) is int for token in given):
            raise wrong("input", "mixes texts and tokens")

    def _made(self, fields: dict[str, Any]) -> EmbeddingRequest:
        assert self._request is not None
        try:
            return msgspec.convert(fields, self._request)
        except msgspec.ValidationError as e:
            raise BadRequest(f"the request does not fit the model: {e}") from None

    def encode(self, value: Any, item: Item, context: Any) -> ItemResult:
        """The vectors, in the order of the inputs. Raises BadOutput."""
        if not isinstance(value, list):
            raise BadOutput(f"the model returned a {type(value).__name__} for the inputs, expected a list")
        data, tokens = [], 0
        for k, each in enumerate(value, item.start):
            result = each if isinstance(each, Embedding) else Embedding(each)
            tokens += result.tokens
            data.append(EmbeddingVector(k, _written(result.vector, context)))
        return _answer(EmbeddingsAnswer(data, self._model, EmbeddingUsage(tokens, tokens)))

    def encode_part(self, value: Any, item: Item, context: Any, first: bool) -> ItemResult:
        """Never called: all inputs are `Many`."""
        raise BadOutput("embeddings do not stream")

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The vectors of all parts, and the sum of their tokens."""
        if len(parts) == 1:
            return parts[0]
        answers = [msgspec.json.decode(part.body, type=EmbeddingsAnswer) for part in parts]
        tokens = sum(answer.usage.total_tokens for answer in answers)
        data = [vector for answer in answers for vector in answer.data]
        return _answer(EmbeddingsAnswer(data, self._model, EmbeddingUsage(tokens, tokens)))


def _answer(answer: EmbeddingsAnswer) -> ItemResult:
    return ItemResult(msgspec.json.encode(answer), JSON)


def _written(vector: Any, encoding: str | None) -> list[float] | str:
    """A vector in the encoding of the response. Raises BadOutput."""
    import numpy as np

    try:
        array = np.asarray(vector, "<f4")
    except (TypeError, ValueError, RuntimeError):
        raise BadOutput(f"the model returned a {type(vector).__name__}, which is no vector") from None
    if array.ndim != 1 or not array.size:
        raise BadOutput(f"the model returned an array of shape {list(array.shape)[:8]}, expected numbers [length]")
    if not np.isfinite(array).all():
        raise BadOutput(f"the model returned NaN or infinity at place {np.isfinite(array).argmin()} of an embedding")
    if encoding == "base64":
        return b64encode(array.tobytes()).decode()
    numbers: list[float] = array.tolist()
    return numbers


ROUTES: Final = (inference("/v1/embeddings", "Embed texts, as OpenAI's API does", "openai_embeddings", TASK),)
