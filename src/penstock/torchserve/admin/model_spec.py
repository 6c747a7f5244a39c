"""The specification of a model version: all that is needed to start its workers.

Its settings come from the request, its model-config.yaml and config.properties, in this order. The keys of
model-config.yaml that belong to TorchServe (all others belong to the handler):

| key | effect |
|---|---|
| minWorkers, maxWorkers, deviceType, deviceIds, useVenv, useJobTicket | as in TorchServe |
| batchSize, maxBatchDelay | batching.max_batch_size, .max_hold_s; policy "fixed" with strict_delay, else "adaptive" |
| responseTimeout, startupTimeout | batching.run_timeout_s, load_timeout_s |
| clientTimeoutInMills, jobQueueSize | batching.timeout_s, .max_queue |
| maxRetryTimeoutInSec | only shown by describe; a failing worker is restarted without end, at most every 30 s |
| continuousBatching, asyncCommunication, sequenceBatching, sequenceMaxIdleMSec, sequenceTimeoutMSec, maxNumSequence, maxSequenceJobQueueSize | as in TorchServe, see handlers/handler.py |
| parallelType, parallelLevel, torchrun with nproc-per-node and OMP_NUMBER_THREADS | as in TorchServe, on one machine, see handlers/group.py |
| the other keys of torchrun | ignored: a group restarts like any worker, on a free port; more than one node is refused |
| overlap, strict_delay, trust | Penstock's own |
| retry_split | Penstock's own: batching.retry_split and .idempotent |

As in TorchServe, a value of the wrong type is ignored with a warning.
"""  # noqa: E501

import logging
import os
import sys
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct, ValidationError, convert, field
from msgspec.structs import fields

from penstock.config.checks import check_model
from penstock.config.schema import BatchingConfig, Count, ModelConfig, Positive
from penstock.errors import ArchiveError, ConfigError
from penstock.torchserve.archive.manifest import check_handler, check_model_name
from penstock.torchserve.archive.store import Archive
from penstock.torchserve.config import Properties
from penstock.torchserve.protocol.api import ApiError, RegisterRequest
from penstock.values import found

log = logging.getLogger("penstock.torchserve")

WRAPPER: Final = "penstock.torchserve.handlers.handler:HandlerModel"
CONTINUOUS: Final = "penstock.torchserve.handlers.handler:ContinuousHandlerModel"
GROUP: Final = "penstock.torchserve.handlers.group:GroupHandlerModel"
ASYNC: Final = "penstock.torchserve.handlers.handler:AsyncHandlerModel"
SEQUENCE_IDLE_S: Final = 60.0  # a choice: without sequenceMaxIdleMSec, a lost client must not hold a place for ever
CALLS: Final = 256  # a choice: calls in progress of an asynchronous handler
NO_TIMEOUT_S: Final = 30 * 24 * 3600.0  # a request's maximum wait if clients have no timeout


# ---- settings


class TorchRun(Struct, frozen=True, kw_only=True, rename="kebab"):
    """The key `torchrun`: `nproc_per_node` processes are one worker, each with so many OpenMP threads."""

    nnodes: Positive = 1
    node_rank: Count = 0
    nproc_per_node: Positive = 1
    omp_threads: Positive = field(default=1, name="OMP_NUMBER_THREADS")


class ModelSettings(Struct, frozen=True, kw_only=True, rename="camel"):
    """The settings of one version. As in TorchServe, delays and the client timeout are in ms, other times in s."""

    min_workers: Count
    max_workers: Count
    batch_size: Positive = 1
    max_batch_delay: Count = 100
    response_timeout: Positive = 120
    startup_timeout: Positive = 120
    max_retry_timeout: Count = field(default=300, name="maxRetryTimeoutInSec")
    client_timeout: Count = field(default=0, name="clientTimeoutInMills")  # 0: none
    job_queue_size: Positive = 100
    device_type: Literal["", "cpu", "gpu"] = ""
    device_ids: tuple[Count, ...] = ()
    parallel_level: Count = 0
    parallel_type: Literal["", "pp", "tp", "pptp", "custom"] = ""
    torchrun: TorchRun | None = None
    use_venv: bool = False
    use_job_ticket: bool = False
    continuous_batching: bool = False
    async_communication: bool = False
    sequence_batching: bool = False
    sequence_max_idle: Count = field(default=0, name="sequenceMaxIdleMSec")
    sequence_timeout: Count = field(default=0, name="sequenceTimeoutMSec")
    max_num_sequence: Count = 0
    max_sequence_job_queue_size: Count = 0
    overlap: bool = False
    retry_split: bool = field(default=False, name="retry_split")
    strict_delay: bool = field(default=False, name="strict_delay")
    trust: Literal["none", "pickle"] = "none"

    @property
    def ranks(self) -> int:
        """The processes of each worker. With parallelType custom, one process has `parallel_level` GPUs."""
        if self.parallel_type == "custom":
            return 1
        if self.torchrun is not None:
            return self.torchrun.nproc_per_node
        return max(1, self.parallel_level if self.parallel_type else 1)

    @property
    def gpus(self) -> int:
        """The GPUs of each worker on a machine with GPUs."""
        return max(1, self.parallel_level) if self.parallel_type == "custom" else self.ranks


SEQUENCE_KEYS: Final = ("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize")
TYPES: Final[dict[str, Any]] = {
    **{each.encode_name: each.type for each in fields(ModelSettings)},
    "deviceType": Literal["cpu", "gpu"],
}
"""The type of each key of model-config.yaml."""


def resolve_settings(
    model: str,
    requested: Mapping[str, Any],
    yaml: Mapping[str, Any],
    config: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    yaml_wins: bool = False,
) -> ModelSettings:
    """The settings of a version. All mappings have the keys of model-config.yaml; None in `requested` means not given.

    With `yaml_wins`, model-config.yaml comes first, then config.properties, then the request, as in TorchServe's code
    (but not in its documentation), and any model-config.yaml implies timeouts of 120 s.
    """
    implied = {"responseTimeout": 120, "startupTimeout": 120} if yaml else {}
    yaml, config = _valid(model, "model-config.yaml", yaml), _valid(model, "config.properties", config)
    requested = {key: value for key, value in requested.items() if value is not None}
    layers = [{**implied, **yaml}, config, requested] if yaml_wins else [requested, yaml, config]
    chosen = ChainMap(*[dict(layer) for layer in (*layers, defaults)])
    idle = [key for key in SEQUENCE_KEYS if key in yaml]
    if idle and not chosen.get("sequenceBatching"):
        log.warning("model=%s keys=%s consequence=no_effect_without_sequenceBatching", model, ",".join(idle))
    values = {each.name: chosen[each.encode_name] for each in fields(ModelSettings) if each.encode_name in chosen}
    values["max_workers"] = max(values["min_workers"], values.get("max_workers", 0))
    settings = ModelSettings(**values)
    _refuse_unsupported(model, settings)
    return settings


def _refuse_unsupported(model: str, settings: ModelSettings) -> None:
    """Raises ApiError for settings that exclude each other."""
    asked = ""
    if settings.async_communication and (settings.continuous_batching or settings.sequence_batching):
        other = "continuousBatching" if settings.continuous_batching else "sequenceBatching"
        asked = f"asyncCommunication and {other}, which exclude each other; remove one of them"
    elif settings.ranks > 1 and (settings.async_communication or settings.continuous_batching):
        other = "continuousBatching" if settings.continuous_batching else "asyncCommunication"
        asked = f"{other} and several processes per worker (torchrun, parallelType), which exclude each other here"
    elif settings.torchrun is not None and (settings.torchrun.nnodes > 1 or settings.torchrun.node_rank):
        asked = "torchrun on more than one node: a group runs on one machine; set nnodes to 1 and node-rank to 0"
    if asked:
        raise ApiError("InvalidModelException", f"model {model}: model-config.yaml asks for {asked}")


def _valid(model: str, source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The known keys with valid values; one warning lists the invalid ones."""
    good: dict[str, Any] = {}
    bad: list[str] = []
    for key, value in values.items():
        if key not in TYPES or value is None:
            continue
        if key == "parallelType" and isinstance(value, str):
            value = value.lower()
        try:
            good[key] = convert(value, TYPES[key])
        except ValidationError:
            bad.append(f"{key}={found(value)}")
    if "maxWorkers" in good and good["maxWorkers"] < good.get("minWorkers", 0):
        bad.append(f"maxWorkers={good.pop('maxWorkers')}")
    if bad:
        log.warning("model=%s source=%s wrong_values=%s consequence=they_are_not_used", model, source, ", ".join(bad))
    return good


# ---- specification


class VersionRequest(Struct, frozen=True):
    """A request to register a version. `settings` have the keys of model-config.yaml; None: the registration's.

    `workflow` is the name of the workflow whose node the version is. `functions` is the unpacked archive of the
    workflow if the node is a function; such a version has no URL.
    """

    registration: RegisterRequest
    settings: Mapping[str, Any] | None
    default_workers: int  # the number of workers if no source sets it
    workflow: str = ""
    functions: Archive | None = None


class ArchiveSource(Struct, frozen=True):
    """An archive, its URL, its name in snapshots, and its model-config.yaml.

    `packages` is the folder of the model's own packages: the archive's, unless that belongs to the user.
    """

    archive: Archive
    url: str
    mar_name: str
    yaml: Mapping[str, Any]
    packages: Path


class ModelSpec(Struct, frozen=True):
    """One model version. `config.instances` and `.devices` are set when workers start."""

    name: str
    version: str
    url: str
    mar_name: str
    runtime: str
    settings: ModelSettings
    config: ModelConfig
    setup: dict[str, Any]  # see HandlerSetup in torchserve/handlers/handler.py
    folder: Path
    packages: Path  # where its requirements are installed
    requirements: str = ""  # the name of the model's requirements file


def _requested_settings(registration: RegisterRequest) -> dict[str, Any]:
    """The settings in a registration, with the keys of model-config.yaml."""
    return {
        "minWorkers": registration.initial_workers,
        "maxWorkers": registration.initial_workers,
        "batchSize": registration.batch_size,
        "maxBatchDelay": registration.max_batch_delay,
        "responseTimeout": registration.response_timeout,
        "startupTimeout": registration.startup_timeout,
    }


def make_spec(
    source: ArchiveSource,
    properties: Properties,
    request: VersionRequest,
    *,
    environment: Mapping[str, str] = os.environ,
    model_metrics: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """The spec of a version. Raises ApiError."""
    registration, manifest = request.registration, source.archive.manifest
    name, version = registration.model_name or manifest.model_name, manifest.model_version
    runtime = registration.runtime or manifest.runtime
    own_handler = registration.handler or manifest.handler
    handler = own_handler or properties.default_service_handler
    if runtime == "LSP":
        raise ApiError("InvalidModelException", f"model {name}: runtime LSP (handlers in C++) is not supported")
    if not handler:
        raise ApiError(
            "InvalidModelException",
            f"model {name}: its archive names no handler; set the parameter handler, or default_service_handler in"
            " config.properties",
        )
    try:
        check_model_name(name)
        check_handler(own_handler)  # the configuration may name any file of the machine
    except ArchiveError as e:
        raise ApiError("InvalidModelException", e.message) from None
    defaults = {
        "minWorkers": request.default_workers,
        "responseTimeout": properties.default_response_timeout,
        "startupTimeout": properties.default_startup_timeout,
        "jobQueueSize": properties.job_queue_size,
    }
    own = properties.models.get(name, {}).get(version, {})
    requested = _requested_settings(registration) if request.settings is None else request.settings
    settings = resolve_settings(name, requested, source.yaml, own, defaults, yaml_wins=properties.ts_yaml_wins)
    config = _config(version, settings, _environment(source, settings, properties, environment, handler))
    try:
        check_model(config)
    except ConfigError as e:
        raise ApiError("InvalidModelException", f"model {name}: {e.message}") from None
    setup = _handler_setup(source, properties, settings, name, handler)
    if model_metrics is not None:
        setup["model_metrics"] = dict(model_metrics)
    return ModelSpec(
        name,
        version,
        source.url,
        source.mar_name,
        runtime,
        settings,
        config,
        setup,
        source.archive.folder,
        source.packages,
        manifest.requirements_file,
    )


def _handler_setup(
    source: ArchiveSource, properties: Properties, settings: ModelSettings, name: str, handler: str
) -> dict[str, Any]:
    manifest = source.archive.manifest
    trust = {"trust": settings.trust} if settings.trust != "none" else {}
    return {
        "model_name": name,
        "model_version": manifest.model_version,
        "model_dir": str(source.archive.folder),
        "handler": handler,
        "manifest": manifest.raw if source.archive.has_manifest else None,
        "model_yaml_config": {**source.yaml, **trust},
        "envelope": properties.service_envelope,
        "batch_size": settings.batch_size,
        "limit_max_image_pixels": properties.limit_max_image_pixels,
        "hidden_env": [properties.blacklist_env_vars] if properties.blacklist_env_vars else [],
        "max_response_size": properties.max_response_size,
        "overlap": settings.overlap and settings.ranks == 1,
        "ranks": settings.ranks,
        "retry_split": settings.retry_split,
    }


def _config(version: str, settings: ModelSettings, env: dict[str, str]) -> ModelConfig:
    sequences: dict[str, Any] = {}
    places = settings.batch_size
    target = WRAPPER
    if settings.continuous_batching:
        target = CONTINUOUS
    elif settings.async_communication:
        target = ASYNC
    elif settings.ranks > 1:
        target = GROUP
        omp_threads = 1 if settings.torchrun is None else settings.torchrun.omp_threads
        env = {"OMP_NUM_THREADS": str(omp_threads), **env}
    if settings.sequence_batching:  # TorchServe divides the sequences among the workers, too
        if settings.continuous_batching:
            places *= 2  # as in TorchServe: beside a stream there is room for the request that cancels it
        sequences = {
            "max_sequences": max(1, settings.max_num_sequence // max(1, settings.min_workers)),
            "sequence_backlog": max(1, settings.max_sequence_job_queue_size),
            "sequence_idle_s": settings.sequence_max_idle / 1000 or SEQUENCE_IDLE_S,
            "sequence_timeout_s": settings.sequence_timeout / 1000 or None,
        }
    return ModelConfig(
        target=target,
        version=version,
        load_timeout_s=float(settings.startup_timeout),
        trust=settings.trust,
        env=env,
        batching=BatchingConfig(
            policy="fixed" if settings.strict_delay else "adaptive",
            max_batch_size=1 if target == ASYNC else settings.batch_size,
            max_active=places,
            concurrency=CALLS if target == ASYNC else "auto",
            max_hold_s=settings.max_batch_delay / 1000,
            timeout_s=settings.client_timeout / 1000 or NO_TIMEOUT_S,
            max_queue=settings.job_queue_size,
            rows="auto",
            retry_split=settings.retry_split,
            idempotent=settings.retry_split,
            run_timeout_s=float(settings.response_timeout),
            **sequences,
        ),
    )


def _environment(
    source: ArchiveSource, settings: ModelSettings, properties: Properties, environment: Mapping[str, str], handler: str
) -> dict[str, str]:
    """The variables that workers have in addition to the server's."""
    folder, packages = source.archive.folder, source.packages
    paths = [str(folder)]
    if settings.use_venv:
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        paths.append(str(packages / "venv" / "lib" / python / "site-packages"))
    elif packages != folder:
        paths.append(str(packages))
    if os.path.isabs(handler):
        paths.append(os.path.dirname(handler.partition(":")[0]))
    if environment.get("PYTHONPATH"):
        paths.append(environment["PYTHONPATH"])
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "TS_DECODE_INPUT_REQUEST": str(properties.decode_input_request).lower(),
        "TS_IPEX_ENABLE": str(properties.ipex_enable).lower(),
        **({} if packages == folder else {"PYTHONDONTWRITEBYTECODE": "1"}),  # the folder belongs to the user
    }
