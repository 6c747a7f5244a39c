"""Triton's generate extension on a real server, with clients of plain HTTP."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

SOURCE = """
    import time

    import numpy as np
    import penstock

    TEXT = penstock.TensorSpec("text_input", "BYTES", (-1, 1))
    COUNT = penstock.TensorSpec("count", "INT32", (-1, 1), True)
    ANSWER = [penstock.TensorSpec("text_output", "BYTES", (-1, 1))]

    class Repeats:
        "Streams; the texts of its requests say what goes wrong."
        inputs, outputs = [TEXT, COUNT], ANSWER

        def predict(self, items):
            for k in range(max(int(item["count"][0, 0]) for item in items)):
                time.sleep(0.01)
                yield [self.part(item, k) for item in items]

        def part(self, item, k):
            text = item["text_input"]
            if k >= item["count"][0, 0]:
                return None
            if text[0, 0] == b"fail%d" % k:
                return ValueError("secret")
            return {"text_output": text + b"%d" % k}

    class Doubles:
        inputs = {"x": "FP32[-1,3]"}
        outputs = {"y": "FP32[-1,3]", "rows": "INT64[-1,1]"}

        def predict(self, x):
            return {"y": x * 2, "rows": np.full((len(x), 1), len(x))}

    class Whole:
        inputs, outputs = [penstock.TensorSpec("x", "FP32", (-1,))], [penstock.TensorSpec("y", "FP32", (1,))]

        def predict(self, items):
            return [{"y": items[0]["x"].sum(keepdims=True)}]

    class Tells:
        inputs, outputs = [TEXT], ANSWER

        def predict(self, items, parameters):
            return [{"text_output": np.array([[repr(sorted(each.items()))]])} for each in parameters]

    def objects(items):
        return [{"got": item} for item in items]

    def words(items):
        for place in range(2):
            yield [item["prompt"].split()[place] for item in items]
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    names = ("Repeats", "Doubles", "Whole", "Tells", "objects", "words")
    keys = ('whole.batching.rows="none"', 'doubles.batching.policy="fixed"', "doubles.batching.max_hold_s=0.2")
    return serve_all(SOURCE, *names, *(word for key in keys for word in ("--set", f"models.{key}")))


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{server.url}/v2/models/", timeout=30) as found:
        yield found


def about(model: str, **outputs: Any) -> dict[str, Any]:
    return {"model_name": model, "model_version": "1", **outputs}


def events(response: httpx.Response) -> list[Any]:
    """The data of the events, which have nothing else."""
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("path", ["doubles", "doubles/versions/1"])
def test_a_model_answers_one_object(client, path):
    found = client.post(f"{path}/generate", content=b'{"x": [1, 2, 3], "id": "q"}')
    assert (found.status_code, found.headers["content-type"]) == (200, "application/json")
    assert found.content == b'{"id":"q","model_name":"doubles","model_version":"1","rows":1,"y":[2.0,4.0,6.0]}'
    two = client.post(f"{path}/generate", json={"x": [1, 2, 3, 4, 5, 6]})
    assert two.json() == about("doubles", rows=[2, 2], y=[2, 4, 6, 8, 10, 12])


def test_a_model_without_rows_answers(client):
    assert client.post("whole/generate", json={"x": [1, 2, 3]}).json() == about("whole", y=6)


def test_rows_share_a_batch_with_those_of_infer(client):
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}

    def ask(k: int) -> Any:
        if k % 2:
            return client.post("doubles/generate", json={"x": [1, 2, 3]}).json()["rows"]
        found = client.post("doubles/infer", json={"inputs": [tensor]}).json()["outputs"]
        return {each["name"]: each["data"] for each in found}["rows"][0]

    with ThreadPoolExecutor(8) as pool:
        assert max(pool.map(ask, range(8))) > 4


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
def test_every_response_of_a_stream_is_an_event(client, accept):
    body = {"text_input": "é", "count": 3, "id": "q"}
    found = client.post("repeats/generate_stream", json=body, headers={"accept": accept})
    assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert events(found) == [about("repeats", text_output=f"é{k}", id="q") for k in range(3)]


@pytest.mark.parametrize("accept", ["*/*", "text/event-stream"])
def test_a_model_that_does_not_stream_gives_one_event(client, accept):
    found = client.post("whole/generate_stream", json={"x": 5}, headers={"accept": accept})
    assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert events(found) == [about("whole", y=5)]
    plain = client.post("whole/generate", json={"x": 5}, headers={"accept": accept})
    assert (plain.headers["content-type"], plain.json()) == ("application/json", about("whole", y=5))


def test_an_empty_stream_has_no_event(client):
    found = client.post("repeats/generate_stream", json={"text_input": "a", "count": 0})
    assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert found.content == b""


def test_generate_takes_exactly_one_response(client):
    one = client.post("repeats/generate", json={"text_input": "a", "count": 1})
    assert (one.status_code, one.json()) == (200, about("repeats", text_output="a0"))
    for count in (0, 2):
        found = client.post("repeats/generate", json={"text_input": "a", "count": count})
        assert found.status_code == 400
        assert f"{count} responses" in found.json()["error"]


def test_an_error_before_a_stream_has_a_status_and_one_inside_is_an_event(client):
    found = client.post("repeats/generate_stream", json={"text_input": "fail0", "count": 2})
    assert found.status_code == 500
    assert "secret" not in found.json()["error"]
    found = client.post("repeats/generate_stream", json={"text_input": "fail1", "count": 3})
    assert found.status_code == 200
    first, error = events(found)
    assert first == about("repeats", text_output="fail10")
    assert error.keys() == {"error"}
    assert "secret" not in error["error"]


def test_parameters_reach_a_model_that_takes_them_and_others_ignore_them(client):
    body = {"text_input": "a", "top": 1, "parameters": {"stop": "x"}}
    expected = about("tells", text_output="[('stop', 'x'), ('top', 1)]")
    assert client.post("tells/generate", json=body).json() == expected
    assert client.post("whole/generate", json={"x": 5, "top": True}).json() == about("whole", y=5)


def test_a_model_without_inputs_receives_the_object(client):
    body = {"nested": {"list": [1, None]}, "id": "q"}
    assert client.post("objects/generate", json=body).json() == about("objects", got=body, id="q")
    found = client.post("words/generate_stream", json={"prompt": "one two"})
    assert events(found) == [about("words", text_output=word) for word in ("one", "two")]


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"x", b'{"x": NaN}', b'{"x": [[1], 2, {}]}', b'{"x": 1, "y": {"a": 1}}', b'{"y": 1}', b'{"x":"a"}'],
)
def test_a_wrong_body_is_refused(client, route, body):
    found = client.post(f"whole/{route}", content=body)
    assert (found.status_code, list(found.json())) == (400, ["error"])


def test_unknown_models_and_methods_are_refused(client):
    for path in ("none/generate", "whole/versions/7/generate_stream"):
        found = client.post(path, json={"x": 1})
        assert (found.status_code, list(found.json())) == (404, ["error"])
    assert client.get("whole/generate").status_code == 405


def test_a_large_body_is_read(client):
    found = client.post("objects/generate", json={"text": "x" * 10_000_000})
    assert found.status_code == 200
    assert len(found.json()["got"]["text"]) == 10_000_000
    numbers = client.post("whole/generate", json={"x": [1] * 300_000})
    assert numbers.json() == about("whole", y=300_000)


def test_a_client_that_leaves_ends_its_stream(client):
    with client.stream("POST", "repeats/generate_stream", json={"text_input": "a", "count": 10_000}) as response:
        assert next(response.iter_lines()).startswith("data: ")
    began = time.monotonic()
    found = client.post("repeats/generate", json={"text_input": "a", "count": 1})
    assert found.json() == about("repeats", text_output="a0")  # the only worker is free again ...
    assert time.monotonic() - began < 50  # ... before the 100 s that the stream would have taken


def test_the_document_describes_both_routes(server):
    paths = json.loads(server.get("/openapi.json")[1])["paths"]
    one = paths["/v2/models/repeats/generate"]["post"]
    schema = one["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["text_input"]
    assert schema["properties"]["count"] == {"type": ["integer", "array"]}
    answers = paths["/v2/models/repeats/generate_stream"]["post"]["responses"]["200"]["content"]
    assert list(answers) == ["text/event-stream; charset=utf-8"]
