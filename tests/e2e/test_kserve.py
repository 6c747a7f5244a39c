"""KServe's V1 protocol on a real server."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

SOURCE = """
    import asyncio
    import time

    import numpy as np
    import penstock

    class Sums:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 2))]

        def predict(self, items):
            return [item["x"].sum(axis=1) for item in items]

        def explain(self, items):
            return [{"share": item["x"] / item["x"].sum(axis=1, keepdims=True)} for item in items]

    class Squares:
        def preprocess(self, item):
            if not isinstance(item, int):
                raise penstock.BadRequest("expected an integer")
            return item

        def predict(self, items):
            time.sleep(0.02)
            return [[item * item, len(items)] for item in items]

        def postprocess(self, result):
            return {"square": result[0], "batch": result[1]}

    class Explained(Squares):
        def predict(self, items):
            if 13 in items:
                raise ValueError("secret")
            return super().predict(items)

        def explain(self, items):
            return [f"{item} times {item}" for item in items]

    def letters(items):
        for place in range(3):
            yield [item[place] if place < len(item) else None for item in items]

    async def later(items):
        for place in range(3):
            await asyncio.sleep(0)
            yield [item[place] if place < len(item) else None for item in items]

    class Steps:
        def admit(self, item):
            return list(item)

        def step(self, states):
            return [penstock.Step(state.pop(0), not state) for state in states]

        def postprocess(self, part):
            return part.upper()

    def sequenced(items, sequences):
        return items
"""


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    names = ("Sums", "Squares", "Explained", "letters", "later", "Steps", "sequenced")
    small = (
        "squares.batching.max_batch_size=8",
        "explained.batching.max_hold_s=0.05",
        "sequenced.batching.max_sequences=4",
    )
    return serve_all(SOURCE, *names, *(word for key in small for word in ("--set", f"models.{key}")))


def ask(server: Any, path: str, **body: Any) -> tuple[int, Any]:
    status, answer = server.post(f"/v1/models/{path}", json.dumps(body).encode())
    return status, json.loads(answer)


def test_instances_of_all_requests_share_batches_and_large_requests_are_split(server: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: ask(server, "squares:predict", instances=[k, k + 1]), range(8)))
    for k, (status, answer) in enumerate(found):
        assert status == 200
        assert [each["square"] for each in answer["predictions"]] == [k * k, (k + 1) ** 2]
    assert max(each["batch"] for _, answer in found for each in answer["predictions"]) > 2
    status, answer = ask(server, "squares/versions/1:predict", instances=list(range(20)))
    assert [each["square"] for each in answer["predictions"]] == [k * k for k in range(20)]
    assert {each["batch"] for each in answer["predictions"]} <= set(range(1, 9))
    assert ask(server, "squares:predict", inputs=[3])[1]["predictions"][0]["square"] == 9


def test_a_wrong_instance_fails_its_request_alone(server: Any) -> None:
    with ThreadPoolExecutor(6) as pool:
        bad = pool.submit(ask, server, "explained:predict", instances=[1, 13])
        good = [pool.submit(ask, server, "explained:predict", instances=[k, k]) for k in range(5)]
    assert bad.result() == (500, {"error": "the model raised ValueError"})
    assert [each.result()[1]["predictions"][1]["square"] for each in good] == [0, 1, 4, 9, 16]
    assert ask(server, "explained:predict", instances=[1, "2"]) == (400, {"error": "expected an integer"})
    assert ask(server, "explained:predict", instance=[1])[0] == 400


def test_named_inputs_are_arrays(server: Any) -> None:
    rows = [{"x": [1, 2]}, {"x": [3, 5]}]
    assert ask(server, "sums:predict", instances=rows) == (200, {"predictions": [3.0, 8.0]})
    assert ask(server, "sums:predict", inputs={"x": [[1, 2]]}) == (200, {"outputs": [3.0]})
    assert ask(server, "sums:explain", instances=rows[:1])[1]["explanations"] == [pytest.approx([1 / 3, 2 / 3])]


def test_explanations_and_predictions_may_share_a_batch(server: Any) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [
            pool.submit(ask, server, f"explained:{('predict', 'explain')[k % 2]}", instances=[k]) for k in range(8)
        ]
    for k, each in enumerate(found):
        status, answer = each.result()
        assert status == 200
        assert answer.get("explanations", [k * k]) == ([f"{k} times {k}"] if k % 2 else [k * k])
        assert "predictions" not in answer or answer["predictions"][0]["square"] == k * k
    status, answer = ask(server, "squares:explain", instances=[1])
    assert (status, answer) == (501, {"error": "model 'squares' has no method explain(items)"})
    assert ask(server, "explained:explain", instances=["2"]) == (400, {"error": "expected an integer"})


@pytest.mark.parametrize("model", ["letters", "later", "steps"])
def test_streams_are_answered_as_a_whole(server: Any, model: str) -> None:
    words = ["abc", "de", "f", "ghi"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: ask(server, f"{model}:predict", instances=words[:n]), range(1, 5)))
    for n, answer in enumerate(found, 1):
        assert answer == (200, {"predictions": [word.upper() if model == "steps" else word for word in words[:n]]})


def test_a_request_of_a_sequence_has_one_instance(server: Any) -> None:
    headers = {"x-sequence-id": "s", "x-sequence-start": "true", "x-sequence-end": "true"}
    for instances, status in (([1], 200), ([1, 2], 400)):
        body = json.dumps({"instances": instances}).encode()
        assert server.post("/v1/models/sequenced:predict", body, **headers)[0] == status


def test_models_are_listed_for_both_kinds_of_clients(server: Any) -> None:
    status, body = server.get("/v1/models")
    found = json.loads(body)
    assert (status, found["object"], len(found["models"])) == (200, "list", 7)
    assert [each["id"] for each in found["data"]] == found["models"]
    one = json.loads(server.get("/v1/models/squares")[1])
    assert one in found["data"]
    assert (one["name"], one["ready"], one["object"]) == ("squares", True, "model")
    assert one["created"] > 1.7e9
    assert server.get("/v1/models/squares/versions/1")[0] == 200
    assert server.get("/v1/models/squares/versions/2")[0] == 404
    status, body = server.get("/v1/models/square")
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
    missing = {"error": "model 'square' is not found; did you mean 'squares'?"}
    assert ask(server, "square:predict", instances=[1]) == (404, missing)
    assert server.get("/v1/models/squares:predict")[0] == 405
    assert server.get("/") == (200, b'{"status":"alive"}')
    both = json.loads(server.get("/v2/models")[1])
    assert both["models"] == found["models"]
    assert {"name": "squares", "version": "1", "state": "READY", "default": True} in both["versions"]


def test_a_model_that_is_not_ready_is_503(serve: Callable[..., Any]) -> None:
    source = """
        import os

        import penstock

        @penstock.model(idempotent=False)
        class Dies:
            def load(self, device):
                if os.path.exists("loaded"):
                    raise RuntimeError("no more")
                open("loaded", "w").close()

            def predict(self, items):
                os._exit(1)
    """
    server = serve(source, "Dies")
    assert ask(server, "dies:predict", instances=[1])[0] == 503
    status, body = server.get("/v1/models/dies")
    assert (status, json.loads(body)["ready"]) == (503, False)
    assert json.loads(server.get("/v1/models")[1])["models"] == ["dies"]
    assert json.loads(server.get("/v2/models")[1])["versions"][0]["state"] == "FAILED"
