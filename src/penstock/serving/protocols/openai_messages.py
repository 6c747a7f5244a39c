"""Bodies of requests and responses of the OpenAI-style text routes."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Raw, Struct

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
    """Those of /v1/completions; `echo` begins the text with the prompt."""

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
    """Those of /v1/chat/completions."""

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
    """One answer of a chat."""

    index: int
    message: ChatMessageAnswer
    finish_reason: FinishReason
    logprobs: None = None


class Delta(Struct, omit_defaults=True):
    """The next part of a message; the first one has the role."""

    content: str | None = None
    role: str | None = None


class ChatChunk(Struct):
    """A part of an answer of a chat."""

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
    """The body of the answer of a chat."""

    choices: list[ChatChoice]


class AnswerPart(Answer):
    """A part of an answer that is joined."""

    choices: list[Raw]
