"""Paths to routes."""

from __future__ import annotations

import pytest

from penstock.errors import BadRequest
from penstock.serving.http.responses import RouteNotFound
from penstock.serving.http.server import find_route, inference_table, resolve
from penstock.serving.protocols.route import CACHED_PATHS, Route

TABLE = inference_table(bool)


@pytest.mark.parametrize(
    ("path", "template", "model", "version"),
    [
        (b"/predictions/m", "/predictions/{model}", "m", None),
        (b"/predictions/m/", "/predictions/{model}", "m", None),
        (b"/predictions/m/2.0", "/predictions/{model}/{version}", "m", "2.0"),
        (b"/predictions/m?a=/b", "/predictions/{model}", "m", None),
        (b"/predictions/a%2Fb", "/predictions/{model}", "a/b", None),
        (b"/predictions/caf%C3%A9", "/predictions/{model}", "caf\xe9", None),
        (b"/v2/models/m/versions/3/infer", "/v2/models/{model}/versions/{version}/infer", "m", "3"),
        (b"/v2/models/ready", "/v2/models/{model}", "ready", None),
        (b"/v2/models/m/ready", "/v2/models/{model}/ready", "m", None),
        (b"/v2", "/v2", "", None),
        (b"/v2/models/", "/v2/models", "", None),
        (b"/", "/", "", None),
        (b"/v1/models/m:predict", "/v1/models/{model}:predict", "m", None),
        (b"/v1/models/m:explain", "/v1/models/{model}:explain", "m", None),
        (b"/v1/models/m%3Apredict", "/v1/models/{model}:predict", "m", None),
        (b"/v1/models/m/versions/2:predict", "/v1/models/{model}/versions/{version}:predict", "m", "2"),
        (b"/v1/models/m/versions/2", "/v1/models/{model}/versions/{version}", "m", "2"),
        (b"http://host:80/predictions/m?x", "/predictions/{model}", "m", None),
    ],
)
def test_paths_are_resolved(path, template, model, version):
    route = resolve(path, TABLE)
    assert (route.template.path, route.model, route.version) == (template, model, version)


@pytest.mark.parametrize("path", [b"", b"*", b"/predictions/", b"/predictions//", b"/Ping", b"/v1"])
def test_other_paths_are_not_found(path):
    with pytest.raises(RouteNotFound):
        resolve(path, TABLE)


@pytest.mark.parametrize("path", [b"/predictions/%ff", b"/predictions/\xff"])
def test_paths_that_are_no_utf8_are_bad(path):
    with pytest.raises(BadRequest):
        resolve(path, TABLE)


def test_the_memory_for_paths_is_bounded_and_forgets_nothing_that_matters():
    known: dict[bytes, Route] = {}
    for n in range(3 * CACHED_PATHS):
        assert find_route(known, b"/predictions/m%d" % n, TABLE).model == f"m{n}"
    find_route(known, b"/predictions/" + b"x" * 1000, TABLE)
    assert len(known) <= CACHED_PATHS
    assert all(len(path) < 300 for path in known)
