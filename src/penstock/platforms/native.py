"""`server.platform`: the targets, the address and the routes of `penstock serve` on Vertex AI and SageMaker."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from penstock.config.schema import Config
from penstock.errors import ConfigError
from penstock.platforms import read_sagemaker, read_vertex
from penstock.plugins import is_model_file
from penstock.serving.protocols import native
from penstock.serving.protocols.oip_routes import error_body
from penstock.serving.protocols.route import Template
from penstock.serving.protocols.routes import PING

CONFIGURATION = "penstock.toml"


def vertex_targets(env: Mapping[str, str]) -> tuple[str, ...]:
    """The TARGET in the folder AIP_STORAGE_URI: penstock.toml, or the only model file. Raises ConfigError."""
    uri = read_vertex(env).storage_uri
    if "://" in uri:
        raise ConfigError(
            f"AIP_STORAGE_URI: found {uri}, which Penstock does not download; name a TARGET in the image, such as"
            " app.py:Model, whose `load` copies what it needs, or set AIP_STORAGE_URI to a folder"
        )
    folder = Path(uri)
    if not uri or not folder.is_dir():
        raise ConfigError(f"AIP_STORAGE_URI: found {uri!r}, expected a folder with a model; or name a TARGET")
    if (folder / CONFIGURATION).is_file():
        return (str(folder / CONFIGURATION),)
    models = sorted(str(file) for file in folder.iterdir() if is_model_file(file.name) or file.suffix == ".py")
    if len(models) != 1:
        found = ", ".join(Path(model).name for model in models) or "none"
        raise ConfigError(
            f"AIP_STORAGE_URI: found {found}, expected {CONFIGURATION} or exactly one model, such as model.onnx"
        )
    return (models[0],)


def with_platform(config: Config, env: Mapping[str, str]) -> Config:
    """The configuration with the address that the platform calls. Raises ConfigError."""
    platform = config.server.platform
    if platform == "none":
        return config
    names = {model.name or section for section, model in config.models.items()}
    if len(names) != 1:
        raise ConfigError(
            f"server.platform: {platform} calls one model, found {', '.join(sorted(names))}; name one of them"
        )
    if platform == "sagemaker" and read_sagemaker(env).multi_model:
        raise ConfigError(
            "SAGEMAKER_MULTI_MODEL: the models are loaded later: start `penstock sagemaker serve` instead"
        )
    port = read_vertex(env).port if platform == "vertex" else read_sagemaker(env).port
    return replace(config, server=replace(config.server, host="0.0.0.0", port=port, grpc_port=0))


def platform_routes(config: Config, env: Mapping[str, str]) -> Sequence[Template]:
    """The routes that the platform calls, besides /ping."""
    model = next((model.name or section for section, model in config.models.items()), "")
    if config.server.platform == "vertex":
        routes = read_vertex(env)
        return (
            replace(PING, path=routes.health_route),
            Template(routes.predict_route, "Predict on Vertex AI", codec="kserve", model=model, error_body=error_body),
        )
    if config.server.platform == "sagemaker":
        return (replace(native.ROUTES[0], path="/invocations", summary="Predict on SageMaker", model=model),)
    return ()
