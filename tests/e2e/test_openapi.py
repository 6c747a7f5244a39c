"""The OpenAPI document of a real server: valid, and true of what the server takes and answers."""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")
validator = pytest.importorskip("openapi_spec_validator")

SOURCE = """
    import dataclasses

    import msgspec
    import numpy as np
    import penstock

    class House(msgspec.Struct):
        rooms: int
        area: float = 1.0

    @dataclasses.dataclass
    class Price:
        euros: float

    def prices(items: list[House]) -> list[Price]:
        return [Price(100.0 * item.rooms) for item in items]

    class Sums:
        inputs = [penstock.TensorSpec("x", "FP32", (-1, 2)), penstock.TensorSpec("s", "BYTES", (-1,), True)]
        outputs = [penstock.TensorSpec("sum", "FP32", (-1,)), penstock.TensorSpec("n", "INT64", (-1, 1))]

        def predict(self, items):
            return [{"sum": i["x"].sum(axis=1), "n": np.ones((len(i["x"]), 1), np.int64)} for i in items]

        def explain(self, items):
            return [{"why": np.zeros(len(i["x"]))} for i in items]

    def echo(items):
        return items
"""
TOKEN = "a-token-of-the-test"
X = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
# (path, body, whether the body fits the schema, status)
REQUESTS = (
    ("/predictions/prices", {"rooms": 2}, True, 200),
    ("/predictions/prices", {"rooms": 2, "area": "large"}, False, 400),
    ("/predictions/prices", {"area": 2}, False, 400),
    ("/predictions/prices", [1], False, 400),
    ("/predictions/echo", {"anything": [None]}, True, 200),
    ("/v1/models/prices:predict", {"instances": [{"rooms": 1}, {"rooms": 2}]}, True, 200),
    ("/v1/models/prices:predict", {"instances": [{"rooms": "many"}]}, False, 400),
    ("/v1/models/prices:explain", {"instances": [{"rooms": 1}]}, True, 501),
    ("/v1/models/sums:predict", {"instances": [{"x": [1, 2]}]}, True, 200),
    ("/v1/models/sums:predict", {"instances": [{"x": [1, 2], "s": {"b64": "/w=="}}]}, True, 200),
    ("/v1/models/sums:predict", {"inputs": {"x": [[1, 2], [3, 4]]}}, True, 200),
    ("/v1/models/sums:predict", {"instances": [{"x": [1, 2, 3]}]}, False, 400),
    ("/v1/models/sums:predict", {"instances": [{"s": "a"}]}, False, 400),
    ("/v1/models/sums:predict", {"instances": []}, False, 400),
    ("/v1/models/sums:predict", {}, False, 400),
    ("/v1/models/sums:explain", {"instances": [{"x": [1, 2]}]}, True, 200),
    ("/v2/models/sums/infer", {"id": "7", "inputs": [X], "outputs": [{"name": "n"}]}, True, 200),
    ("/v2/models/sums/infer", {"inputs": [{**X, "data": [[1, 2], [3, 4]]}]}, True, 200),
    ("/v2/models/sums/infer", {"inputs": [{**X, "datatype": "FP64"}]}, False, 400),
    ("/v2/models/sums/infer", {"inputs": [{**X, "name": "y"}]}, False, 400),
    ("/v2/models/sums/infer", {"inputs": [{**X, "shape": [1, 4]}]}, False, 400),
    ("/v2/models/sums/infer", {"inputs": [{**X, "parameters": {"mine": 1}}], "parameters": {"mine": 1}}, True, 200),
    ("/v2/models/sums/infer", {"inputs": [X], "parameters": {"timeout": -1}}, False, 400),
    ("/v2/models/sums/infer", {"inputs": []}, False, 400),
)


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(TOKEN)
    tokens.chmod(0o600)
    return serve_all(SOURCE, "prices", "Sums", "echo", "--token-file", str(tokens))


@pytest.fixture(scope="module")
def document(server: Any) -> dict[str, Any]:
    return json.loads(fetch(server, "GET", "/openapi.json")[1])  # type: ignore[no-any-return]


def fetch(server: Any, method: str, path: str, body: Any = None, token: str = TOKEN) -> tuple[int, bytes]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    status, answer = server.fetch(urllib.request.Request(server.url + path, data, headers, method=method))
    return status, answer


def fits(document: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    whole = {**schema, "components": document["components"]}
    return bool(jsonschema.Draft202012Validator(whole).is_valid(value))


def described(document: dict[str, Any], path: str, method: str, status: int, answer: bytes) -> None:
    """The document has this status of this operation, with a schema that the answer fits."""
    response = document["paths"][path][method]["responses"][str(status)]
    if "$ref" in response:
        response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
    schema = response["content"]["application/json"]["schema"]
    assert fits(document, schema, json.loads(answer)), (path, status, answer, schema)


def test_the_document_is_valid_openapi(document: dict[str, Any]) -> None:
    validator.validate(document)
    assert document["openapi"] == "3.1.0"
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert document["security"] == [{"bearer": []}]
    assert document["components"]["securitySchemes"]["bearer"] == {"type": "http", "scheme": "bearer"}
    for operation in operations:
        assert (operation.get("security") == []) == ("401" not in operation["responses"])


def test_every_answer_to_get_has_the_documented_form(server: Any, document: dict[str, Any]) -> None:
    paths = [path for path, methods in document["paths"].items() if "get" in methods]
    assert {"/", "/ping", "/v1/models", "/v1/models/echo", "/v2", "/v2/models", "/v2/models/sums", "/readyz"} < {*paths}
    for path in paths:
        status, answer = fetch(server, "GET", path)
        assert status == 200, path
        described(document, path, "get", status, answer)
        if document["paths"][path]["get"].get("security") != []:
            status, answer = fetch(server, "GET", path, token="wrong")
            assert status == 401
            described(document, path, "get", status, answer)


@pytest.mark.parametrize(("path", "body", "valid", "status"), REQUESTS)
def test_the_server_takes_what_the_schema_allows(
    server: Any, document: dict[str, Any], path: str, body: Any, valid: bool, status: int
) -> None:
    operation = document["paths"][path]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert fits(document, schema, body) is valid
    found, answer = fetch(server, "POST", path, body)
    assert found == status, answer
    described(document, path, "post", found, answer)


def test_a_server_without_tokens_documents_none(serve: Callable[..., Any]) -> None:
    server = serve(SOURCE, "echo")
    found = json.loads(server.get("/openapi.json")[1])
    validator.validate(found)
    assert "security" not in found
    assert "401" not in found["paths"]["/predictions/echo"]["post"]["responses"]
