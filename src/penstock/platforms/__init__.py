"""Managed platforms, SageMaker and Vertex AI: the settings in a container's environment, and their effect on a server.

Every variable of a platform is read here, in servers and in workers. A wrong value is a ConfigError that names the
variable, and `penstock serve` is adapted here. `sagemaker` and `sagemaker_handler` replace SageMaker's toolkits.
Source: "Use your own inference code" (SageMaker), "Custom container requirements" (Vertex AI), and the parameters of
sagemaker-inference 1.10 and sagemaker-pytorch-inference 2.0.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, overload

from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.config.schema import MOST, Config
from penstock.errors import ConfigError
from penstock.plugins import is_model_file
from penstock.serving.protocols import native
from penstock.serving.protocols.oip_routes import error_body
from penstock.serving.protocols.route import Template
from penstock.serving.protocols.routes import PING
from penstock.values import convert, found

_ROUTE: Final = re.compile(r"/[^{}?#\s]*")
_MODEL_SETTINGS: Final = {  # of TorchServe, by variable; in ms and s
    "SAGEMAKER_TS_BATCH_SIZE": "batchSize",
    "SAGEMAKER_TS_MAX_BATCH_DELAY": "maxBatchDelay",
    "SAGEMAKER_TS_MIN_WORKERS": "minWorkers",
    "SAGEMAKER_TS_MAX_WORKERS": "maxWorkers",
    "SAGEMAKER_TS_RESPONSE_TIMEOUT": "responseTimeout",
}


class SageMakerEnvironment(Struct, frozen=True, kw_only=True):
    """The environment of a SageMaker endpoint. `settings` configure TorchServe's models, in its units."""

    port: int
    multi_model: bool
    base_dir: str
    program: str | None  # the script in the model's folder `code`; None: inference.py, if it exists
    default_accept: str
    workers: int | None
    response_timeout_s: int
    startup_timeout_s: int
    max_request_bytes: int | None
    settings: Mapping[str, int]

    @property
    def model_dir(self) -> str:
        """The folder of the model, or of all models."""
        return f"{self.base_dir}/models" if self.multi_model else f"{self.base_dir}/model"


class VertexEnvironment(Struct, frozen=True, kw_only=True):
    """The environment of a Vertex AI endpoint. `storage_uri` is "" for a model without artifacts."""

    port: int
    health_route: str
    predict_route: str
    storage_uri: str


@overload
def _number(env: Mapping[str, str], name: str, default: int, most: int = ...) -> int: ...
@overload
def _number(env: Mapping[str, str], name: str, default: None, most: int = ...) -> int | None: ...
def _number(env: Mapping[str, str], name: str, default: int | None, most: int = MOST) -> int | None:
    """The variable as a whole number from 1. Raises ConfigError."""
    text = env.get(name, "")
    if not text:
        return default
    number: int = convert(text, Annotated[int, Meta(ge=1, le=most)], name, loose=True)
    return number


def read_sagemaker(env: Mapping[str, str]) -> SageMakerEnvironment:
    """Raises ConfigError."""
    multi_model = env.get("SAGEMAKER_MULTI_MODEL", "false").lower()
    if multi_model not in ("true", "false"):
        raise ConfigError(f"SAGEMAKER_MULTI_MODEL: found {found(multi_model)}, expected true or false")
    megabytes = _number(env, "SAGEMAKER_MAX_PAYLOAD_IN_MB", None)
    return SageMakerEnvironment(
        port=_number(env, "SAGEMAKER_BIND_TO_PORT", 8080, most=65535),
        multi_model=multi_model == "true",
        base_dir=env.get("SAGEMAKER_BASE_DIR") or "/opt/ml",
        program=env.get("SAGEMAKER_PROGRAM") or None,
        default_accept=env.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT") or "application/json",
        workers=_number(env, "SAGEMAKER_MODEL_SERVER_WORKERS", None),
        response_timeout_s=_number(env, "SAGEMAKER_MODEL_SERVER_TIMEOUT", 60),
        startup_timeout_s=_number(env, "SAGEMAKER_STARTUP_TIMEOUT", 600),
        max_request_bytes=None if megabytes is None else megabytes * 2**20,
        settings={key: _number(env, name, 0) for name, key in _MODEL_SETTINGS.items() if name in env},
    )


def read_vertex(env: Mapping[str, str]) -> VertexEnvironment:
    """Raises ConfigError."""
    missing = [name for name in ("AIP_HTTP_PORT", "AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE") if not env.get(name)]
    if missing:
        raise ConfigError(
            f"Vertex AI sets {', '.join(missing)}, but the environment has no such variable; set it to try"
        )
    routes = [env[name] for name in ("AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE")]
    for name, route in zip(("AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE"), routes, strict=True):
        if not _ROUTE.fullmatch(route):
            raise ConfigError(f"{name}: found {route!r}, expected a path such as /predict")
    if routes[0] == routes[1]:
        raise ConfigError(
            f"AIP_PREDICT_ROUTE: found {routes[1]!r}, which is AIP_HEALTH_ROUTE too; expected another path"
        )
    return VertexEnvironment(
        port=_number(env, "AIP_HTTP_PORT", 8080, most=65535),
        health_route=routes[0],
        predict_route=routes[1],
        storage_uri=env.get("AIP_STORAGE_URI", ""),
    )


# ---- penstock serve

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
