"""What models of a known task receive and return: text generators and embedding models behind OpenAI-style routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

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
