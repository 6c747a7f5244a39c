from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock.config.schema import BatchingConfig, LimitsConfig, ModelConfig
from penstock.core.worker.spec import Wrapped
from penstock.errors import LoadFailed, PenstockError
from penstock.streamer.model import ManagedModel, wrapped
from penstock.streamer.shared.messages import Offer, offer_of, read_offer, write_offer


def offer(target: Wrapped | None = None, linger_s: float = 5.0, **batching: object) -> Offer:
    keys = {"max_batch_size": 8, "max_queue": 100, "max_hold_s": 0.1, **batching}
    config = ModelConfig(target="model", batching=BatchingConfig(**keys), instances=2, devices=("cpu",))  # type: ignore[arg-type]
    return offer_of(config, target or wrapped(ManagedModel), LimitsConfig(), linger_s)


def test_an_offer_survives_its_way_to_the_batcher() -> None:
    sent = offer(slo_s=0.5, priority=(0.0, 1.0))
    found = read_offer(write_offer(sent))
    assert found == sent
    assert found.packed_target().load().wrapper == "penstock.streamer.shared.sealed:SealedModel"
    assert os.getcwd() in found.sys_path or "" not in sys.path


def test_an_offer_of_values_that_are_not_plain_names_them() -> None:
    found = offer(policy="my.policy:Policy", options={"lock": object()})
    with pytest.raises(PenstockError, match="must be plain values"):
        write_offer(found)
    with pytest.raises(LoadFailed, match="cannot be sent"):
        offer(wrapped(lambda batch: batch))


def test_a_conflict_names_what_differs_and_nothing_else() -> None:
    mine = offer()
    assert mine.conflict(offer().settings) == ""
    assert mine.conflict(offer(max_batch_size=4).settings) == "batch_size is 8 there and 4 here"
    assert mine.conflict(offer(linger_s=1.0, max_hold_s=0.2).settings) == (
        "max_latency is 0.1 there and 0.2 here, linger_s is 5 there and 1 here"
    )
    assert "digest" in mine.conflict(offer(wrapped(ManagedModel, ["weights"])).settings)
    assert "batch_size is 8 there and (unknown) here" in mine.conflict({})


def test_the_digest_of_arguments_is_the_same_in_all_processes() -> None:
    code = """
from penstock.streamer.model import ManagedModel, wrapped
from penstock.streamer.shared.messages import _digest
words = {"labels": {"cat", "dog", "bird", "fish"}, "pairs": [("a", frozenset("xyz"))], "size": 3}
print(_digest(wrapped(ManagedModel, [words], {"more": {1, 2, 3}}), []))
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
