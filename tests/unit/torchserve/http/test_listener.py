"""The OpenAPI documents describe exactly the routes of their listener."""

import itertools
import json
import re

import pytest

from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.http.listener import listener_templates
from penstock.torchserve.protocol.api import ApiError, ChangeResult, RegisterRequest
from support.torchserve import REFUSED, FakeAdministration

ALL = ("inference", "management", "metrics")
GROUPS = [frozenset(some) for n in (1, 2, 3) for some in itertools.combinations(ALL, n)]


async def no_metrics(names: list[str]) -> bytes:
    return b""


def plain(path: str) -> str:
    """The path without the names of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path)


@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(sorted(groups)))
async def test_a_document_has_exactly_the_routes_of_its_listener(site, groups):
    administration = FakeAdministration()
    config = ListenerConfig(groups, Properties(ts_open_inference_protocol=True))
    templates = listener_templates(administration, config, no_metrics)
    async with site(groups) as ask:
        document = (await ask("OPTIONS", "/")).json()
        assert (await ask("GET", "/api-description")).json() == document
    assert document["openapi"] == "3.0.1"
    assert {plain(path) for path in document["paths"]} == {plain(template.path) for template in templates}
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            named = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"]
            assert named == re.findall(r"\{(\w+)\}", path)
            assert operation["responses"]


async def test_every_described_method_is_accepted(site):
    async with site() as ask:
        document = (await ask("OPTIONS", "/")).json()
        for path, operations in document["paths"].items():
            for method in operations:
                target = path.replace("{model_name}", "m").replace("{model_version}", "1.0").replace("{url_path}", "x")
                reply = await ask(method.upper(), target, body=b'{"1.0": 1}')
                assert reply.status != 405, (method, path)


async def test_operations_have_torchserves_names(site):
    known = {
        "/": {"options": "apiDescription"},
        "/api-description": {"get": "api-description"},
        "/ping": {"get": "ping"},
        "/predictions/{model_name}": {"post": "predictions"},
        "/predictions/{model_name}/{model_version}": {"post": "version_predictions"},
        "/models": {"get": "listModels", "post": "registerModel"},
        "/models/{model_name}": {"get": "describeModel", "put": "setAutoScale", "delete": "unregisterModel"},
        "/models/{model_name}/{model_version}": {
            "get": "version_describeModel",
            "put": "version_setAutoScale",
            "delete": "version_unregisterModel",
        },
        "/models/{model_name}/{model_version}/set-default": {"put": "setDefault"},
        "/metrics": {"get": "metrics"},
    }
    async with site() as ask:
        paths = (await ask("OPTIONS", "/")).json()["paths"]
    for path, operations in known.items():
        assert {method: paths[path][method]["operationId"] for method in operations} == operations


async def test_the_routes_of_one_model_are_described(site, administration):
    async with site() as ask:
        for target in ("/predictions/m", "/predictions/m/2.0"):
            document = (await ask("OPTIONS", target)).json()
            assert document["info"]["title"] == "RESTful API for: m"
            assert "/predictions/m" in document["paths"]
            assert "/v1/models/m:predict" in document["paths"]
            assert not [path for path in document["paths"] if "model_name" in path]
        document = (await ask("OPTIONS", "/models/m/2.0")).json()
        assert document["info"]["title"] == "RESTful Management API for: m"
        assert "/models/{model_name}" in document["paths"]
        for target in ("/predictions/x", "/predictions/m/9", "/models/x", "/models/m/9"):
            assert (await ask("OPTIONS", target)).status == 404
    assert administration.asked[0] == ("describe", "m", None, False)


async def test_a_special_model_name_is_quoted_in_its_description(site, administration):
    async def describe(model: str, version: str | None, *, customized: bool = False) -> list[dict[str, object]]:
        return [{}]

    administration.describe = describe
    async with site() as ask:
        document = (await ask("OPTIONS", "/predictions/%7Ba%20b%7D")).json()
    assert document["info"]["title"] == "RESTful API for: {a b}"
    assert "/predictions/%7Ba%20b%7D" in document["paths"]


MANAGEMENT = frozenset({"management"})
JSON = "Content-Type: application/json"
WRONG_METHOD = "Requested method is not allowed, please refer to API document."
UNKNOWN = "Requested resource is not found, please refer to API document."

PATHS = (
    "/models",
    "/models/m",
    "/models/m/1.0",
    "/models/m/all",
    "/models/m/traffic",
    "/models/m/1.0/set-default",
    "/v1/models/m",
    "/nowhere",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD")


def aliases(path: str) -> list[str]:
    """Equivalent spellings of the path."""
    return [path, path + "/", path + "?limit=1&url=a.mar", path.replace("m", "%6d"), "http://t" + path]


# ---- registration


@pytest.mark.parametrize(
    ("target", "lines", "body"),
    [
        ("/models?url=a.mar&batch_size=4&initial_workers=1", (), b""),
        ("/models", (JSON,), json.dumps({"url": "a.mar", "batch_size": 4, "initial_workers": "1"}).encode()),
    ],
)
async def test_a_model_is_registered_by_query_or_body_synchronously(site, administration, target, lines, body):
    administration.done = ChangeResult('Model "m" Version: 1.0 registered with 1 initial workers')
    async with site(MANAGEMENT) as ask:
        reply = await ask("POST", target, *lines, body=body)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == b'{\n  "status": "Model \\"m\\" Version: 1.0 registered with 1 initial workers"\n}\n'
    expected = RegisterRequest(url="a.mar", batch_size=4, initial_workers=1, synchronous=True)
    assert administration.asked == [("register", expected)]


async def test_a_registration_can_be_in_progress_or_partial(site, administration):
    async with site(MANAGEMENT) as ask:
        for done in (
            ChangeResult("Processing worker updates...", 202),
            ChangeResult("Workers scaling in progress...", 206),
        ):
            administration.done = done
            reply = await ask("POST", "/models?url=a.mar&synchronous=false")
            assert (reply.status, reply.json()) == (done.status, {"status": done.message})
    assert [registration.synchronous for _, registration in administration.asked] == [False, False]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/models", "Parameter url is required."),
        ("/models?url=a&runtime=perl", "Invalid RuntimeType value: perl"),
    ],
)
async def test_an_invalid_registration_is_refused(site, administration, target, message):
    async with site(MANAGEMENT) as ask:
        reply = await ask("POST", target)
    assert (reply.status, reply.json()) == (400, {"code": 400, "type": "BadRequestException", "message": message})
    assert administration.asked == []


async def test_an_error_of_the_administration_is_returned(site, administration):
    administration.error = ApiError("ConflictStatusException", "Model version 1.0 is already registered for model m")
    async with site(MANAGEMENT) as ask:
        reply = await ask("POST", "/models?url=a.mar")
    assert reply.json() == {
        "code": 409,
        "type": "ConflictStatusException",
        "message": "Model version 1.0 is already registered for model m",
    }
    assert (reply.status, reply.headers["connection"]) == (409, "close")


async def test_register_and_unregister_need_the_model_api(site, administration):
    async with site(MANAGEMENT, enable_model_api=False) as ask:
        for method, target in (("POST", "/models?url=a.mar"), ("DELETE", "/models/m"), ("DELETE", "/models/m/1.0")):
            reply = await ask(method, target)
            assert (reply.status, reply.json()["message"]) == (405, WRONG_METHOD)
        assert administration.asked == []
        for target in ("/models/m?min_worker=2", "/models/m/1.0/set-default", "/models/m/traffic"):
            assert (await ask("PUT", target, body=b'{"1.0": 1}')).status == 200
    assert [asked[0] for asked in administration.asked] == ["scale", "set_default", "set_traffic"]


async def test_a_number_that_cannot_be_used_is_logged(site, caplog):
    async with site(MANAGEMENT) as ask:
        for method, target in (
            ("GET", "/models?limit="),
            ("POST", "/models?url=a&batch_size=x"),
            ("PUT", "/models/m?min_worker="),
        ):
            assert (await ask(method, target)).status == 200
    names = [record.getMessage().split()[1] for record in caplog.records]
    assert names == ["parameter=limit", "parameter=batch_size", "parameter=min_worker"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


async def test_an_unknown_parameter_of_a_change_is_logged(site, caplog):
    async with site(MANAGEMENT) as ask:
        assert (await ask("GET", "/models?url=a.mar&batch_delay=5")).status == 200
        assert (await ask("PUT", "/models/m?min_worker=1&timeout=5")).status == 200
        assert caplog.text == ""
        assert (await ask("POST", "/models?url=a.mar&batch_delay=5")).status == 200
    assert "event=unknown_parameters route=registerModel names=['batch_delay']" in caplog.text


# ---- scaling, defaults, traffic, unregistration


async def test_scaling_passes_the_parameters_on(site, administration):
    async with site(MANAGEMENT) as ask:
        assert (await ask("PUT", "/models/m")).json() == {"status": "done"}
        await ask("PUT", "/models/m/2.0?min_worker=0&max_worker=3&synchronous=true&timeout=1&number_gpu=1")
        await ask("PUT", "/models/m?model_version=2.0&min_worker=1")
    assert administration.asked == [
        ("scale", "m", None, None, None, False),
        ("scale", "m", "2.0", 0, 3, True),
        ("scale", "m", "2.0", 1, None, False),
    ]


async def test_an_invalid_scale_changes_nothing(site, administration):
    async with site(MANAGEMENT) as ask:
        reply = await ask("PUT", "/models/m?min_worker=-1")
    assert (reply.status, reply.json()["type"]) == (400, "BadRequestException")
    assert administration.asked == []


async def test_default_version_traffic_and_unregistration(site, administration):
    async with site(MANAGEMENT) as ask:
        await ask("PUT", "/models/m/2.0/set-default")
        await ask("PUT", "/models/m/traffic", JSON, body=b'{"1.0": 9, "2.0": 1}')
        await ask("DELETE", "/models/m/2.0")
        await ask("DELETE", "/models/m")
        assert (await ask("PUT", "/models/m/traffic", body=b'{"1.0": 0}')).status == 400
    assert administration.asked == [
        ("set_default", "m", "2.0"),
        ("set_traffic", "m", {"1.0": 9.0, "2.0": 1.0}),
        ("unregister", "m", "2.0"),
        ("unregister", "m", None),
    ]


# ---- descriptions


async def test_the_list_has_pages(site, administration):
    administration.names = ["c", "a", "b"]
    async with site(MANAGEMENT) as ask:
        first = (await ask("GET", "/models?limit=2")).body
        last = (await ask("GET", "/models?limit=2&next_page_token=2")).json()
        full = (await ask("GET", "/models?limit=3")).json()
        beyond = (await ask("GET", "/models?next_page_token=9")).json()
    models = [{"modelName": name, "modelUrl": f"{name}.mar"} for name in "ab"]
    assert first == json.dumps({"nextPageToken": "2", "models": models}, indent=2).encode() + b"\n"
    assert last == {"models": [{"modelName": "c", "modelUrl": "c.mar"}]}
    assert (full["nextPageToken"], beyond) == ("3", {"models": []})  # as in TorchServe: the next page is empty


async def test_a_description_is_a_list_without_nulls(site, administration):
    async with site(MANAGEMENT) as ask:
        one = (await ask("GET", "/models/m")).json()
        both = (await ask("GET", "/models/m/all?customized=true")).json()
        await ask("GET", "/models/m/2.0?customized=True")
    workers = [{"id": "9000", "status": "READY"}]
    assert one == [{"modelName": "m", "modelVersion": "1.0", "workers": workers}]
    assert [described["modelVersion"] for described in both] == ["1.0", "2.0"]
    assert administration.asked == [
        ("describe", "m", None, False),
        ("describe", "m", "all", False),
        ("describe", "m", "2.0", True),
    ]


async def test_kserve_readiness_reports_a_ready_worker(site):
    async with site(MANAGEMENT) as ask:
        assert (await ask("GET", "/v1/models/m")).json() == {"name": "m", "ready": True}
        assert (await ask("GET", "/v1/models/m:predict")).json() == {"name": "m", "ready": True}
        assert (await ask("GET", "/v1/models/x")).json()["message"] == "Model not found: x"


@pytest.mark.parametrize(
    ("method", "target"),
    [(m, t) for m, t in itertools.product(("GET", "PUT", "DELETE", "OPTIONS"), ("/models/x", "/models/m/9"))],
)
async def test_an_unknown_model_is_not_found(site, method, target):
    async with site(MANAGEMENT) as ask:
        reply = await ask(method, target)
    kind = "ModelNotFoundException" if target == "/models/x" else "ModelVersionNotFoundException"
    assert (reply.status, reply.json()["type"]) == (404, kind)


@pytest.mark.parametrize("target", ["/nowhere", "/models/m/1.0/x", "/models/m/1.0/set-default/x", "/v1/models"])
async def test_an_unknown_path_is_not_found(site, target):
    async with site(MANAGEMENT) as ask:
        reply = await ask("GET", target)
    assert reply.json() == {"code": 404, "type": "ResourceNotFoundException", "message": UNKNOWN}


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/models"),
        ("HEAD", "/models"),
        ("PATCH", "/models/m"),
        ("POST", "/models/m"),
        ("GET", "/models/m/1.0/set-default"),
        ("POST", "/v1/models/m"),
        ("POST", "/token"),
        ("GET", "/"),
        ("POST", "/"),
    ],
)
async def test_a_wrong_method_is_refused(site, administration, method, target):
    async with site(MANAGEMENT) as ask:
        reply = await ask(method, target)
    assert reply.status == 405
    if method != "HEAD":
        assert reply.json() == {"code": 405, "type": "MethodNotAllowedException", "message": WRONG_METHOD}
    assert administration.asked == []


# ---- tokens


async def test_a_token_is_renewed_with_the_api_key(site, administration):
    administration.keys = {"management": b"k", "inference": b"i", "token": b"t"}
    async with site(MANAGEMENT) as ask:
        reply = await ask("GET", "/token?type=inference", "Authorization: Bearer t")
        assert (reply.status, reply.body) == (200, b"\n")
        for target, line in (
            ("/token?type=inference", "Authorization: Bearer k"),
            ("/token?type=inference", "X-None: 1"),
            ("/token?type=root", "Authorization: Bearer t"),
            ("/token", "Authorization: Bearer t"),
        ):
            assert (await ask("GET", target, line)).json()["type"] == "InvalidKeyException"
    assert administration.asked == [("new_token", "inference")]


WRONG = (
    "X-None: 1",
    "Authorization: Bearer wrong",
    "Authorization: Basic k",
    "Authorization: bearer k",
    "Authorization: Bearer  k",
    "Authorization: Bearer i",
    "Authorization: k",
)


@pytest.mark.parametrize("path", PATHS)
async def test_without_the_management_key_no_route_does_or_reveals_anything(site, administration, path):
    administration.keys = {"management": b"k", "inference": b"i", "token": b"t"}
    async with site(MANAGEMENT) as ask:
        for method, target, line in itertools.product(METHODS, aliases(path), WRONG):
            reply = await ask(method, target, line, body=b'{"url": "a.mar"}')
            assert reply.status == 400, (method, target, line)
            if method != "HEAD":
                shown = {"code": 400, "type": "InvalidKeyException", "message": REFUSED}
                found = reply.json()
                assert found.pop("error", REFUSED) == REFUSED  # in KServe's form
                assert found == shown, (method, target, line)
        assert administration.asked == []
        assert (await ask("GET", "/models", "authorization: Bearer k")).status == 200


async def test_on_a_shared_listener_each_group_has_its_own_key(site, administration):
    administration.keys = {"management": b"k", "inference": b"i", "token": b"t"}
    async with site() as ask:
        for method, target, key in (
            ("GET", "/models", "k"),
            ("GET", "/v1/models/m", "k"),
            ("OPTIONS", "/models/m", "k"),
            ("OPTIONS", "/predictions/m", "i"),
            ("GET", "/v2", "i"),
            ("GET", "/v2/health/ready", "i"),
        ):
            other = {"k": "i", "i": "k"}[key]
            assert (await ask(method, target, f"Authorization: Bearer {key}")).status == 200, target
            assert (await ask(method, target, f"Authorization: Bearer {other}")).status == 400, target
        for method, target in (("OPTIONS", "/"), ("GET", "/api-description"), ("GET", "/metrics")):
            assert (await ask(method, target)).status == 200, target
