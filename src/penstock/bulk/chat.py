"""Captions from chat completions: vLLM, SGLang, and every other server with OpenAI's API.

A request holds the frames of one chunk as images and returns one text about all of them. An answer that a server would
give again (refused, cut, not of the schema) becomes the error of its row; everything else is an error of the request,
which the sender repeats.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock.bulk.pixels import jpeg_encoder
from penstock.bulk.servers import (
    METADATA_BYTES,
    Asked,
    Backend,
    Headers,
    NotACaptioner,
    Post,
    ServerFault,
    ServerInfo,
    WrongAnswer,
    check_status,
    failed_row,
)
from penstock.bulk.types import Answer, Answers, Chunk, PixelMode
from penstock.client.endpoint import (
    Endpoint,
    ResponseTooLarge,
    authorization,
    check_token_privacy,
    parse_url,
    tls_context,
)
from penstock.client.http import ClientConnection
from penstock.client.response import HttpResponse, one_line
from penstock.errors import BadRequest, ConfigError, ModelNotFound, PayloadTooLarge, nearest
from penstock.images import decode_image, jpeg_header
from penstock.plugins import optional_module
from penstock.serving.protocols.oip_messages import Buffer
from penstock.values import shorten

_logger = logging.getLogger("penstock.bulk")

PROMPT: Final = "Describe this image in one sentence."
CONCURRENT: Final = 8  # requests to begin with
PREFIX: Final = b"data:image/jpeg;base64,"
PLACE: Final = rb'"url":"\u0000"'  # of an image in a request; a text has backslashes before its quotes
TOO_LARGE: Final = re.compile(r"image.*(too large|too big|exceed|larger than|maximum)|(too large|too big).*image", re.I)
QUEUES: Final = re.compile(r"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^}]*\})? (\S+)", re.M)
FENCE: Final = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.S)
REPAIR: Final = "This is not valid: {}. Answer again, with nothing but JSON that fulfils the schema."

_said: set[str] = set()  # servers for which images were scaled down


class ChatBackend(Backend):
    """The API of OpenAI's chat completions. Raises ConfigError for a schema that is none."""

    pixels: PixelMode = "jpeg"
    base64 = True
    headers: Headers = (("Content-Type", "application/json"),)
    shows_queue = errors_are_rows = True

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._prompt = PROMPT if asked.prompt is None else asked.prompt
        self._check = None if asked.schema is None else schema_check(asked.schema)
        fields: dict[str, Any] = {"max_tokens": asked.max_tokens, "temperature": 0}
        if asked.schema is not None:
            form = {"name": "caption", "schema": asked.schema, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        self._fields = {name: value for name, value in (fields | asked.request).items() if value is not None}

    async def describe(self, url: str, model: str, token: str | None, ca: str | None, timeout_s: float) -> ServerInfo:
        """The model in the server's list. An empty name stands for the only one."""
        address = parse_url(url, tls_context(ca) if ca else None)
        address = msgspec.structs.replace(address, prefix=address.prefix.removesuffix("/v1"))
        models = await _models(address, token, timeout_s)
        if not model and len(models) == 1:
            model = next(iter(models))
        if model not in models:
            wrong = f"has no model '{shorten(model, 100)}'{nearest(model, models)}" if model else "needs a --model"
            raise ModelNotFound(f"{address.url} {wrong}; its models: {', '.join(sorted(models)) or 'none'}")
        root, asked = models[model], self.asked
        request = {"system": asked.system, "max_pixels": asked.max_pixels, **self._fields}
        if asked.schema is not None:  # which `response_format` need not have
            request["schema"] = asked.schema
        parameters = {
            "model": model, "prompt": self._prompt, "max_new_tokens": asked.max_tokens, "request": request,
        }  # fmt: skip
        return ServerInfo(
            address=address,
            model=model,
            revision=root if isinstance(root, str) else model,
            max_pixels=asked.max_pixels,
            concurrent=CONCURRENT,
            inputs=frozenset({"jpeg", "file"}),
            parameters=parameters,
        )

    def path(self, info: ServerInfo) -> str:
        return "/v1/chat/completions"

    def encode(self, chunk: Chunk, info: ServerInfo, job: str) -> tuple[Headers, Sequence[Buffer]]:
        return (), self._body(chunk, list(chunk.pixels), info.model)

    def _body(self, chunk: Chunk, images: list[Any], model: str, talk: Sequence[dict[str, str]] = ()) -> list[Buffer]:
        """The request about images, which are base64 or addresses. Several have their times between them."""
        content = list[Any]()
        for time_s in chunk.times_s:
            if len(images) > 1:
                content.append({"type": "text", "text": f"[{time_s:.2f} s]"})
            content.append({"type": "image_url", "image_url": {"url": "\0"}})
        content.append({"type": "text", "text": prompt_for(self._prompt, chunk)})
        messages: list[Any] = [{"role": "system", "content": self.asked.system}] if self.asked.system else []
        messages += [{"role": "user", "content": content}, *talk]
        text = msgspec.json.encode({"model": model, "messages": messages, **self._fields})
        first, *others = text.split(PLACE)
        pieces = [first]
        for image, after in zip(images, others, strict=True):
            pieces += (b'"url":"', b"" if image.startswith(b"file:") else PREFIX, image, b'"', after)
        return [b"".join(pieces)]

    async def answers(self, chunk: Chunk, body: Sequence[Buffer], info: ServerInfo, post: Post) -> Answers:
        """One text, after at most one repair. Images that are too large for the server are sent once more at half
        their size. What the server would answer again is the error of the row."""
        images, tokens = list(chunk.pixels), None
        try:
            try:
                message = read_message(await post(body), info.url)
            except BadRequest as error:
                if images[0].startswith(b"file:") or not is_too_large(error):
                    raise
                if info.url not in _said:
                    _said.add(info.url)
                    _logger.warning(
                        "server=%s takes no image of this size, which is sent again at half its size; so are others, "
                        "and a smaller --max-pixels spares the attempts: %s", info.url, error.message,
                    )  # fmt: skip
                images = await asyncio.to_thread(lambda: [halved(image) for image in images])
                message = read_message(await post(self._body(chunk, images, info.model)), info.url)
            tokens = message.tokens
            text, problem = self._caption(message)
            if problem and self._check is not None and message.complete:
                talk = [
                    {"role": "assistant", "content": message.text},
                    {"role": "user", "content": REPAIR.format(problem)},
                ]
                message = read_message(await post(self._body(chunk, images, info.model, talk)), info.url)
                if tokens is not None and message.tokens is not None:
                    tokens = tokens[0] + message.tokens[0], tokens[1] + message.tokens[1]
                text, problem = self._caption(message)
        except (BadRequest, ResponseTooLarge) as error:  # about this request: its images, its length, its answer
            return [failed_row(error, info, tokens)]
        return [Answer(text, problem, tokens)]

    def _caption(self, message: Message) -> tuple[str, str]:
        """The caption of a message, and its fault, or "". What was cut is kept."""
        if problem := message.problem:
            return message.text.strip(), problem
        return (message.text.strip(), "") if self._check is None else self._check(message.text)

    def queued(self, metrics: str) -> int | None:
        found = QUEUES.findall(metrics)
        return int(sum(map(float, found))) if found else None


async def _models(address: Endpoint, token: str | None, timeout_s: float) -> dict[str, Any]:
    """The names of a server's models, and the weights behind each. Raises as `check_status`, and NotACaptioner."""
    check_token_privacy(address, token)
    connection = ClientConnection(address, connect_timeout_s=timeout_s)
    try:
        response = await connection.request(
            "GET", "/v1/models", authorization(token), timeout_s=timeout_s, max_response_bytes=METADATA_BYTES
        )
    finally:
        connection.close()
    if response.status in (404, 405):
        raise NotACaptioner(f"{address.url} has no /v1/models, which servers with OpenAI's API have")
    check_status(response, address.url)
    try:
        return {entry["id"]: entry.get("root") for entry in response.json()["data"]}
    except (TypeError, KeyError, AttributeError):
        raise NotACaptioner(f"{address.url}/v1/models lists no models: {one_line(response.text)}") from None


def prompt_for(template: str, chunk: Chunk) -> str:
    """The template with the values of the names that it may contain; other braces stay."""
    end_s = chunk.times_s[-1] if chunk.clip is None else chunk.clip[1]
    names = {"video": chunk.video.name, "frame": str(chunk.frames[0]), "time": f"{chunk.times_s[0]:.2f}"}
    names["end"] = f"{end_s:.2f}"
    return re.sub(r"\{(video|frame|time|end)\}", lambda found: names[found[1]], template)


def is_too_large(error: BadRequest) -> bool:
    """Whether a smaller image might be accepted."""
    return isinstance(error, PayloadTooLarge) or TOO_LARGE.search(error.message) is not None


def halved(image: bytes) -> bytes:
    """A JPEG as base64, at half its height and width."""
    data = binascii.a2b_base64(image)
    header = jpeg_header(data)
    small = decode_image(data, at_least=(header.height // 2, header.width // 2))
    return binascii.b2a_base64(jpeg_encoder()(small), newline=False)


class Message(Struct):
    """The first choice of a completion; `reason` says why it ended."""

    text: str
    reason: str | None
    refusal: str | None
    tokens: tuple[int, int] | None

    @property
    def problem(self) -> str:
        """Why the text is no caption, or ""."""
        if self.reason == "content_filter" or self.refusal:
            return f"refused: {one_line(self.refusal or 'by the content filter')}"
        if self.reason == "length":
            return "cut at the limit of tokens; --max-tokens raises it"
        return "" if self.text.strip() else "the answer is empty"

    @property
    def complete(self) -> bool:
        """Whether the model ended by itself, so that it may find another form."""
        return not self.problem


class _Text(Struct):
    content: str | None = None
    refusal: str | None = None


class _Choice(Struct):
    message: _Text
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Completion).decode


def read_message(response: HttpResponse, url: str) -> Message:
    """The message of a response.

    Raises as `check_status` does, also for an error with status 200, and WrongAnswer for a body that is no completion.
    """
    if response.status == 404:  # the model was there when the job began
        raise ServerFault(f"{url} answered 404: {one_line(response.text)}")
    if response.status == 200 and (status := _status_within(response)):
        response = HttpResponse(status, response.headers, response.body)
    check_status(response, url)
    try:
        found = _decode(response.body)
        choice = found.choices[0]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise WrongAnswer(f"{url}: the response is no chat completion ({error}): {one_line(response.text)}") from None
    usage, message = found.usage, choice.message
    tokens = (usage.prompt_tokens, usage.completion_tokens) if usage is not None else None
    return Message(message.content or "", choice.finish_reason, message.refusal, tokens)


def _status_within(response: HttpResponse) -> int:
    """The status of an error in a response with status 200; 0 if there is none."""
    if b'"choices"' in response.body:
        return 0
    body = response.json()
    error = body.get("error", body) if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    if isinstance(code, int) and 400 <= code < 600:
        return code
    return 500 if isinstance(body, dict) and "error" in body else 0


def schema_check(schema: dict[str, Any]) -> Callable[[str], tuple[str, str]]:
    """A function of a text that returns it as JSON, without blanks, and "", or "" and its fault.

    Raises ConfigError if the schema is not one.
    """
    validators = optional_module("jsonschema.validators", "--schema needs jsonschema", "schema")
    exceptions = optional_module("jsonschema.exceptions", "--schema needs jsonschema", "schema")
    registry = optional_module("referencing", "--schema needs jsonschema", "schema").Registry()
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except exceptions.SchemaError as error:
        raise ConfigError(f"--schema is not a JSON schema: {one_line(error.message)} at {error.json_path}") from None
    validator = kind(schema, registry=registry)  # which fetches nothing

    def check(text: str) -> tuple[str, str]:
        found = FENCE.fullmatch(text.strip())
        try:
            value = msgspec.json.decode(found[1] if found else text)
            wrong = exceptions.best_match(validator.iter_errors(value))
        except (msgspec.DecodeError, RecursionError) as error:
            return "", f"the answer is not JSON: {error}: {shorten(one_line(text), 80)}"
        if wrong is not None:
            return "", f"the answer does not fulfil the schema at {wrong.json_path}: {one_line(wrong.message)}"
        return msgspec.json.encode(value).decode(), ""

    return check
