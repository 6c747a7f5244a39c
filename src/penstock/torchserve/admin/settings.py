"""The settings of a model version, from the request, its model-config.yaml and config.properties, in this order.

The keys of model-config.yaml that belong to TorchServe (all others belong to the handler):

| key | effect |
|---|---|
| minWorkers, maxWorkers, batchSize, maxBatchDelay, responseTimeout, startupTimeout, clientTimeoutInMills, jobQueueSize, deviceType, deviceIds, useVenv, useJobTicket | as in TorchServe |
| maxRetryTimeoutInSec | only shown by describe; a failing worker is restarted without end, at most every 30 s |
| continuousBatching, asyncCommunication, sequenceBatching, sequenceMaxIdleMSec, sequenceTimeoutMSec, maxNumSequence, maxSequenceJobQueueSize | as in TorchServe, see handlers/modes.py |
| parallelType, parallelLevel, torchrun with nproc-per-node and OMP_NUMBER_THREADS | as in TorchServe, on one machine, see handlers/group.py |
| the other keys of torchrun | ignored: a group restarts like any worker, on a free port; more than one node is refused |
| overlap, retry_split, strict_delay, trust | Penstock's own |

As in TorchServe, a value of the wrong type is ignored with a warning.
"""  # noqa: E501

import logging
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct, ValidationError, convert, field
from msgspec.structs import fields

from penstock.config.schema import Count, Positive
from penstock.torchserve.protocol.api import ApiError
from penstock.values import found

log = logging.getLogger("penstock.compat")


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
    """Raises ApiError for combinations with which the handler would not run correctly."""
    found = ""
    if settings.async_communication and (settings.continuous_batching or settings.sequence_batching):
        other = "continuousBatching" if settings.continuous_batching else "sequenceBatching"
        found = f"asyncCommunication and {other}, which exclude each other; remove one of them"
    elif settings.ranks > 1 and (settings.async_communication or settings.continuous_batching):
        other = "continuousBatching" if settings.continuous_batching else "asyncCommunication"
        found = f"{other} and several processes per worker (torchrun, parallelType), which exclude each other here"
    elif settings.torchrun is not None and (settings.torchrun.nnodes > 1 or settings.torchrun.node_rank):
        found = "torchrun on more than one node: a group runs on one machine; set nnodes to 1 and node-rank to 0"
    if found:
        raise ApiError("InvalidModelException", f"model {model}: model-config.yaml asks for {found}")


def _valid(model: str, source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The known keys with valid values; one warning lists the invalid ones."""
    good: dict[str, Any] = {}
    bad: list[str] = []
    for key, value in values.items():
        if key not in TYPES or value is None:
            continue
        try:
            good[key] = convert(
                value.lower() if key == "parallelType" and isinstance(value, str) else value, TYPES[key]
            )
        except ValidationError:
            bad.append(f"{key}={found(value)}")
    if "maxWorkers" in good and good["maxWorkers"] < good.get("minWorkers", 0):
        bad.append(f"maxWorkers={good.pop('maxWorkers')}")
    if bad:
        log.warning("model=%s source=%s wrong_values=%s consequence=they_are_not_used", model, source, ", ".join(bad))
    return good
