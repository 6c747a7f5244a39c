"""Requests for Triton's extensions over HTTP, and all requests in their order, because some change the server."""

import json
from collections.abc import Iterator
from typing import Any

from support.triton_answers import Http
from support.triton_requests import X, counted, datatypes, infer, raw, refusals, shapes, tensor, x


def outputs() -> Iterator[Http]:
    """Wanted outputs, their forms and classes; ids; parameters of requests, inputs and outputs."""
    a = [tensor("a", "INT32", [1, 2], [1, 2])]

    def wanted(name: str, *found: Any, **head: Any) -> Http:
        return infer(f"outputs: {name}", "added", inputs=a, head={"outputs": list(found), **head})

    yield wanted("one", {"name": "sum"})
    yield wanted("both", {"name": "sum"}, {"name": "difference"})
    yield wanted("the other order", {"name": "difference"}, {"name": "sum"})
    yield wanted("none")
    yield wanted("unknown", {"name": "z"})
    yield wanted("one twice", {"name": "sum"}, {"name": "sum"})
    yield wanted("no name", {})
    yield wanted("a text", "sum")
    yield wanted("unknown keys", {"name": "sum", "later": 1})
    yield wanted("unknown parameter", {"name": "sum", "parameters": {"later": 1}})
    for value in (True, False, 1, "true", None):
        yield wanted(f"binary_data {value!r}", {"name": "sum", "parameters": {"binary_data": value}})
        yield wanted(f"binary_data_output {value!r}", parameters={"binary_data_output": value})
    binary = {"binary_data_output": True}
    yield wanted("one binary, one not", {"name": "sum", "parameters": {"binary_data": True}}, {"name": "difference"})
    yield wanted(
        "all binary but one",
        {"name": "sum", "parameters": {"binary_data": False}},
        {"name": "difference"},
        parameters=binary,
    )
    yield infer("outputs is an object", "added", inputs=a, head={"outputs": {}})
    yield infer("outputs is null", "added", inputs=a, head={"outputs": None})
    scores = [tensor("x", "FP32", [1, 3], [0.5, 0.25, 2.0])]
    two = [tensor("x", "FP32", [2, 3], [0.5, 0.25, 2.0, 3.0, 1.0, 1.0])]
    for output in ("scores", "plain"):
        for count in (1, 2, 3, 4, 0, -1, "1", 1.0, True, None):
            chosen = [{"name": output, "parameters": {"classification": count}}]
            yield infer(f"classification of {output}: {count!r}", "classes", inputs=scores, head={"outputs": chosen})
        chosen = [{"name": output, "parameters": {"classification": 2}}]
        yield infer(f"classification of {output}, two rows", "classes", inputs=two, head={"outputs": chosen})
        chosen = [{"name": output, "parameters": {"classification": 2, "binary_data": True}}]
        yield infer(f"classification of {output}, binary", "classes", inputs=two, head={"outputs": chosen})
    odd = [tensor("x", "FP32", [1, 3], binary_data_size=12)]
    chosen = [{"name": "plain", "parameters": {"classification": 3}}]
    yield infer(
        "classification with infinity",
        "classes",
        inputs=odd,
        binary=raw("FP32", [1, float("inf"), 2]),
        head={"outputs": chosen},
    )
    chosen = [{"name": "sum", "parameters": {"classification": 1}}]
    yield infer("classification of integers", "added", inputs=a, head={"outputs": chosen})
    for value in ("7", "ü", "", 7, None, "x" * 2000, "a\nb"):
        yield infer(f"id {value!r:.12}", head={"id": value})
    one = [tensor("x", "FP32", [1, 1], [1.0])]
    for name, parameters in {
        "none": {},
        "unknown": {"later": 1},
        "of each kind": {"a": 1, "b": "t", "c": True, "d": 1.5},
        "nested": {"a": {"b": 1}},
        "a list": {"a": [1]},
        "null": {"a": None},
        "large": {"a": 2**62},
        "triton_": {"triton_a": 1},
        "priority 1": {"priority": 1},
        "priority 0": {"priority": 0},
        "priority text": {"priority": "1"},
        "priority -1": {"priority": -1},
        "timeout": {"timeout": 10_000_000},
        "timeout 0": {"timeout": 0},
        "timeout text": {"timeout": "1"},
        "timeout -1": {"timeout": -1},
        "sequence_id": {"sequence_id": 5},
        "sequence_id and start": {"sequence_id": 5, "sequence_start": True},
        "sequence_id text": {"sequence_id": "five"},
        "sequence_start number": {"sequence_start": 1},
    }.items():
        yield infer(f"parameters: {name}", head={"parameters": parameters})
        yield infer(
            f"parameters of a model that takes them: {name}", "told", inputs=one, head={"parameters": parameters}
        )
    for value in ([], "a", 1, None):
        yield infer(f"parameters is {value!r}", head={"parameters": value})
    yield infer("parameters of an input", inputs=[x(later=1)])
    yield infer("a header for parameters", headers={"triton_grpc_compression": "1"})


def management() -> Iterator[Http]:
    """Health, metadata, configuration, repository, settings and statistics."""

    def get(path: str, when: str = "") -> Http:
        return Http(f"GET {path}{when}", path, method="GET")

    for path in ("/v2", "/v2/health/live", "/v2/health/ready"):
        yield get(path)
    for model in (
        "mlp",
        "same",
        "sums",
        "count",
        "text",
        "totals",
        "classes",
        "told",
        "added",
        "versions",
        "chain",
        "nothing",
    ):
        for end in ("", "/ready", "/config"):
            yield get(f"/v2/models/{model}{end}")
    for version in ("1", "2", "3", "x"):
        for end in ("", "/ready", "/config", "/stats"):
            yield get(f"/v2/models/versions/versions/{version}{end}")
        yield infer(f"of two versions, {version}", "versions", version, inputs=[tensor("x", "INT32", [1, 1], [10])])
    yield infer("of two versions, none named", "versions", inputs=[tensor("x", "INT32", [1, 1], [10])])
    yield get("/v2/models/nothing/stats")
    yield get("/v2/models/nothing/versions/1/stats")
    for body in (None, b"", b"{}", b'{"ready": true}', b'{"ready": 1}', b"[]", b'{"later": 1}'):
        yield Http(f"index {body!r}", "/v2/repository/index", body=body)
    yield Http("index of a repository", "/v2/repository/none/index", body=b"{}")
    yield Http("load again", "/v2/repository/models/mlp/load", body=b"")
    yield infer("after a load")
    yield Http("load unknown", "/v2/repository/models/nothing/load", body=b"")
    yield Http("load with broken JSON", "/v2/repository/models/mlp/load", body=b"{")
    yield Http("load with an unknown parameter", "/v2/repository/models/mlp/load", {"parameters": {"later": "1"}})
    yield Http(
        "load with a configuration that is no JSON", "/v2/repository/models/sums/load", {"parameters": {"config": "{"}}
    )
    yield Http("unload", "/v2/repository/models/bf16/unload", body=b"")
    yield get("/v2/models/bf16/ready", " after an unload")
    yield get("/v2/models/bf16", " after an unload")
    yield infer(
        "of an unloaded model", "bf16", inputs=[tensor("x", "BF16", [1, 1], binary_data_size=2)], binary=b"\0\0"
    )
    yield Http("unload again", "/v2/repository/models/bf16/unload", body=b"")
    yield Http("unload unknown", "/v2/repository/models/nothing/unload", body=b"")
    yield Http(
        "unload with dependents", "/v2/repository/models/bf16/unload", {"parameters": {"unload_dependents": True}}
    )
    yield Http("index after an unload", "/v2/repository/index", body=b'{"ready": true}')
    yield get("/v2/health/ready", " after an unload")
    yield Http("load after an unload", "/v2/repository/models/bf16/load", body=b"")
    yield get("/v2/models/bf16/ready", " after a load")
    inputs = {"name": "x", "data_type": "TYPE_BF16", "dims": [-1]}
    output = {"name": "y", "data_type": "TYPE_BF16", "dims": [-1]}
    config = json.dumps({"backend": "python", "max_batch_size": 4, "input": [inputs], "output": [output]})
    yield Http("load with a configuration", "/v2/repository/models/bf16/load", {"parameters": {"config": config}})
    yield get("/v2/models/bf16/config", " after a load with a configuration")
    yield Http("load as it was", "/v2/repository/models/bf16/load", body=b"")
    yield get("/v2/models/bf16/config", " as it was")
    yield get("/v2/logging")
    yield Http("logging: verbose", "/v2/logging", {"log_verbose_level": 1})
    yield Http("logging: back", "/v2/logging", {"log_verbose_level": 0})
    yield Http("logging: unknown", "/v2/logging", {"later": 1})
    yield Http("logging: wrong kind", "/v2/logging", {"log_info": 1})
    yield Http("logging: wrong kind of a level", "/v2/logging", {"log_verbose_level": "1"})
    yield get("/v2/trace/setting")
    yield get("/v2/models/mlp/trace/setting")
    yield get("/v2/models/nothing/trace/setting")
    yield Http("trace: off", "/v2/trace/setting", {"trace_level": ["OFF"]})
    yield Http("trace: timestamps", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})
    yield Http("trace: unknown", "/v2/trace/setting", {"later": "1"})


def shared_memory(key: str, other: str) -> Iterator[Http]:
    """Regions of the objects `key` and `other`, which have 64 bytes; the first begins with the input of `mlp`."""
    base = "/v2/systemsharedmemory"

    def register(name: str, region: str, **place: Any) -> Http:
        return Http(
            f"register: {name}", f"{base}/region/{region}/register", {"key": key, "offset": 0, "byte_size": 64, **place}
        )

    def shared(name: str, given: Any = None, wanted: Any = None, data: Any = None) -> Http:
        inputs = [x(data, **given) if given else x()]
        outputs = {"outputs": [{"name": "y", "parameters": wanted}]} if wanted else {}
        return infer(f"shared memory: {name}", inputs=inputs, head=outputs)

    def place(region: str, size: int, offset: int | None = None) -> dict[str, Any]:
        found = {"shared_memory_region": region, "shared_memory_byte_size": size}
        return found | ({} if offset is None else {"shared_memory_offset": offset})

    yield Http("regions: none", f"{base}/status", method="GET")
    yield Http("regions: unknown", f"{base}/region/r/status", method="GET")
    yield register("a region", "r")
    yield register("a name twice", "r")
    yield register("another region", "s", key=other)
    yield register("an object twice", "t")
    yield register("an object that does not exist", "u", key="/nothing-here")
    yield register("past the end", "u", byte_size=10_000_000)
    yield register("a negative size", "w", byte_size=-1)
    yield register("a negative offset", "a", offset=-1)
    yield Http("register: no key", f"{base}/region/b/register", {"offset": 0, "byte_size": 64})
    yield Http("register: no byte_size", f"{base}/region/b/register", {"key": key, "offset": 0})
    yield Http("register: no offset", f"{base}/region/b/register", {"key": key, "byte_size": 64})
    yield Http("register: no body", f"{base}/region/b/register", body=b"")
    yield Http("regions: one", f"{base}/region/r/status", method="GET")
    yield shared("an input", place("r", 16))
    yield shared("an input with an offset", place("r", 16, 0))
    yield shared("an output", None, place("s", 8))
    yield shared("both", place("r", 16), place("s", 8))
    yield shared("both, of one region", place("r", 16), place("r", 8, 32))
    yield shared("an input past the end", place("r", 16, 56))
    yield shared("an input of a wrong size", place("r", 12))
    yield shared("an input with a negative offset", place("r", 16, -8))
    yield shared("an output too small", None, place("s", 4))
    yield shared("an output past the end", None, place("s", 8, 60))
    yield shared("an unknown region", place("nothing", 16))
    yield shared("an unknown region of an output", None, place("nothing", 8))
    yield shared("a region without a size", {"shared_memory_region": "r"})
    yield shared("an input with data", place("r", 16), None, X)
    yield Http("unregister: one", f"{base}/region/s/unregister", body=b"")
    yield Http("unregister: again", f"{base}/region/s/unregister", body=b"")
    yield Http("unregister: all", f"{base}/unregister", body=b"")
    yield Http("regions: none again", f"{base}/status", method="GET")
    yield Http("CUDA regions", "/v2/cudasharedmemory/status", method="GET")
    yield Http("CUDA: unregister all", "/v2/cudasharedmemory/unregister", body=b"")
    yield Http(
        "CUDA: register",
        "/v2/cudasharedmemory/region/r/register",
        {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 16},
    )


def generate() -> Iterator[Http]:
    """`generate` and `generate_stream`, of a model that streams and of ones that do not."""
    for end in ("generate", "generate_stream"):
        for name, model, body in (
            ("a text", "text", {"text_input": "hi"}),
            ("a list of one", "text", {"text_input": ["hi"]}),
            ("one response", "text", {"text_input": "hi", "repeat": 1}),
            ("no response", "text", {"text_input": "hi", "repeat": 0}),
            ("three responses", "text", {"text_input": "hi", "repeat": 3}),
            ("an error", "text", {"text_input": "hi", "repeat": -1}),
            ("an unknown name", "text", {"text_input": "hi", "temperature": 0.5}),
            ("unknown names of each kind", "text", {"text_input": "hi", "a": 1, "b": True, "c": "t"}),
            ("an unknown object", "text", {"text_input": "hi", "parameters": {"a": 1}}),
            ("an unknown list", "text", {"text_input": "hi", "stop": ["a", "b"]}),
            ("an id", "text", {"id": "7", "text_input": "hi"}),
            ("a missing input", "text", {}),
            ("a wrong kind", "text", {"text_input": 7}),
            ("a wrong kind of a number", "text", {"text_input": "hi", "repeat": "x"}),
            ("null", "text", {"text_input": None}),
            ("a nested list", "text", {"text_input": [["hi"]]}),
            ("mixed types", "text", {"text_input": ["hi", 1]}),
            ("too many elements", "text", {"text_input": ["a", "b"]}),
            ("a float for an integer", "text", {"text_input": "hi", "repeat": 1.5}),
            ("a model that does not stream", "mlp", {"x": X}),
            ("a model that does not stream, short", "mlp", {"x": X[:3]}),
            ("integers for floats", "mlp", {"x": [1, 2, 3, 4]}),
            ("no batch axis", "sums", {"x": 5}),
            ("no batch axis, a list", "sums", {"x": [5, 6]}),
            ("a model that fails", "sums", {"x": -1}),
            ("two outputs", "added", {"a": [1, 2]}),
            ("a model with parameters", "told", {"x": 1.0, "later": 1}),
            ("an unknown model", "nothing", {"x": 1}),
            ("a request's parameters", "told", {"x": 1.0, "parameters": {"later": 1}}),
            ("a boolean", "same", {"BOOL": True}),
            ("a large integer", "same", {"INT64": 2**62}),
            ("a double", "same", {"FP64": 0.1}),
        ):
            yield Http(f"{end}: {name}", f"/v2/models/{model}/{end}", body)
        for name, raw_body in {
            "an empty body": b"",
            "a JSON list": b"[]",
            "broken JSON": b"{",
            "a JSON text": b'"a"',
        }.items():
            yield Http(f"{end}: {name}", f"/v2/models/text/{end}", body=raw_body)
        yield Http(f"{end}: of a version", f"/v2/models/text/versions/1/{end}", {"text_input": "hi"})
        yield Http(f"{end}: of an unknown version", f"/v2/models/text/versions/9/{end}", {"text_input": "hi"})
        yield Http(f"{end}: GET", f"/v2/models/text/{end}", method="GET")
    yield infer("of a model that streams", "count", inputs=[tensor("n", "INT32", [1, 1], [2])])


def sequences() -> Iterator[Http]:
    """Sequences in their usual and unusual orders."""

    def step(name: str, model: str = "totals", value: int = 1, rows: int = 1, **parameters: Any) -> Http:
        asked = {f"sequence_{key}": each for key, each in parameters.items()}
        given = [tensor("x", "INT32", [rows, 1], [value] * rows)]
        return infer(f"sequence: {name}", model, inputs=given, head={"parameters": asked} if asked else {})

    yield step("start", id=1, start=True)
    yield step("middle", id=1, value=2)
    yield step("another begins", id=2, start=True, value=10)
    yield step("the first goes on", id=1, value=3)
    yield step("end", id=1, value=4, end=True)
    yield step("after its end", id=1)
    yield step("end of the other", id=2, end=True)
    yield step("never begun", id=99)
    yield step("no id")
    yield step("id 0", id=0, start=True)
    yield step("start and end", id=3, start=True, end=True)
    yield step("a running one begins anew", id=4, start=True, value=5)
    yield step("anew", id=4, start=True, value=7)
    yield step("after it began anew", id=4, value=1)
    yield step("end of it", id=4, end=True)
    yield step("two rows", id=6, start=True, rows=2)
    yield step("start is a number", id=7, start=1)
    yield step("id is negative", id=-1, start=True)
    yield step("id of 64 bits", id=2**63, start=True, end=True)
    yield step("id is a list", id=[1], start=True)
    yield step("a model without sequences", "versions", id=8, start=True, end=True)


def http_requests(key: str, other: str) -> Iterator[Http]:
    """All requests over HTTP. `key` and `other`: objects in shared memory, as in `shared_memory`."""
    for part in (counted, datatypes, shapes, refusals, outputs, generate, sequences, management):
        yield from part()
    yield from shared_memory(key, other)
