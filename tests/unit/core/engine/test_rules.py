"""How many instances, where, and what may wait for them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine import rules
from penstock.core.worker import devices as devices_of_machine


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(target="a:b", **keys)


@pytest.mark.parametrize(
    ("keys", "devices"),
    [
        ({}, ["cpu"]),
        ({"instances": 3}, ["cpu"] * 3),
        ({"instances": 3, "devices": ("cuda:0", "cuda:1")}, ["cuda:0", "cuda:1", "cuda:0"]),
        ({"instances": 1, "devices": ("cuda:0", "cuda:1")}, ["cuda:0"]),
        ({"instances": "auto", "devices": ("cuda:0", "cuda:1")}, ["cuda:0", "cuda:1"]),
        ({"instances": "auto"}, ["cpu"] * 4),
        ({"instances": "auto", "transport": "inline"}, ["cpu"]),
        ({"instances": "auto", "transport": "inline", "devices": ("cuda:0", "cuda:1")}, ["cuda:0"]),
        ({"devices": ()}, ["cpu"]),
        ({"instances": "auto", "devices": ("cuda",)}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"instances": 4, "devices": ("cuda",)}, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
    ],
)
def test_instances_are_dealt_out_over_the_devices_in_turn(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], devices: list[str]
) -> None:
    monkeypatch.setattr(rules.psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(devices_of_machine, "visible_gpus", lambda: 3)
    assert list(rules.devices_of(config(**keys))) == devices


def test_new_instances_go_where_there_are_fewest() -> None:
    keys = config(devices=("cuda:0", "cuda:0", "cuda:1"))
    used: list[str] = []
    for _ in range(6):
        used.append(rules.next_device(keys, used))
    assert (used.count("cuda:0"), used.count("cuda:1")) == (4, 2)


def test_new_instances_on_cuda_go_over_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_of_machine, "visible_gpus", lambda: 2)
    assert rules.next_device(config(devices=("cuda",)), ["cuda:0"]) == "cuda:1"


def test_the_bound_of_the_queue_follows_the_instances_unless_it_is_given() -> None:
    assert [rules.queue_bound(BatchingConfig(), n, 8) for n in (0, 1, 3)] == [128, 128, 384]
    assert rules.queue_bound(BatchingConfig(max_queue=5), 3, 8) == 5
