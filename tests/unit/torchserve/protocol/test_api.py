"""OpenAPI 3.0.1 documents."""

from penstock.torchserve.protocol.api import Operation, QueryParameter, operations_document

OPERATIONS = (
    Operation(
        "GET",
        "/things/{name}/{rest...}",
        "getThing",
        "Gets a thing.",
        (
            QueryParameter("many", "How many", "integer", 3),
            QueryParameter("kind", "Which", values=("a", "b"), required=True),
        ),
        responses=((200, "OK", "page"), (404, "No such thing", "error")),
    ),
    Operation("POST", "/things/{name}/{rest...}", "postThing", "Posts one.", body="bytes", deprecated=True),
)


def test_a_document_has_an_entry_for_each_operation():
    document = operations_document("Things", "1.2", OPERATIONS, "All about things.")
    assert document["openapi"] == "3.0.1"
    assert document["info"] == {"title": "Things", "description": "All about things.", "version": "1.2"}
    assert {path: sorted(methods) for path, methods in document["paths"].items()} == {
        "/things/{name}/{rest}": ["get", "post"]
    }


def test_parameters_come_from_path_and_query():
    get = operations_document("Things", "1.2", OPERATIONS)["paths"]["/things/{name}/{rest}"]["get"]
    assert [(p["in"], p["name"], p["required"]) for p in get["parameters"]] == [
        ("path", "name", True),
        ("path", "rest", True),
        ("query", "many", False),
        ("query", "kind", True),
    ]
    assert get["parameters"][2]["schema"] == {"type": "integer", "default": 3}
    assert get["parameters"][3]["schema"]["enum"] == ["a", "b"]


def test_every_operation_has_an_error_and_every_used_schema_is_defined():
    document = operations_document("Things", "1.2", OPERATIONS)
    methods = document["paths"]["/things/{name}/{rest}"]
    assert list(methods["get"]["responses"]) == ["200", "404", "500"]
    assert methods["post"]["requestBody"] == {
        "content": {"*/*": {"schema": {"type": "string", "format": "binary"}}},
        "required": True,
    }
    assert methods["post"]["deprecated"]
    assert sorted(document["components"]["schemas"]) == ["error", "page"]
    assert methods["get"]["responses"]["404"]["content"] == {
        "application/json": {"schema": {"$ref": "#/components/schemas/error"}}
    }
