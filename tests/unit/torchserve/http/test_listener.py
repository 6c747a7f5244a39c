"""The OpenAPI documents describe exactly the routes of their listener."""

from __future__ import annotations

import itertools
import re

import pytest

from penstock.torchserve.config import ListenerConfig, Properties
from penstock.torchserve.http.listener import listener_templates
from support.torchserve import FakeAdministration

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
