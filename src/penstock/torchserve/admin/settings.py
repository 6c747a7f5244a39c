"""Settings of one model version: what a request, its model-config.yaml and config.properties say, the strongest first.

What becomes of the keys of model-config.yaml that are TorchServe's own (all others are the handler's):

| key | here |
|---|---|
| minWorkers, maxWorkers, batchSize, maxBatchDelay, responseTimeout, startupTimeout, clientTimeoutInMills, jobQueueSize, deviceType, deviceIds, useVenv, useJobTicket | honoured |
| maxRetryTimeoutInSec | told by describe; a worker that fails is tried again for ever, at most every 30 s |
| sequenceMaxIdleMSec, sequenceTimeoutMSec, maxNumSequence, maxSequenceJobQueueSize | told by describe; without sequenceBatching they mean nothing |
| parallelType, parallelLevel above 1, torchrun, continuousBatching, sequenceBatching, asyncCommunication | refused: the handler would be run as it was not written to be |
| overlap, retry_split, strict_delay, trust | Penstock's own |

A value of a wrong type is warned of and not used, as there.
"""  # noqa: E501

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from penstock.torchserve.protocol.api import ApiError

log = logging.getLogger("penstock.compat")

_LEAST: Final = {
    "minWorkers": 0,
    "maxWorkers": 0,
    "batchSize": 1,
    "maxBatchDelay": 0,
    "responseTimeout": 1,
    "startupTimeout": 1,
    "maxRetryTimeoutInSec": 0,
    "clientTimeoutInMills": 0,
    "jobQueueSize": 1,
    "parallelLevel": 0,
    "sequenceMaxIdleMSec": 0,
    "sequenceTimeoutMSec": 0,
    "maxNumSequence": 0,
    "maxSequenceJobQueueSize": 0,
}
_SWITCHES: Final = frozenset(
    {
        "useVenv",
        "useJobTicket",
        "continuousBatching",
        "sequenceBatching",
        "asyncCommunication",
        "overlap",
        "retry_split",
        "strict_delay",
    }
)
_WORDS: Final = {"deviceType": ("cpu", "gpu"), "trust": ("none", "pickle")}
_IDLE: Final = ("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize")
_PARALLEL: Final = ("pp", "tp", "pptp", "custom")
_MOST: Final = 2**31 - 1


class Settings(Struct, frozen=True, kw_only=True):
    """The values that hold. Delays and client timeout in ms, the other times in s, as TorchServe speaks of them."""

    min_workers: int
    max_workers: int
    batch_size: int = 1
    max_batch_delay: int = 100
    response_timeout: int = 120
    startup_timeout: int = 120
    max_retry_timeout: int = 300
    client_timeout: int = 0  # 0: none
    job_queue_size: int = 100
    device_type: str = ""
    device_ids: tuple[int, ...] = ()
    parallel_level: int = 0
    use_venv: bool = False
    use_job_ticket: bool = False
    sequence_max_idle: int = 0
    sequence_timeout: int = 0
    max_num_sequence: int = 0
    max_sequence_job_queue_size: int = 0
    overlap: bool = False
    retry_split: bool = False
    strict_delay: bool = False
    trust: str = "none"


class Defaults(Struct, frozen=True, kw_only=True):
    """What holds where nobody says anything."""

    workers: int
    response_timeout: int = 120
    startup_timeout: int = 120
    job_queue_size: int = 100


def settle(
    model: str,
    said: Mapping[str, Any],
    yaml: Mapping[str, Any],
    config: Mapping[str, Any],
    defaults: Defaults,
    *,
    yaml_wins: bool = False,
) -> Settings:
    """The settings of a version. `said` is what the request says, with the same keys; None stands for nothing.

    `yaml_wins`: as TorchServe's code has it and not its documentation, model-config.yaml first, then config.properties,
    then the request; and a model-config.yaml without timeouts says 120 s.
    """
    _refuse(model, yaml)
    implicit = {"responseTimeout": 120, "startupTimeout": 120} if yaml else {}
    yaml, config = _clean(model, "model-config.yaml", yaml), _clean(model, "config.properties", config)
    said = {key: value for key, value in said.items() if value is not None}
    layers: Sequence[Mapping[str, Any]] = [said, yaml, config]
    if yaml_wins:
        layers = [{**implicit, **yaml}, config, said]

    def value(key: str, default: Any) -> Any:
        return next((layer[key] for layer in layers if key in layer), default)

    least = value("minWorkers", defaults.workers)
    idle = [key for key in _IDLE if key in yaml]
    if idle:
        log.warning("model=%s keys=%s consequence=without_sequenceBatching_they_mean_nothing", model, ",".join(idle))
    return Settings(
        min_workers=least,
        max_workers=max(least, value("maxWorkers", least)),
        batch_size=value("batchSize", 1),
        max_batch_delay=value("maxBatchDelay", 100),
        response_timeout=value("responseTimeout", defaults.response_timeout),
        startup_timeout=value("startupTimeout", defaults.startup_timeout),
        max_retry_timeout=value("maxRetryTimeoutInSec", 300),
        client_timeout=value("clientTimeoutInMills", 0),
        job_queue_size=value("jobQueueSize", defaults.job_queue_size),
        device_type=value("deviceType", ""),
        device_ids=tuple(value("deviceIds", ())),
        parallel_level=value("parallelLevel", 0),
        use_venv=value("useVenv", False),
        use_job_ticket=value("useJobTicket", False),
        sequence_max_idle=value("sequenceMaxIdleMSec", 0),
        sequence_timeout=value("sequenceTimeoutMSec", 0),
        max_num_sequence=value("maxNumSequence", 0),
        max_sequence_job_queue_size=value("maxSequenceJobQueueSize", 0),
        overlap=value("overlap", False),
        retry_split=value("retry_split", False),
        strict_delay=value("strict_delay", False),
        trust=value("trust", "none"),
    )


def _refuse(model: str, yaml: Mapping[str, Any]) -> None:
    """Raises ApiError for what would be served wrongly."""
    found = [key for key in ("continuousBatching", "sequenceBatching", "asyncCommunication") if yaml.get(key) is True]
    kind = yaml.get("parallelType")
    if isinstance(kind, str) and kind.lower() in _PARALLEL:
        found.append("parallelType")
    level = yaml.get("parallelLevel")
    if isinstance(level, int) and level > 1:
        found.append("parallelLevel")
    if yaml.get("torchrun"):
        found.append("torchrun")
    if found:
        raise ApiError(
            "InvalidModelException",
            f"model {model}: model-config.yaml asks for {', '.join(found)}, which is not supported; remove it if the"
            " handler also runs as one process, a batch at a time",
        )


def _clean(model: str, source: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The known keys with values of the right type; of others there is one warning."""
    good: dict[str, Any] = {}
    bad: list[str] = []
    for key, value in values.items():
        known, right = _right(key, value)
        if right:
            good[key] = value
        elif known and value is not None:
            bad.append(f"{key}={reprlib.repr(value):.40}")  # aliases of YAML: 1 KB may be GB
    if good.get("maxWorkers", _MOST) < good.get("minWorkers", 0):
        bad.append(f"maxWorkers={good.pop('maxWorkers')}")
    if bad:
        log.warning("model=%s source=%s wrong_values=%s consequence=they_are_not_used", model, source, ", ".join(bad))
    return good


def _right(key: str, value: Any) -> tuple[bool, bool]:
    """(whether the key is known, whether its value is one)."""
    if key in _LEAST:
        return True, type(value) is int and _LEAST[key] <= value <= _MOST
    if key in _SWITCHES:
        return True, isinstance(value, bool)
    if key in _WORDS:
        return True, value in _WORDS[key]
    if key == "deviceIds":
        return True, isinstance(value, list) and all(type(i) is int and 0 <= i <= _MOST for i in value)
    return False, False
