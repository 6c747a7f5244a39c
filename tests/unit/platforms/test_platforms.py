from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.config.schema import Config, ModelConfig, ServerConfig
from penstock.errors import ConfigError
from penstock.platforms import platform_routes, read_sagemaker, read_vertex, vertex_targets, with_platform

MODEL = ModelConfig(target="app.py:Model")
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


def config(platform: str, **models: ModelConfig) -> Config:
    return Config(server=ServerConfig(platform=platform), models=models or {"m": MODEL})  # type: ignore[arg-type]


def test_vertex_sets_the_address_and_two_routes() -> None:
    found = with_platform(config("vertex"), VERTEX)
    assert (found.server.host, found.server.port, found.server.grpc_port) == ("0.0.0.0", 8085, 0)
    health, predict = platform_routes(found, VERTEX)
    assert (health.path, health.open) == ("/health", True)
    assert (predict.path, predict.codec, predict.model) == ("/v1/endpoints/1:predict", "kserve", "m")


def test_sagemaker_sets_the_address_and_one_route() -> None:
    env = {"SAGEMAKER_BIND_TO_PORT": "8090"}
    found = with_platform(config("sagemaker", a=ModelConfig(target="app.py:M", name="m")), env)
    assert (found.server.host, found.server.port) == ("0.0.0.0", 8090)
    (route,) = platform_routes(found, env)
    assert (route.path, route.codec, route.model) == ("/invocations", "native", "m")


def test_without_a_platform_nothing_changes() -> None:
    assert with_platform(config("none"), VERTEX) == config("none")
    assert platform_routes(config("none"), VERTEX) == ()


@pytest.mark.parametrize(
    ("found", "env", "message"),
    [
        (config("vertex", a=MODEL, b=MODEL), VERTEX, "server.platform: vertex calls one model, found a, b"),
        (config("vertex"), {}, "Vertex AI sets AIP_HTTP_PORT, AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE"),
        (config("sagemaker"), {"SAGEMAKER_MULTI_MODEL": "true"}, "start `penstock sagemaker serve` instead"),
    ],
)
def test_what_a_platform_cannot_serve_is_refused(found: Config, env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_platform(found, env)


def test_the_artifacts_of_a_vertex_model_are_a_configuration_or_one_model(tmp_path: Path) -> None:
    env = {**VERTEX, "AIP_STORAGE_URI": str(tmp_path)}
    (tmp_path / "labels.txt").touch()
    (tmp_path / "net.onnx").touch()
    assert vertex_targets(env) == (f"{tmp_path}/net.onnx",)
    (tmp_path / "app.py").touch()
    with pytest.raises(
        ConfigError, match=r"AIP_STORAGE_URI: found app\.py, net\.onnx, expected penstock\.toml or exactly"
    ):
        vertex_targets(env)
    (tmp_path / "penstock.toml").touch()
    assert vertex_targets(env) == (f"{tmp_path}/penstock.toml",)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://bucket/model", r"found gs://bucket/model, which Penstock does not download; name a TARGET in the image"),
        ("", r"found '', expected a folder with a model; or name a TARGET"),
        ("/no/folder", r"found '/no/folder', expected a folder with a model"),
    ],
)
def test_artifacts_that_cannot_be_served_are_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vertex_targets({**VERTEX, "AIP_STORAGE_URI": uri})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to serve: name a TARGET"),
        (["--platform", "sagemaker"], "nothing to serve: name a TARGET"),
        (["app.py:M", "--platform", "sagemaker", "--port", "1"], "sets the address; leave out --host and --port"),
        (["app.py:M", "--platform", "sagemaker"], "0.0.0.0"),  # without a token
    ],
)
def test_the_command_says_what_is_missing(words: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["serve", *words])
    assert done.exit_code == 2
    assert message in done.output
