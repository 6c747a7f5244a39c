"""Triton's model configuration extension: what the engine knows about a version, under Triton's names.

Source: Triton's `model_config.proto`; the shipped part of it has the fields that are written here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock.config.schema import BatchingConfig
from penstock.core.contracts import ModelSnapshot
from penstock.types import ModelMetadata, TensorSpec

_MICROSECONDS: Final = 1e6
# for a platform that Triton lacks, it names its Python backend
_BACKENDS: Final = {"onnxruntime_onnx": "onnxruntime", "pytorch_torchscript": "pytorch", "pytorch_exported": "pytorch"}


def model_config(
    metadata: ModelMetadata, reading: ModelSnapshot, batching: BatchingConfig, versions: Sequence[str]
) -> dict[str, Any]:
    """The configuration of a loaded version as the JSON form of Triton's message.

    As in Triton, `dims` leave out axis 0, the rows, and `max_batch_size` is 0 if that is not rows.
    """
    status, whole = reading.status, metadata.unbatched
    return {
        "name": metadata.name,
        "platform": metadata.platform,
        "backend": _BACKENDS.get(metadata.platform, "python"),
        "version_policy": _version_policy(versions),
        "max_batch_size": 0 if whole else status.max_batch_size,
        "input": [{**_tensor(spec, whole), "optional": spec.optional} for spec in metadata.inputs],
        "output": [_tensor(spec, whole) for spec in metadata.outputs],
        "instance_group": _instance_groups(metadata.name, status.devices),
        **_scheduling(batching, status.max_batch_size, reading.max_queue_rows),
        "parameters": {key: {"string_value": _text(value)} for key, value in metadata.parameters.items()},
        "model_transaction_policy": {"decoupled": metadata.streams},
    }


def _version_policy(versions: Sequence[str]) -> dict[str, Any]:
    """The served versions, if they are all numbers as in Triton."""
    if all(version.isdecimal() for version in versions):
        return {"specific": {"versions": [int(version) for version in versions]}}
    return {"all": {}}


def _tensor(spec: TensorSpec, whole: bool) -> dict[str, Any]:
    datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
    return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": list(spec.shape[0 if whole else 1 :])}


def _instance_groups(name: str, devices: Sequence[str]) -> list[dict[str, Any]]:
    """One group for each device."""
    groups = []
    for n, (device, count) in enumerate(Counter(devices).items()):
        kind, _, number = device.partition(":")
        gpu = {"kind": "KIND_GPU", "gpus": [int(number)] if number.isdecimal() else []}
        groups.append({"name": f"{name}_{n}", "count": count, **({"kind": "KIND_CPU"} if kind == "cpu" else gpu)})
    return groups


def _scheduling(batching: BatchingConfig, max_batch_size: int, max_queue: int) -> dict[str, Any]:
    """`sequence_batching`, `dynamic_batching`, or neither for a model whose requests run one by one."""
    if batching.max_sequences:
        oldest = {"max_candidate_sequences": batching.max_sequences, "preferred_batch_size": [max_batch_size]}
        idle = round(batching.sequence_idle_s * _MICROSECONDS)
        return {"sequence_batching": {"max_sequence_idle_microseconds": idle, "oldest": oldest}}
    if "none" in (batching.policy, batching.rows):
        return {}
    hold_s = batching.max_hold_s if isinstance(batching.max_hold_s, float | int) else 0.0
    queue_policy = {
        "timeout_action": "REJECT",
        "default_timeout_microseconds": round((batching.slo_s or batching.timeout_s) * _MICROSECONDS),
        "allow_timeout_override": True,
        "max_queue_size": max_queue,
    }
    dynamic = {
        "preferred_batch_size": [max_batch_size],
        "max_queue_delay_microseconds": round(hold_s * _MICROSECONDS),
        "priority_levels": len(batching.priority),
        "default_priority_level": 1,
        "default_queue_policy": queue_policy,
    }
    return {"dynamic_batching": dynamic}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
