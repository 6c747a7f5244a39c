from typing import Any

import pytest

from penstock.torchserve.admin.model_spec import ModelSettings, resolve_settings
from penstock.torchserve.protocol.api import ApiError

DEFAULTS = {"minWorkers": 0, "responseTimeout": 77, "startupTimeout": 88, "jobQueueSize": 99}


def resolved(requested: dict[str, Any], yaml: dict[str, Any], config: dict[str, Any], **more: Any) -> ModelSettings:
    return resolve_settings("m", requested, yaml, config, DEFAULTS, **more)


def test_defaults_apply_without_other_sources() -> None:
    found = resolved({}, {}, {})
    assert found == ModelSettings(
        min_workers=0, max_workers=0, response_timeout=77, startup_timeout=88, job_queue_size=99
    )


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("minWorkers", "min_workers"),
        ("batchSize", "batch_size"),
        ("maxBatchDelay", "max_batch_delay"),
        ("responseTimeout", "response_timeout"),
        ("startupTimeout", "startup_timeout"),
    ],
)
def test_request_overrides_yaml_and_yaml_overrides_configuration(key: str, field: str) -> None:
    requested, yaml, config = {key: 1}, {key: 2}, {key: 3}
    assert getattr(resolved(requested, yaml, config), field) == 1
    assert getattr(resolved({key: None}, yaml, config), field) == 2
    assert getattr(resolved({}, {}, config), field) == 3
    assert getattr(resolved(requested, yaml, config, yaml_wins=True), field) == 2
    assert getattr(resolved(requested, {}, config, yaml_wins=True), field) == 3
    assert getattr(resolved(requested, {}, {}, yaml_wins=True), field) == 1


def test_with_yaml_wins_every_yaml_implies_timeouts() -> None:
    found = resolved({"responseTimeout": 5}, {"handler": {}}, {}, yaml_wins=True)
    assert (found.response_timeout, found.startup_timeout) == (120, 120)
    assert resolved({"responseTimeout": 5}, {}, {}, yaml_wins=True).response_timeout == 5


def test_a_request_for_zero_workers_overrides_the_yaml() -> None:
    assert resolved({"minWorkers": 0, "maxWorkers": 0}, {"minWorkers": 2, "maxWorkers": 4}, {}).min_workers == 0


def test_max_workers_is_at_least_min_workers(caplog: pytest.LogCaptureFixture) -> None:
    assert resolved({"minWorkers": 3}, {"maxWorkers": 2}, {}).max_workers == 3
    found = resolved({}, {"minWorkers": 3, "maxWorkers": 2}, {})
    assert (found.min_workers, found.max_workers) == (3, 3)
    assert "maxWorkers=2" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("minWorkers", -1),
        ("minWorkers", True),
        ("batchSize", 0),
        ("batchSize", "4"),
        ("batchSize", 10**30),
        ("maxBatchDelay", 1.5),
        ("responseTimeout", 0),
        ("deviceType", "tpu"),
        ("deviceIds", [0, -1]),
        ("deviceIds", 0),
        ("useVenv", "yes"),
        ("trust", "all"),
        ("trust", ["pickle"]),
        ("strict_delay", 1),
    ],
)
def test_a_value_of_the_wrong_type_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture, key: str, value: object
) -> None:
    assert resolved({}, {key: value}, {}) == resolved({}, {}, {})
    assert resolved({}, {}, {key: value}) == resolved({}, {}, {})
    assert [record.getMessage().partition(" wrong_values=")[0] for record in caplog.records] == [
        "model=m source=model-config.yaml",
        "model=m source=config.properties",
    ]
    assert key in caplog.text


@pytest.mark.parametrize("key", ["minWorkers", "parallelType", "deviceType"])
def test_the_warning_does_not_expand_yaml_aliases(key: str) -> None:
    written = 0

    class Leaf:
        def __repr__(self) -> str:
            nonlocal written
            written += 1
            return "x"

    value: Any = [Leaf()]
    for _ in range(8):  # as aliases of YAML make it: 6 ** 8 leaves in a few lines
        value = [value] * 6
    resolved({}, {key: value}, {})
    assert written < 1000


def test_keys_of_the_handler_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    resolved({}, {"handler": {"profile": True}, "pt2": "inductor", "micro_batching": 7}, {"marName": "m.mar"})
    assert not caplog.records


@pytest.mark.parametrize(
    "yaml",
    [
        {"asyncCommunication": True, "sequenceBatching": True},
        {"asyncCommunication": True, "continuousBatching": True},
        {"torchrun": {"nnodes": 2, "nproc-per-node": 2}},
        {"torchrun": {"node-rank": 1}},
        {"parallelType": "tp", "parallelLevel": 2, "continuousBatching": True},
    ],
)
def test_keys_that_cannot_work_together_are_refused(yaml: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=next(iter(yaml)) if "parallelType" not in yaml else "parallelType") as found:
        resolved({}, yaml, {})
    assert found.value.status == 400


@pytest.mark.parametrize(
    ("yaml", "ranks", "gpus"),
    [
        ({"parallelType": "pp", "parallelLevel": 4}, 4, 4),
        ({"parallelType": "PPTP", "torchrun": {"nproc-per-node": 2, "rdzv-backend": "c10d"}}, 2, 2),
        ({"torchrun": {"nproc-per-node": 3}}, 3, 3),
        ({"parallelType": "custom", "parallelLevel": 2}, 1, 2),
        ({"parallelLevel": 2}, 1, 1),
        ({"torchrun": "2"}, 1, 1),
    ],
)
def test_the_processes_and_gpus_of_a_worker(yaml: dict[str, Any], ranks: int, gpus: int) -> None:
    found = resolved({}, yaml, {})
    assert (found.ranks, found.gpus) == (ranks, gpus)


def test_unsupported_keys_that_are_off_are_accepted() -> None:
    resolved({}, {"continuousBatching": False, "sequenceBatching": False, "parallelType": "", "parallelLevel": 1}, {})


def test_sequence_keys_cause_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = resolved({}, {"maxNumSequence": 4, "sequenceMaxIdleMSec": 9}, {})
    assert (found.max_num_sequence, found.sequence_max_idle) == (4, 9)
    assert len(caplog.records) == 1
    assert "sequenceMaxIdleMSec,maxNumSequence" in caplog.text


def test_penstocks_own_keys_work_in_both_files() -> None:
    own = {"overlap": True, "retry_split": True, "strict_delay": True, "trust": "pickle"}
    for found in (resolved({}, own, {}), resolved({}, {}, own)):
        assert (found.overlap, found.retry_split, found.strict_delay, found.trust) == (True, True, True, "pickle")
