"""Triton's keys of a load as keys of `[models.NAME]`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.load import model_config
from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.errors import BadRequest
from penstock.serving.triton.load_config import changes, is_tritons, keys_of

MODEL = ModelConfig(target="app.py:Model", devices=("cpu", "cuda:1"))
ROWLESS = ModelConfig(target="app.py:Model", batching=BatchingConfig(rows="none"))


def changed(keys: dict[str, Any], model: ModelConfig = MODEL, **current: Any) -> ModelConfig:
    """The section with Triton's keys."""
    return model_config(keys_of(changes("m", keys, current), model), "m")


def test_keys_of_a_section_make_it_penstocks() -> None:
    assert is_tritons({})
    assert is_tritons({"name": "m", "max_batch_size": 3, "colour": 1})
    assert not is_tritons({"name": "m", "max_batch_size": 3, "instances": 1})


def test_no_keys_change_nothing() -> None:
    assert changed({}) == changed({"name": "m"}) == MODEL


def test_the_batch_size_of_a_model_with_and_without_rows() -> None:
    assert changed({"max_batch_size": 16}).batching == BatchingConfig(max_batch_size=16)
    assert changed({"max_batch_size": 0}).batching == BatchingConfig(rows="none")
    assert changed({"max_batch_size": 16}, ROWLESS).batching == BatchingConfig(max_batch_size=16)


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ([{}], ("cpu",)),
        ([{"count": "3"}], ("cpu", "cuda:1", "cpu")),
        ([{"count": 2, "kind": "KIND_CPU"}], ("cpu", "cpu")),
        ([{"kind": "KIND_GPU", "gpus": [0, 2], "count": 2}], ("cuda:0", "cuda:0", "cuda:2", "cuda:2")),
        ([{"kind": "KIND_GPU", "gpus": [1]}, {"kind": "KIND_CPU", "name": "m_1"}], ("cuda:1", "cpu")),
    ],
)
def test_instance_groups_become_devices(groups: list[dict[str, Any]], devices: tuple[str, ...]) -> None:
    found = changed({"instance_group": groups})
    assert (found.devices, found.instances) == (devices, len(devices))


def test_dynamic_batching_ends_the_policy_of_single_requests() -> None:
    alone = ModelConfig(target="app.py:Model", batching=BatchingConfig(policy="none"))
    assert changed({"dynamic_batching": {}}, alone).batching == BatchingConfig()
    fixed = ModelConfig(target="app.py:Model", batching=BatchingConfig(policy="fixed", max_hold_s=0.5))
    assert changed({"dynamic_batching": {}}, fixed) == fixed
    delay = {"max_queue_delay_microseconds": 250}
    assert changed({"dynamic_batching": delay}, fixed).batching.max_hold_s == 0.00025


@given(st.dictionaries(st.text(max_size=5), st.integers(-9, 9) | st.lists(st.integers(0, 9)) | st.text(max_size=3)))
def test_what_a_client_read_changes_nothing_when_it_is_sent_back(current: dict[str, Any]) -> None:
    current.pop("name", None)
    texts = {key: str(value) if isinstance(value, int) else value for key, value in current.items()}
    assert changed(dict(current), **{"current": 0, **current}) == changed(texts, **current) == MODEL


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"backend": "python"}, "`backend`"),
        ({"sequence_batching": {}}, "`sequence_batching`"),
        ({"instance_group": [{"host_policy": "a"}]}, "`host_policy`"),
        ({"instance_group": [{"count": 0}]}, "instance_group"),
        ({"instance_group": 3}, "instance_group"),
        ({"max_batch_size": []}, "max_batch_size"),
        ({"dynamic_batching": {"priority_queue_policy": {}}}, "`priority_queue_policy`"),
        ({"dynamic_batching": {"default_queue_policy": {"timeout_action": "DELAY"}}}, "timeout_action"),
        ({"dynamic_batching": {"default_queue_policy": {"allow_timeout_override": False}}}, "allow_timeout_override"),
        ({"dynamic_batching": {"preferred_batch_size": [2, 4]}, "max_batch_size": 4}, "preferred_batch_size"),
        ({"dynamic_batching": {"default_priority_level": 2}}, "default_priority_level"),
        ({"dynamic_batching": {"priority_levels": 10**9}}, "priority_levels"),
    ],
)
def test_a_key_without_a_counterpart_is_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        changed(keys)
