from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.platforms import read_sagemaker, read_vertex

VERTEX = {"AIP_HTTP_PORT": "8085", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/v1/endpoints/1:predict"}


def test_sagemakers_variables_have_its_toolkits_defaults() -> None:
    found = read_sagemaker({})
    assert (found.port, found.model_dir, found.program, found.default_accept) == (
        8080,
        "/opt/ml/model",
        None,
        "application/json",
    )
    assert (found.workers, found.response_timeout_s, found.startup_timeout_s) == (None, 60, 600)
    assert (found.max_request_bytes, found.settings) == (None, {})


def test_sagemakers_variables_are_read() -> None:
    found = read_sagemaker(
        {
            "SAGEMAKER_BIND_TO_PORT": "8090",
            "SAGEMAKER_MULTI_MODEL": "true",
            "SAGEMAKER_BASE_DIR": "/data",
            "SAGEMAKER_MAX_PAYLOAD_IN_MB": "25",
            "SAGEMAKER_TS_BATCH_SIZE": "4",
            "SAGEMAKER_TS_MAX_BATCH_DELAY": "20",
        }
    )
    assert (found.port, found.model_dir, found.max_request_bytes) == (8090, "/data/models", 25 * 2**20)
    assert found.settings == {"batchSize": 4, "maxBatchDelay": 20}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "80 80", "a whole number from 1 to 65535"),
        ("SAGEMAKER_BIND_TO_PORT", "0", "a whole number from 1 to 65535"),
        ("SAGEMAKER_MODEL_SERVER_WORKERS", "9" * 5000, "a whole number from 1"),
        ("SAGEMAKER_TS_BATCH_SIZE", "-1", "a whole number from 1"),
        ("SAGEMAKER_MULTI_MODEL", "yes", "true or false"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, expected: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{name}: found (the string .{value}.|a string of 5000 characters), expected {expected}"
    ):
        read_sagemaker({name: value})


def test_vertex_tells_port_routes_and_artifacts() -> None:
    found = read_vertex({**VERTEX, "AIP_STORAGE_URI": "gs://bucket/model"})
    assert (found.port, found.health_route, found.predict_route) == (8085, "/health", "/v1/endpoints/1:predict")
    assert found.storage_uri == "gs://bucket/model"
    assert read_vertex(VERTEX).storage_uri == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"AIP_HTTP_PORT": ""}, "Vertex AI sets AIP_HTTP_PORT, but the environment has no such variable"),
        ({"AIP_HTTP_PORT": "http"}, "AIP_HTTP_PORT: found the string 'http', expected a whole number from 1 to 65535"),
        ({"AIP_HEALTH_ROUTE": "health"}, "AIP_HEALTH_ROUTE: found 'health', expected a path such as /predict"),
        ({"AIP_PREDICT_ROUTE": "/a?b"}, r"AIP_PREDICT_ROUTE: found '/a\?b', expected a path"),
        ({"AIP_PREDICT_ROUTE": "/{model}"}, r"AIP_PREDICT_ROUTE: found '/\{model\}', expected a path"),
        ({"AIP_PREDICT_ROUTE": "/health"}, "AIP_PREDICT_ROUTE: found '/health', which is AIP_HEALTH_ROUTE too"),
    ],
)
def test_a_wrong_variable_of_vertex_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_vertex({**VERTEX, **change})
