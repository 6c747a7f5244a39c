"""The unmodified client of OpenAI's API on a real server: text, chats, streams, embeddings, models and errors."""

import asyncio
import json
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")

ROOT = Path(__file__).parents[2]
SOURCE = """
    import os
    import time

    import numpy as np
    import penstock

    class Shout:
        task = "text-generation"
        max_active = 4

        def admit(self, item: penstock.TextRequest | str):
            request = penstock.TextRequest(prompt=item) if isinstance(item, str) else item
            if request.top_p is not None:
                raise penstock.BadRequest("parameter 'top_p' is not supported")
            words = request.prompt.split() if isinstance(request.prompt, str) else list(map(str, request.prompt))
            return {"words": words, "most": request.max_tokens or len(words), "sent": 0}

        def step(self, states):
            return [self.advance(state, len(states)) for state in states]

        def advance(self, state, active):
            sent, words = state["sent"], state["words"]
            if sent == min(state["most"], len(words)):
                reason = "stop" if sent == len(words) else "length"
                return penstock.Step(penstock.TextPart("", reason, len(words), sent), done=True)
            if words[sent].startswith("/"):
                if not os.path.exists(words[sent]):
                    return penstock.Step()
            if words[sent] == "fail":
                raise RuntimeError("secret")
            state["sent"] += 1
            return penstock.Step((str(active) if words[sent] == "crowd" else words[sent].upper()) + " ")

    @penstock.model(task="text-generation")
    def batched(items):
        for place in range(2):
            yield [f"{item.prompt}{place}" for item in items]

    @penstock.model(task="text-generation")
    def whole(items):
        return [penstock.TextPart(item.prompt.upper(), "length", 1, 2) for item in items]

    class Vectors:
        def predict(self, items: list[str]):
            time.sleep(0.02)
            return [penstock.Embedding(np.array([len(item), len(items)], np.float32), 3) for item in items]

    @penstock.model(task="embedding")
    class Sized:
        def predict(self, items: list[penstock.EmbeddingRequest]):
            return [np.full(item.dimensions or 4, len(item.input)) for item in items]

    def slow(items):
        time.sleep(0.5)
        return [item.prompt for item in items]
"""
TOKEN = "a-token-of-the-test"


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(TOKEN)
    tokens.chmod(0o600)
    keys = (
        "models.vectors.task=embedding",
        "models.vectors.batching.max_batch_size=8",
        "models.slow.task=text-generation",
        "models.slow.batching.max_queue=1",
        "models.slow.batching.max_batch_size=1",
    )
    names = ("Shout", "batched", "whole", "Vectors", "Sized", "slow")
    sets = [word for key in keys for word in ("--set", key)]
    return serve_all(SOURCE, *names, *sets, "--set", f"auth.inference_token_file={tokens}")


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=TOKEN, max_retries=0) as found:
        yield found


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# ---- text


def test_texts_are_completed(client: Any) -> None:
    found = client.completions.create(model="shout", prompt="hello big world", max_tokens=2)
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == ("HELLO BIG ", "length")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (3, 2, 5)
    assert found.id.startswith("cmpl-")
    assert abs(found.created - time.time()) < 60
    found = client.completions.create(model="shout", prompt=["a b", [1, 2]], n=2)
    assert [(c.index, c.text) for c in found.choices] == [(0, "A B "), (1, "A B "), (2, "1 2 "), (3, "1 2 ")]
    assert found.usage.total_tokens == 4 + 8
    assert client.completions.create(model="shout", prompt="a b", echo=True).choices[0].text == "a bA B "


CHATS = [("shout", "HI YOU ", "stop"), ("batched", "hi you0hi you1", "stop"), ("whole", "HI YOU", "length")]


@pytest.mark.parametrize(("model", "text", "reason"), CHATS)
def test_chats_are_answered_whole_and_in_parts(client: Any, model: str, text: str, reason: str) -> None:
    found = client.chat.completions.create(model=model, messages=user("hi you"))
    (choice,) = found.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (text, "assistant", reason)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=user("hi you"), stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * (len(chunks) - 2) + [reason]
    assert chunks[-1].usage == found.usage
    if reason == "stop":  # the client's own accumulation, which raises for any other reason
        with client.chat.completions.stream(model=model, messages=user("hi you")) as stream:
            assert stream.get_final_completion().choices[0].message.content == text


def test_an_answer_can_be_sent_back_in_the_next_request(client: Any) -> None:
    first = client.chat.completions.create(model="whole", messages=user("hi"))
    turns = [*user("hi"), first.choices[0].message, *user("so")]
    found = client.chat.completions.create(model="whole", messages=turns)
    assert found.choices[0].message.content == "USER: HI\nASSISTANT: HI\nUSER: SO\nASSISTANT:"


def test_parts_arrive_while_the_text_is_written(client: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stream = client.completions.create(model="shout", prompt=f"a {gate} b", stream=True)
    parts = iter(stream)
    assert next(parts).choices[0].text == "A "
    gate.touch()
    assert "".join(part.choices[0].text for part in parts).endswith(" B ")


def test_concurrent_requests_are_written_together_and_a_client_that_leaves_frees_its_place(
    server: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    asyncio.run(write_many(server, gate, gate.touch))


async def write_many(server: Any, gate: Path, open_gate: Callable[[], None]) -> None:
    """Three texts wait for the gate, on three of four places, while others are written."""
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=TOKEN, max_retries=0) as client:

        async def crowd() -> str:
            """How many texts the step advances that writes this one."""
            return (await client.completions.create(model="shout", prompt="crowd")).choices[0].text

        streams = [await client.completions.create(model="shout", prompt=f"a {gate}", stream=True) for _ in range(3)]
        for stream in streams:
            assert (await anext(aiter(stream))).choices[0].text == "A "
        assert await crowd() == "4 "
        found = await client.completions.create(model="shout", prompt=["x y"] * 8)
        assert [choice.text for choice in found.choices] == ["X Y "] * 8
        await streams[0].close()
        texts = await asyncio.gather(*(client.completions.create(model="shout", prompt=f"w{k}") for k in range(20)))
        assert [found.choices[0].text for found in texts] == [f"W{k} " for k in range(20)]
        seen = []
        while "3 " not in seen:  # the place of the client that left is free
            assert len(seen) < 1000, seen
            seen.append(await crowd())
        open_gate()
        for stream in streams[1:]:
            assert [part.choices[0].finish_reason async for part in stream][-1] == "stop"


def test_native_and_kserve_routes_answer_plain_text(server: Any) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert server.post("/predictions/shout", b"a b", "text/plain", **headers) == (200, b"A B ")
    body = json.dumps({"prompt": "a b", "max_tokens": 1}).encode()
    assert server.post("/predictions/shout", body, **headers) == (200, b"A ")
    instances = json.dumps({"instances": ["a", {"prompt": "b c"}]}).encode()
    assert server.post("/v1/models/shout:predict", instances, **headers) == (200, b'{"predictions":["A ","B C "]}')
    assert server.post("/predictions/sized", b'{"input": "abc", "dimensions": 2}', **headers) == (200, b"[3,3]")


# ---- embeddings


def test_embeddings_of_concurrent_requests_share_batches(client: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: client.embeddings.create(model="vectors", input=["a" * k, "bb"]), range(1, 9)))
    for k, each in enumerate(found, 1):
        assert [vector.embedding[0] for vector in each.data] == [k, 2]
        assert (each.usage.prompt_tokens, each.usage.total_tokens) == (6, 6)
    assert max(vector.embedding[1] for each in found for vector in each.data) > 2
    large = client.embeddings.create(
        model="vectors", input=["x" * (k % 7 + 1) for k in range(100)], encoding_format="float"
    )
    assert [(v.index, v.embedding[0]) for v in large.data] == [(k, k % 7 + 1) for k in range(100)]
    assert max(vector.embedding[1] for vector in large.data) <= 8


def test_a_request_may_have_as_many_texts_as_the_page_says(client: Any) -> None:
    found = client.embeddings.create(model="vectors", input=["a" * (k % 7 + 1) for k in range(2048)])
    assert [v.embedding[0] for v in found.data] == [k % 7 + 1 for k in range(2048)]
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.embeddings.create(model="vectors", input=["a"] * 2049)


def test_a_model_may_take_tokens_and_dimensions(client: Any) -> None:
    found = client.embeddings.create(model="sized", input=[[1, 2, 3], [4]], dimensions=2)
    assert [vector.embedding for vector in found.data] == [[3, 3], [1, 1]]
    assert len(client.embeddings.create(model="sized", input="text").data[0].embedding) == 4


def test_a_large_body_chooses_its_model_too(client: Any) -> None:
    text = "word " * 40_000  # 200 kB: the name of the model follows it
    assert client.chat.completions.create(model="whole", messages=user(text)).choices[0].message.content == text.upper()
    with pytest.raises(openai.NotFoundError, match="model 'hole' is not found; did you mean 'whole'"):
        client.chat.completions.create(model="hole", messages=user(text))
    with pytest.raises(openai.APIStatusError) as raised:
        client.embeddings.create(model="sized", input="x" * (8 * 2**20))
    assert (raised.value.status_code, raised.value.body["code"]) == (413, "payload_too_large")


# ---- models and errors


def test_models_are_listed(client: Any) -> None:
    found = client.models.list()
    assert sorted(model.id for model in found) == ["batched", "shout", "sized", "slow", "vectors", "whole"]
    one = client.models.retrieve("shout")
    assert (one.object, one.owned_by) == ("model", "penstock")
    assert abs(one.created - time.time()) < 600
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("shot")
    assert raised.value.body["code"] == "model_not_found"


def test_errors_are_the_clients_exceptions(server: Any, client: Any) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        client.with_options(api_key="wrong").models.list()
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="shout", prompt="a", temperature=3)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as own:  # of the model itself
        client.completions.create(model="shout", prompt="a", top_p=0.5)
    assert own.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="has the task 'embedding'"):
        client.completions.create(model="vectors", prompt="a")
    with pytest.raises(openai.InternalServerError) as failed:
        client.completions.create(model="shout", prompt="a fail")
    assert (failed.value.status_code, failed.value.type) == (500, "server_error")
    assert "secret" not in str(failed.value.body)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="shout", input="a")  # no such route
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(model="slow", prompt="a", extra_headers={"x-deadline-ms": "50"})
    assert late.value.code == "deadline_exceeded"


def test_a_stream_that_fails_raises_in_the_client(client: Any) -> None:
    texts = []

    def read() -> None:
        for part in client.completions.create(model="shout", prompt="a b fail c", stream=True):
            texts.append(part.choices[0].text)

    with pytest.raises(openai.APIError, match="the model returned RuntimeError"):
        read()
    assert texts == ["A ", "B "]


def test_a_full_queue_is_a_rate_limit(client: Any) -> None:
    def ask(_: int) -> str:
        try:
            return str(client.completions.create(model="slow", prompt="a").choices[0].text)
        except openai.RateLimitError as e:
            return f"{e.code}, again in {e.response.headers['retry-after']} s"

    with ThreadPoolExecutor(6) as pool:
        found = Counter(answer.partition(",")[0] for answer in pool.map(ask, range(6)))
    assert found.keys() == {"a", "queue_full"}


def test_the_document_has_the_routes_of_the_loaded_tasks(server: Any) -> None:
    _, body = server.get("/openapi.json", authorization=f"Bearer {TOKEN}")
    paths = json.loads(body)["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/embeddings"} < paths.keys()
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) == {"model", "messages"}
    assert {"temperature", "stop", "stream", "n"} < schema["properties"].keys()


# ---- the examples


def test_the_text_generator_of_the_example_answers_chats(serve: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    server = serve(None, "examples/text_generation/text_generation.toml", cwd=ROOT)
    question = user("count from two to five:")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        check_generator(client, question)
    with urllib.request.urlopen(server.url + "/v1/models") as found:
        assert json.load(found)["models"] == ["generate", "generate_by_batch"]


def check_generator(client: Any, question: list[Any]) -> None:
    for model in ("generate", "generate_by_batch"):
        found = client.chat.completions.create(model=model, messages=question)
        assert found.choices[0].message.content == " two three four five"
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (23, 21)
        parts = client.chat.completions.create(model=model, messages=question, stream=True, stop=" fo")
        assert "".join(part.choices[0].delta.content or "" for part in parts) == " two three"
    short = client.completions.create(model="generate", prompt="count from two to five:", max_tokens=4)
    assert (short.choices[0].text, short.choices[0].finish_reason) == (" two", "length")
    odd = client.completions.create(model="generate", prompt="Count from 2 to f\u00fcnf!", max_tokens=4)
    assert odd.usage.prompt_tokens == len("Count from 2 to f\u00fcnf!")
