"""POST /v1/completions and /v1/chat/completions for text generators, as a whole or as server-sent events.

A model receives a TextRequest for each text that it is to write: `n` of them for each prompt. They are rows of their
own, so that the texts of all requests share batches. A stream has one text.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct, structs

from penstock.core.contracts import Codec
from penstock.errors import BadOutput, BadRequest
from penstock.serving.protocols import openai
from penstock.serving.protocols.bodies import JSON, decode_json, is_countable
from penstock.types import ChatMessage, Item, ItemResult, Many, ModelMetadata, Parts, TextPart, TextRequest
from penstock.values import prepare

TASK: Final = "text-generation"
SSE: Final = "text/event-stream"
DONE: Final = b"data: [DONE]\n\n"
# parameters without an effect on the text
_IGNORED: Final = frozenset(
    {
        "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "user",
    }
)  # fmt: skip
# parameters that no model has by itself, with the values that change nothing
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class _Context(Struct):
    """What the response to a request needs; `whole` is what the parts of its stream have said of the whole."""

    id: str
    created: int
    texts_per_prompt: int
    stream: bool
    usage: bool
    echo: list[str]
    whole: TextPart


class _Peek(Struct):
    prompt: Raw = Raw(b"")
    n: int | None = None
    stream: bool | None = None


_peek = msgspec.json.Decoder(_Peek)
prepare(openai.AnswerPart)
msgspec.convert({}, TextRequest)  # msgspec 0.22 crashes when two threads convert to a type for the first time at once


def _rows(item: Item, body: bytes | memoryview) -> tuple[int, str] | None:
    """(number of texts, "") unless there may be very many."""
    if not is_countable(body):
        return None
    try:
        found = _peek.decode(body)
        prompts = openai.count_inputs(found.prompt)
    except (msgspec.DecodeError, ValueError, RecursionError):  # the worker reports the error
        return None
    rows = 1 if found.stream else prompts * (found.n or 1)
    return (rows if 1 <= rows <= openai.MAX_TEXTS else 1), ""


class CompletionsCodec(Codec):
    """Codec of `/v1/completions`, and base of the codec of `/v1/chat/completions`."""

    divisible = True
    peek = staticmethod(_rows)
    controls: type[openai.Controls] = openai.CompletionControls
    answer: type[openai.Answer] = openai.CompletionAnswer
    names = ("cmpl-", "text_completion", "text_completion")  # id prefix, `object` of a response, `object` of a chunk

    def __init__(
        self,
        model: str,
        version: str,
        metadata: ModelMetadata | None = None,
        item_type: Any = None,
        clock: Callable[[], float] = float,
    ) -> None:
        self._model = model
        self._metadata = metadata
        self._clock = clock
        self._request: type[TextRequest] = (item_type and item_type.subclass(TextRequest)) or TextRequest

    @classmethod
    def request_content(cls, model: ModelMetadata) -> dict[str, Any]:
        """The parameters of the server and of a TextRequest."""
        schema, text = openai.schema_of(cls.controls), openai.schema_of(TextRequest)["properties"]
        stop = {"anyOf": [text["stop"], {"type": "string"}]}
        schema["properties"] = {**text, "stop": stop, **schema["properties"]}
        del schema["properties"]["prompt" if "prompt" not in schema["required"] else "messages"]
        return {JSON: schema}

    @classmethod
    def response_content(cls, model: ModelMetadata) -> dict[str, Any]:
        """A whole response, or the events of a stream."""
        return {JSON: openai.schema_of(cls.answer), SSE: {"type": "string"}}

    # ---- requests

    def decode(self, item: Item) -> tuple[Any, _Context]:
        """A TextRequest for a stream, otherwise `Many` of them; and the context."""
        openai.check_task(self._metadata, TASK)
        body = decode_json(item.payload)
        if not isinstance(body, dict):
            raise BadRequest(f"the body is a {type(body).__name__}, expected an object")
        given = {name: value for name, value in body.items() if value is not None}
        controls = _converted(given, self.controls)
        n, stream = controls.n or 1, bool(controls.stream)
        if controls.stream_options is not None and not stream:
            raise openai.wrong("stream_options", "needs stream = true")
        prompts = self.requests(_converted(self._parameters(given), self._request), controls)
        most = 1 if stream else openai.MAX_TEXTS
        if len(prompts) * n > most:
            raise openai.wrong("n", f"and the prompts ask for {len(prompts) * n} texts, expected at most {most}")
        requests = [_numbered(request, k) for request in prompts for k in range(n)]
        context = _Context(
            f"{self.names[0]}{uuid.uuid4().hex}",
            int(self._clock()),
            n,
            stream,
            stream and controls.stream_options is not None and bool(controls.stream_options.include_usage),
            self.echoed(requests, controls),
            TextPart(),
        )
        if stream:
            return requests[0], context
        return Many(requests if item.stop < 0 else requests[item.start : item.stop]), context

    def _parameters(self, given: dict[str, Any]) -> dict[str, Any]:
        """The fields of the model's request. Raises BadRequest for parameters that the model does not have."""
        own = {field.encode_name for field in structs.fields(self._request)}
        handled = {field.encode_name for field in structs.fields(self.controls)} | _IGNORED
        found = {}
        for name, value in given.items():
            if name in own - {"prompt", "messages"}:
                found[name] = [value] if name == "stop" and isinstance(value, str) else value
            elif name in _NEUTRAL:
                if not any(value == each and type(value) is type(each) for each in _NEUTRAL[name]):
                    raise openai.wrong(name, "is not supported by this model")
            elif name not in handled:
                raise openai.wrong(name, f"is unknown; this model takes {', '.join(sorted(own))}")
        if "max_completion_tokens" in given:
            found["max_tokens"] = given["max_completion_tokens"]
        return found

    def requests(self, base: TextRequest, controls: Any) -> list[TextRequest]:
        """One request for each prompt."""
        prompts = controls.prompt if isinstance(controls.prompt, list) else [controls.prompt]
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if len(prompts) > openai.MAX_TEXTS:
            raise openai.wrong("prompt", f"has {len(prompts)} texts, expected at most {openai.MAX_TEXTS}")
        if not prompts or not all(prompt if isinstance(prompt, str) else _is_tokens(prompt) for prompt in prompts):
            raise openai.wrong("prompt", "must be a text, tokens, or a list of those, none of them empty")
        return [structs.replace(base, prompt=prompt) for prompt in prompts]

    def echoed(self, requests: Sequence[TextRequest], controls: Any) -> list[str]:
        """The prompts, if the texts begin with them."""
        if not controls.echo:
            return []
        if any(isinstance(request.prompt, list) for request in requests):
            raise openai.wrong("echo", "needs prompts of text")
        return [str(request.prompt) for request in requests]

    # ---- responses

    def choice(self, index: int, text: str, part: TextPart) -> Any:
        """One whole text."""
        return openai.CompletionChoice(index, text, part.finish_reason or "stop")

    def chunk(self, text: str, first: bool) -> Any:
        """A part of the text of a stream."""
        return openai.CompletionChoice(0, text) if text else None

    def end(self, part: TextPart) -> Any:
        """The end of the text of a stream."""
        return openai.CompletionChoice(0, "", part.finish_reason or "stop")

    def encode(self, value: Any, item: Item, context: _Context) -> ItemResult:
        """All texts, or the events of one that a model without streams has written. Raises BadOutput."""
        if context.stream:
            part = self.encode_part(value, item, context, True)
            return ItemResult(part.body + self.encode_end(item, context).body, SSE)
        if not isinstance(value, list):
            raise BadOutput(f"the model returned a {type(value).__name__} for the texts, expected a list")
        parts = list(map(_text_of, value))
        choices = []
        for index, text in enumerate(parts, item.start):
            echo = context.echo[index] if context.echo else ""
            choices.append(self.choice(index, echo + text.text, text))
        prompts = [part.prompt_tokens for k, part in enumerate(parts, item.start) if k % context.texts_per_prompt == 0]
        usage = _usage(prompts, [part.completion_tokens for part in parts])
        answer = openai.Answer(context.id, self.names[1], context.created, self._model, choices, usage)
        return ItemResult(msgspec.json.encode(answer), JSON)

    def encode_part(self, value: Any, item: Item, context: _Context, first: bool) -> ItemResult:
        """The event of a part; nothing for a part without text. Raises BadOutput."""
        part = _text_of(value)
        _learn(context.whole, part)
        text = context.echo[0] + part.text if first and context.echo else part.text
        chunk = self.chunk(text, first)
        return ItemResult(self._event(context, [chunk]) if chunk is not None else b"", SSE)

    def encode_end(self, item: Item, context: _Context) -> ItemResult:
        """The events that end a stream."""
        events = self._event(context, [self.end(context.whole)])
        if context.usage:
            whole = context.whole
            events += self._event(context, [], _usage([whole.prompt_tokens], [whole.completion_tokens]))
        return ItemResult(events + DONE, SSE)

    def _event(self, context: _Context, choices: list[Any], usage: openai.TextUsage | None = None) -> bytes:
        answer = openai.Answer(context.id, self.names[2], context.created, self._model, choices, usage)
        return b"data: %b\n\n" % msgspec.json.encode(answer)

    def join(self, parts: list[ItemResult]) -> ItemResult:
        """The texts of all parts, and the sum of their tokens."""
        if len(parts) == 1:
            return parts[0]
        answers = [msgspec.json.decode(part.body, type=openai.AnswerPart) for part in parts]
        found = answers[0]
        found.choices = [choice for answer in answers for choice in answer.choices]
        counts = [answer.usage for answer in answers if answer.usage is not None]
        found.usage = None
        if len(counts) == len(answers):
            found.usage = _usage([c.prompt_tokens for c in counts], [c.completion_tokens for c in counts])
        return ItemResult(msgspec.json.encode(found), JSON)


class ChatCodec(CompletionsCodec):
    """Codec of `/v1/chat/completions`."""

    controls = openai.ChatControls
    answer = openai.ChatAnswer
    names = ("chatcmpl-", "chat.completion", "chat.completion.chunk")

    def requests(self, base: TextRequest, controls: Any) -> list[TextRequest]:
        """The request of the chat, with its messages and their plain rendering."""
        messages = []
        for found in controls.messages:
            content = found.content or ""
            text = content if isinstance(content, str) else "\n".join(part.text for part in content)
            messages.append(ChatMessage(found.role, text, found.name))
        return [structs.replace(base, messages=messages, prompt=plain_prompt(messages))]

    def echoed(self, requests: Sequence[TextRequest], controls: Any) -> list[str]:
        """Nothing."""
        return []

    def choice(self, index: int, text: str, part: TextPart) -> Any:
        """One whole message."""
        return openai.ChatChoice(index, openai.ChatMessageAnswer(text), part.finish_reason or "stop")

    def chunk(self, text: str, first: bool) -> Any:
        """A part of the message; the first one has the role."""
        return openai.ChatChunk(0, openai.Delta(text, "assistant" if first else None)) if text or first else None

    def end(self, part: TextPart) -> Any:
        """The end of the message."""
        return openai.ChatChunk(0, openai.Delta(), part.finish_reason or "stop")


def plain_prompt(messages: Sequence[ChatMessage]) -> str:
    """The prompt of a chat for models without a template: a lone message as it is, otherwise a line for each."""
    if len(messages) == 1:
        return messages[0].content
    return "".join(f"{message.role}: {message.content}\n" for message in messages) + "assistant:"


def _converted(fields: dict[str, Any], kind: Any) -> Any:
    if "messages" in fields and isinstance(fields["messages"], list):  # clients send responses back with their nulls
        messages = [
            {name: value for name, value in each.items() if value is not None} if isinstance(each, dict) else each
            for each in fields["messages"]
        ]
        fields = {**fields, "messages": messages}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as e:
        raise BadRequest(f"the body has the wrong form: {e}") from None


def _numbered(request: TextRequest, k: int) -> TextRequest:
    """The request for the k-th text of a prompt, which has a seed of its own."""
    return structs.replace(request, seed=None if request.seed is None else request.seed + k)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _text_of(result: Any) -> TextPart:
    """A result, or the parts of one, as one part. Raises BadOutput."""
    if isinstance(result, str):
        return TextPart(result)
    if isinstance(result, TextPart):
        return result
    if not isinstance(result, Parts):
        raise BadOutput(f"the model returned a {type(result).__name__}, expected a str or a penstock.TextPart")
    whole = TextPart()
    parts = [_text_of(each) for each in result]
    for part in parts:
        _learn(whole, part)
    whole.text = "".join([part.text for part in parts])
    return whole


def _learn(whole: TextPart, part: TextPart) -> None:
    """Takes over what a part says of the whole."""
    for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
        if (value := getattr(part, name)) is not None:
            setattr(whole, name, value)


def _usage(prompt_tokens: Sequence[int | None], completion_tokens: Sequence[int | None]) -> openai.TextUsage | None:
    """The sums; None if the model has not counted all."""
    if None in prompt_tokens or None in completion_tokens:
        return None
    prompt, completion = (sum(filter(None, tokens)) for tokens in (prompt_tokens, completion_tokens))
    return openai.TextUsage(prompt, completion, prompt + completion)


ROUTES: Final = (
    openai.inference("/v1/completions", "Complete texts, as OpenAI's API does", "openai_completions", TASK),
    openai.inference("/v1/chat/completions", "Answer a chat, as OpenAI's API does", "openai_chat", TASK),
)
