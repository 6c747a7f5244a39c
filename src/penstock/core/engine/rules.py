"""What the keys of `[models.NAME]` mean to the engine: places, devices, the policy, the bound of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.batching.policies.base import BatchPolicy
from penstock.core.batching.policies.make import make_policy
from penstock.core.engine.peek import bucket_rule, rows_rule
from penstock.core.worker.devices import expanded
from penstock.errors import ConfigError, describe
from penstock.plugins import load_object

_QUEUED_BATCHES = 16  # that may wait for each instance, without `max_queue`


def devices_of(config: ModelConfig) -> tuple[str, ...]:
    """The device of each instance, in turn over `devices`: as many as there are to be."""
    devices = expanded(config.devices)
    if config.instances != "auto":
        n = config.instances
    elif config.transport == "inline":  # there is one event loop
        n = 1
    elif all(d == "cpu" for d in devices):
        n = max(1, (psutil.cpu_count(logical=False) or 1) // 2)
    else:
        n = len(devices)
    return tuple(devices[i % len(devices)] for i in range(n))


def next_device(config: ModelConfig, used: Sequence[str]) -> str:
    """Where one more instance belongs: the device with the smallest part of what it is named for."""
    devices = expanded(config.devices)
    return min(dict.fromkeys(devices), key=lambda d: used.count(d) / devices.count(d))


def check_rules(config: BatchingConfig) -> None:
    """Raises ConfigError for a policy or a rule that does not exist."""
    rows_rule(config)
    bucket_rule(config)
    policy_of(config)


def policy_of(config: BatchingConfig) -> BatchPolicy:
    """A new policy. Raises ConfigError."""
    if ":" in config.policy:
        found: Any = load_object(config.policy)
        try:
            policy: BatchPolicy = found()
        except Exception as e:
            raise ConfigError(f"batching.policy: making {config.policy} raised {describe(e)}") from e
        return policy
    return make_policy(
        config.policy,
        max_hold_s=None if config.max_hold_s == "auto" else config.max_hold_s,
        slo_s=config.slo_s,
        timeout_s=config.timeout_s,
    )


def queue_bound(config: BatchingConfig, instances: int, max_batch_size: int) -> int:
    """Most rows that may wait: `max_queue`, or as the number of instances says."""
    return config.max_queue or _QUEUED_BATCHES * max(1, instances) * max_batch_size
