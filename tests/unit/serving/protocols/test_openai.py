"""The OpenAI-style routes: bodies to requests, results to answers and events."""

from __future__ import annotations

import json
from base64 import b64decode
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.worker.item_types import ModelTypes
from penstock.errors import (
    BadOutput,
    BadRequest,
    DeadlineExceeded,
    ItemFailed,
    ModelNotFound,
    ModelNotReady,
    QueueFull,
    Unauthorized,
)
from penstock.serving.protocols.openai import error_body, name_of
from penstock.serving.protocols.openai_embeddings import EmbeddingsCodec
from penstock.serving.protocols.openai_text import ChatCodec, CompletionsCodec, plain_prompt
from penstock.types import ChatMessage, Embedding, EmbeddingRequest, Item, ModelMetadata, Parts, TextPart, TextRequest


class OwnRequest(TextRequest, kw_only=True):
    """With a parameter of its own, and one of OpenAI's that others refuse."""

    top_k: int = 0
    presence_penalty: float = 0.0


def own(items: list[OwnRequest | str]) -> list[str]: ...
def requests(items: list[EmbeddingRequest]) -> list[Embedding]: ...


WRITES, EMBEDS = ModelMetadata("m", "1", task="text-generation"), ModelMetadata("m", "1", task="embedding")
TEXT, CHAT = CompletionsCodec("m", "1", WRITES, clock=lambda: 7.9), ChatCodec("m", "1", WRITES, clock=lambda: 7.9)
OWN = CompletionsCodec("m", "1", WRITES, ModelTypes(None, own).item_type())
VECTORS = EmbeddingsCodec("m", "1", EMBEDS)
TOKENS = EmbeddingsCodec("m", "1", EMBEDS, ModelTypes(None, requests).item_type())
IMAGE = {"type": "image_url"}
HI = [{"role": "user", "content": "hi"}]


def item(*rows: int, **body: Any) -> Item:
    """A request; `rows` are the first one, and the one behind the last, of a part of it."""
    start, stop = rows or (0, -1)
    return Item(json.dumps({"model": "m", **body}).encode(), "openai", start=start, stop=stop)


def answered(codec: Any, result: Any, cuts: list[int], **body: Any) -> Any:
    """The answer to a request that is split at these rows; `result` makes the result of each unit."""
    peeked = codec.peek(item(), item(**body).payload)
    rows = peeked[0]
    bounds = sorted({0, rows, *(cut % (rows + 1) for cut in cuts)})
    parts = []
    for start, stop in pairwise(bounds):
        part = item(start, stop, **body)
        value, context = codec.decode(part)
        assert len(value) == stop - start
        parts.append(codec.encode(list(map(result, value)), part, context))
    return json.loads(codec.join(parts).body)


def events(codec: Any, parts: list[Any], **body: Any) -> list[Any]:
    """The events of a stream, without the last one, which is [DONE]."""
    _, context = codec.decode(item(stream=True, **body))
    data = b"".join(codec.encode_part(part, item(), context, k == 0).body for k, part in enumerate(parts))
    lines = (data + codec.encode_end(item(), context).body).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


# ---- text


@given(st.lists(st.text(min_size=1), min_size=1, max_size=6), st.integers(1, 4), st.booleans(), st.lists(st.integers()))
def test_every_text_has_its_place_however_the_request_is_split(
    prompts: list[str], n: int, echo: bool, cuts: list[int]
) -> None:
    def write(request: TextRequest) -> TextPart:
        return TextPart(f"{request.prompt}{request.seed}", "length", len(request.prompt), 3)

    found = answered(TEXT, write, cuts, prompt=prompts, n=n, echo=echo, seed=10)
    expected = [f"{prompt}{10 + k}" for prompt in prompts for k in range(n)]
    echoes = [prompt * echo for prompt in prompts for _ in range(n)]
    assert [each["index"] for each in found["choices"]] == list(range(len(expected)))
    assert [each["text"] for each in found["choices"]] == [e + x for e, x in zip(echoes, expected, strict=True)]
    assert {each["finish_reason"] for each in found["choices"]} == {"length"}
    prompt_tokens, completion_tokens = sum(map(len, prompts)), 3 * len(expected)
    assert found["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    assert (found["object"], found["model"], found["created"]) == ("text_completion", "m", 7)


@given(st.lists(st.text(max_size=3) | st.builds(TextPart, st.text(max_size=3))))
def test_a_stream_says_what_the_whole_answer_says(parts: list[Any]) -> None:
    parts = [*parts, TextPart("!", "length", 4, 5)]
    _, context = CHAT.decode(item(messages=HI))
    whole = json.loads(CHAT.encode([Parts(parts)], item(), context).body)
    found = events(CHAT, parts, messages=HI, stream_options={"include_usage": True})
    assert len({each["id"] for each in found}) == 1
    assert {each["object"] for each in found} == {"chat.completion.chunk"}
    deltas = [choice["delta"] for each in found for choice in each["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [each["choices"][0]["finish_reason"] for each in found[:-1]][-1] == "length"
    assert (found[-1]["choices"], found[-1]["usage"]) == ([], whole["usage"])
    text = events(TEXT, parts, prompt="p", echo=True)
    assert "".join(each["choices"][0]["text"] for each in text) == "p" + whole["choices"][0]["message"]["content"]


def test_a_model_without_streams_answers_a_stream() -> None:
    _, context = TEXT.decode(item(prompt="p", stream=True))
    found = TEXT.encode("text", item(), context)
    assert found.content_type == "text/event-stream"
    assert found.body.count(b"data: ") == 3
    assert b'"text":"text"' in found.body


def test_plain_parts_end_with_stop_and_count_nothing() -> None:
    found = answered(TEXT, lambda request: Parts(["a", "b"]), [], prompt="p")
    assert found["choices"] == [{"index": 0, "text": "ab", "finish_reason": "stop", "logprobs": None}]
    assert found["usage"] is None


def test_all_parameters_reach_the_model() -> None:
    body = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "stop": ["x", "y"], "seed": 3}
    assert TEXT.decode(item(prompt="p", user="me", **body))[0] == [TextRequest(prompt="p", **body)]
    assert TEXT.decode(item(prompt=[1, 2], stop="x"))[0] == [TextRequest(prompt=[1, 2], stop=["x"])]
    assert TEXT.decode(item(prompt=[[1], "b"]))[0] == [TextRequest(prompt=[1]), TextRequest(prompt="b")]
    neutral = {"n": 1, "best_of": 1, "logprobs": None, "logit_bias": {}, "presence_penalty": 0, "suffix": None}
    assert TEXT.decode(item(prompt="p", **neutral))[0] == [TextRequest(prompt="p")]
    found = CHAT.decode(item(messages=HI, max_completion_tokens=9))[0]
    assert found == [TextRequest(prompt="hi", messages=[ChatMessage("user", "hi")], max_tokens=9)]
    extended = OWN.decode(item(prompt="p", top_k=4, presence_penalty=0.5))[0]
    assert extended == [OwnRequest(prompt="p", top_k=4, presence_penalty=0.5)]


def test_messages_become_a_plain_prompt() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    back = {
        "role": "assistant",
        "content": "c",
        "refusal": None,
        "tool_calls": None,
    }  # as the client sends an answer back
    (found,) = CHAT.decode(item(messages=[*sent, back]))[0]
    assert [(m.role, m.content) for m in found.messages] == [("system", "s"), ("user", "a\nb"), ("assistant", "c")]
    assert found.prompt == "system: s\nuser: a\nb\nassistant: c\nassistant:"
    assert plain_prompt([ChatMessage("user", "hi")]) == "hi"


@pytest.mark.parametrize(
    ("codec", "body", "param", "message"),
    [
        (TEXT, {}, "prompt", "missing required field `prompt`"),
        (TEXT, {"prompt": 7}, "prompt", "Expected `str | array`"),
        (TEXT, {"prompt": ""}, "prompt", "none of them empty"),
        (TEXT, {"prompt": []}, "prompt", "none of them empty"),
        (TEXT, {"prompt": [[]]}, "prompt", "none of them empty"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "none of them empty"),
        (TEXT, {"prompt": ["a"] * 129}, "prompt", "has 129 texts, expected at most 128"),
        (TEXT, {"prompt": ["a"] * 65, "n": 2}, "n", "ask for 130 texts"),
        (TEXT, {"prompt": "p", "n": 0}, "n", "Expected `int` >= 1"),
        (TEXT, {"prompt": "p", "n": 2, "stream": True}, "n", "expected at most 1"),
        (TEXT, {"prompt": "p", "stream_options": {}}, "stream_options", "needs stream = true"),
        (TEXT, {"prompt": "p", "best_of": 2}, "best_of", "not supported"),
        (TEXT, {"prompt": "p", "logprobs": 0}, "logprobs", "not supported"),
        (TEXT, {"prompt": "p", "top_k": 2}, "top_k", "unknown"),
        (TEXT, {"prompt": "p", "messages": HI}, "messages", "unknown"),
        (TEXT, {"prompt": [1], "echo": True}, "echo", "prompts of text"),
        (TEXT, {"prompt": "p", "stop": [""]}, "stop[0]", "length >= 1"),
        (TEXT, {"prompt": "p", "temperature": "hot"}, "temperature", "Expected `float | null`"),
        (TEXT, {"prompt": "p", "max_tokens": 0}, "max_tokens", ">= 1"),
        (CHAT, {"messages": []}, "messages", "length >= 1"),
        (CHAT, {"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "Invalid enum value"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "enum",
        ),
        (CHAT, {"messages": HI, "tools": [{}]}, "tools", "not supported"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (CHAT, {"messages": HI, "prompt": "p"}, "prompt", "unknown"),
        (OWN, {"prompt": "p", "top_k": "2"}, "top_k", "Expected `int`"),
        (VECTORS, {}, "input", "missing required field `input`"),
        (VECTORS, {"input": []}, "input", "has 0 texts"),
        (VECTORS, {"input": ["a"] * 2049}, "input", "has 2049 texts"),
        (VECTORS, {"input": ["a", ""]}, "input", "empty"),
        (VECTORS, {"input": [1, 2]}, "input", "this model takes texts"),
        (TOKENS, {"input": [1, "a"]}, "input", "mixes"),
        (VECTORS, {"input": "a", "dimensions": 8}, "dimensions", "not supported"),
        (TOKENS, {"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        (VECTORS, {"input": "a", "encoding_format": "hex"}, "encoding_format", "Invalid enum value"),
        (VECTORS, {"input": "a", "truncate": True}, "truncate", "unknown field"),
        (EmbeddingsCodec("m", "1", WRITES), {"input": "a"}, "model", "has the task 'text-generation'"),
        (ChatCodec("m", "1", ModelMetadata("m", "1")), {"messages": HI}, "model", "declares no task"),
    ],
)
def test_a_wrong_body_is_refused_with_its_parameter(codec: Any, body: Any, param: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message.replace("|", r"\|")) as raised:
        codec.decode(item(**body))
    error = json.loads(error_body(raised.value))["error"]
    assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", None)


@pytest.mark.parametrize(
    "payload", [b"", b"[1]", b'"a"', b"{", b'{"model": 7}', b'{"prompt": "p"}', b"\xff", b"[" * 10**5]
)
def test_a_body_that_names_no_model_is_refused(payload: bytes) -> None:
    for body in (payload, memoryview(payload)):
        with pytest.raises(BadRequest):
            name_of(body)
    with pytest.raises(BadRequest):
        TEXT.decode(Item(payload, "openai"))


@pytest.mark.parametrize("value", [7, [7], [None], None, [Parts([b"x"])]])
def test_results_that_are_no_texts_are_refused(value: Any) -> None:
    for codec, body in ((TEXT, {"prompt": "p"}), (CHAT, {"messages": HI, "stream": True})):
        _, context = codec.decode(item(**body))
        with pytest.raises(BadOutput):
            codec.encode(value, item(), context)


keys = st.sampled_from(["prompt", "n", "stream", "input"])
bodies = st.dictionaries(keys, st.none() | st.integers() | st.text() | st.lists(st.text() | st.integers()))


@given(st.binary(max_size=60) | st.builds(lambda body, n: json.dumps(body).encode()[:n], bodies, st.integers(0, 60)))
def test_peek_never_raises(body: bytes) -> None:
    for codec in (TEXT, CHAT, VECTORS):
        found = codec.peek(item(), body)
        assert found is None or found[0] >= 1


# ---- embeddings


@given(st.lists(st.text(min_size=1), min_size=1, max_size=9), st.lists(st.integers()))
def test_every_vector_has_its_place_however_the_request_is_split(texts: list[str], cuts: list[int]) -> None:
    def embed(text: Any) -> Embedding:
        return Embedding(np.array([len(text), 0.5], np.float64), 2)

    for encoding in ("float", "base64"):
        found = answered(VECTORS, embed, cuts, input=texts, encoding_format=encoding)
        vectors = [each["embedding"] for each in found["data"]]
        if encoding == "base64":
            vectors = [np.frombuffer(b64decode(each), "<f4").tolist() for each in vectors]
        assert vectors == [[len(text), 0.5] for text in texts]
        assert [each["index"] for each in found["data"]] == list(range(len(texts)))
        assert found["usage"] == {"prompt_tokens": 2 * len(texts), "total_tokens": 2 * len(texts)}


def test_a_model_may_take_tokens_and_dimensions() -> None:
    assert TOKENS.decode(item(input=[1, 2], dimensions=3))[0] == [EmbeddingRequest(input=[1, 2], dimensions=3)]
    assert TOKENS.decode(item(input=[[1], "a"]))[0] == [EmbeddingRequest(input=[1]), EmbeddingRequest(input="a")]
    for body, rows in (([1, 2], 1), ([[1, 2], [3]], 2), ("a", 1), (["a", "b"], 2)):
        assert TOKENS.peek(item(), item(input=body).payload) == (rows, "")


@pytest.mark.parametrize("vector", [7, [], [[1.0]], [float("nan")], "abc", [None], object()])
def test_results_that_are_no_vectors_are_refused(vector: Any) -> None:
    with pytest.raises(BadOutput):
        VECTORS.encode([vector], item(), "float")


# ---- errors


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (BadRequest("no"), "invalid_request_error", None),
        (Unauthorized("no"), "invalid_request_error", "invalid_api_key"),
        (ModelNotFound("no"), "invalid_request_error", "model_not_found"),
        (QueueFull("no"), "rate_limit_error", "queue_full"),
        (ModelNotReady("no"), "server_error", "model_not_ready"),
        (DeadlineExceeded("no"), "server_error", "deadline_exceeded"),
        (ItemFailed("no", detail="secret"), "server_error", "item_failed"),
    ],
)
def test_errors_have_openais_form(error: Any, kind: str, code: str | None) -> None:
    assert msgspec.json.decode(error_body(error)) == {
        "error": {"message": "no", "type": kind, "param": None, "code": code}
    }
