from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.config.schema import Config, ModelConfig, ServerConfig
from penstock.errors import ConfigError
from penstock.platforms.native import platform_routes, vertex_targets, with_platform

VERTEX = {"AIP_HTTP_PORT": "8085", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"}
MODEL = ModelConfig(target="app.py:Model")


def config(platform: str, **models: ModelConfig) -> Config:
    return Config(server=ServerConfig(platform=platform), models=models or {"m": MODEL})  # type: ignore[arg-type]


def test_vertex_sets_the_address_and_two_routes() -> None:
    found = with_platform(config("vertex"), VERTEX)
    assert (found.server.host, found.server.port, found.server.grpc_port) == ("0.0.0.0", 8085, 0)
    health, predict = platform_routes(found, VERTEX)
    assert (health.path, health.open) == ("/health", True)
    assert (predict.path, predict.codec, predict.model) == ("/predict", "kserve", "m")


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
