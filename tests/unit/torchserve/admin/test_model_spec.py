import os
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig
from penstock.torchserve.admin.model_spec import (
    NO_TIMEOUT_S,
    ArchiveSource,
    ModelSpec,
    VersionRequest,
    make_spec,
)
from penstock.torchserve.archive.manifest import Manifest
from penstock.torchserve.archive.store import Archive
from penstock.torchserve.config import Properties
from penstock.torchserve.protocol.api import ApiError, RegisterRequest

RAW = {"runtime": "python", "model": {"modelName": "m", "modelVersion": "2.0", "handler": "service.py"}}
MANIFEST = Manifest(model_name="m", model_version="2.0", handler="service.py", raw=RAW)


def spec_of(
    manifest: Manifest = MANIFEST,
    yaml: dict[str, Any] | None = None,
    registration: RegisterRequest | None = None,
    properties: Properties | None = None,
    environment: dict[str, str] | None = None,
    workers: int = 0,
    has_manifest: bool = True,
) -> ModelSpec:
    registration = registration or RegisterRequest(url="m.mar")
    archive = Archive(Path("/models/m"), manifest, has_manifest)
    return make_spec(
        ArchiveSource(archive, "m.mar", "m.mar", yaml or {}, archive.folder),
        properties or Properties(),
        VersionRequest(registration, None, workers),
        environment=environment or {},
    )


def test_torchserves_settings_become_the_cores() -> None:
    yaml = {
        "maxBatchDelay": 50,
        "batchSize": 4,
        "responseTimeout": 7,
        "startupTimeout": 9,
        "clientTimeoutInMills": 1500,
    }
    config = spec_of(yaml=yaml, properties=Properties(job_queue_size=11)).config
    assert config.batching == BatchingConfig(
        max_batch_size=4,
        max_active=4,
        max_hold_s=0.05,
        timeout_s=1.5,
        max_queue=11,
        retry_split=False,
        idempotent=False,
        run_timeout_s=7.0,
    )
    assert (config.version, config.load_timeout_s, config.transport, config.trust) == ("2.0", 9.0, "process", "none")


@pytest.mark.parametrize(
    ("workers", "expected"), [(1, 10), (3, 3), (20, 1)], ids=["one worker", "three workers", "more workers"]
)
def test_the_workers_share_the_sequences(workers: int, expected: int) -> None:
    keys = {"maxNumSequence": 10, "maxSequenceJobQueueSize": 5, "sequenceMaxIdleMSec": 2500, "minWorkers": workers}
    found = spec_of(yaml={"sequenceBatching": True, **keys}).config.batching
    assert (found.max_sequences, found.sequence_backlog, found.sequence_idle_s) == (expected, 5, 2.5)


def test_without_a_client_timeout_a_request_does_not_expire() -> None:
    assert spec_of().config.batching.timeout_s == NO_TIMEOUT_S


def test_a_strict_delay_is_the_fixed_policy() -> None:
    found = spec_of(yaml={"strict_delay": True, "maxBatchDelay": 100}).config.batching
    assert (found.policy, found.max_hold_s) == ("fixed", 0.1)


def test_requests_are_retried_only_with_retry_split() -> None:
    found = spec_of(yaml={"retry_split": True})
    assert (found.config.batching.retry_split, found.config.batching.idempotent) == (True, True)
    assert found.setup["retry_split"] is True


def test_workers_receive_the_settings_of_their_model() -> None:
    properties = Properties(
        service_envelope="body", limit_max_image_pixels=False, max_response_size=5, blacklist_env_vars="SECRET_.*"
    )
    setup = spec_of(yaml={"batchSize": 3, "overlap": True, "own": [1]}, properties=properties).setup
    assert setup == {
        "model_name": "m",
        "model_version": "2.0",
        "model_dir": "/models/m",
        "handler": "service.py",
        "manifest": RAW,
        "model_yaml_config": {"batchSize": 3, "overlap": True, "own": [1]},
        "envelope": "body",
        "batch_size": 3,
        "limit_max_image_pixels": False,
        "hidden_env": ["SECRET_.*"],
        "max_response_size": 5,
        "overlap": True,
        "ranks": 1,
        "retry_split": False,
    }


def test_workers_find_the_modules_of_the_model_first() -> None:
    env = spec_of(environment={"PYTHONPATH": "/more"}).config.env
    assert env["PYTHONPATH"] == os.pathsep.join(["/models/m", "/more"])
    assert env["TS_DECODE_INPUT_REQUEST"] == "true"
    assert spec_of(properties=Properties(decode_input_request=False)).config.env["TS_DECODE_INPUT_REQUEST"] == "false"


def test_workers_of_a_model_with_a_venv_use_its_packages() -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = spec_of(yaml={"useVenv": True}).config.env["PYTHONPATH"]
    assert path == os.pathsep.join(["/models/m", f"/models/m/venv/lib/{version}/site-packages"])


def test_the_request_can_set_model_handler_and_runtime() -> None:
    found = spec_of(registration=RegisterRequest(url="m.mar", model_name="other", handler="b:run", runtime="python3"))
    assert (found.name, found.version, found.runtime, found.setup["handler"]) == ("other", "2.0", "python3", "b:run")


def test_without_a_manifest_the_handler_comes_from_request_or_configuration() -> None:
    bare = Manifest(model_name="m")
    properties = Properties(default_service_handler="fallback:handle")
    found = spec_of(bare, properties=properties, has_manifest=False)
    assert (found.version, found.setup["handler"], found.setup["manifest"]) == ("1.0", "fallback:handle", None)
    named = spec_of(bare, registration=RegisterRequest(url="m.mar", handler="x"), properties=properties)
    assert named.setup["handler"] == "x"
    assert spec_of(properties=properties).setup["handler"] == "service.py"
    with pytest.raises(ApiError, match="default_service_handler") as found_error:
        spec_of(bare)
    assert found_error.value.status == 400


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b", "x" * 129, "a\nb"])
def test_an_invalid_name_is_refused(name: str) -> None:
    if not name:  # says nothing
        assert spec_of(registration=RegisterRequest(url="m.mar", model_name=name)).name == "m"
        return
    with pytest.raises(ApiError, match="name") as found:
        spec_of(registration=RegisterRequest(url="m.mar", model_name=name))
    assert found.value.status == 400


def test_a_handler_outside_of_the_archive_is_refused() -> None:
    with pytest.raises(ApiError, match="climb"):
        spec_of(registration=RegisterRequest(url="m.mar", handler="../../x.py"))


def test_handlers_in_another_language_are_refused() -> None:
    with pytest.raises(ApiError, match="LSP"):
        spec_of(registration=RegisterRequest(url="m.mar", runtime="LSP"))


def test_an_invalid_version_is_refused() -> None:
    with pytest.raises(ApiError, match="version") as found:
        spec_of(Manifest(model_name="m", model_version="a b", handler="x"))
    assert found.value.status == 400


def test_the_configuration_applies_to_exact_names_and_versions() -> None:
    own = {"minWorkers": 2, "maxWorkers": 3, "batchSize": 8, "maxBatchDelay": 5, "responseTimeout": 6}
    properties = Properties(models={"m": {"2.0": own, "1.0": {"batchSize": 99}}})
    s = spec_of(properties=properties, workers=1).settings
    assert (s.min_workers, s.max_workers, s.batch_size, s.max_batch_delay, s.response_timeout) == (2, 3, 8, 5, 6)
    assert spec_of(properties=Properties(models={"M": {"2.0": own}}), workers=1).settings.min_workers == 1


def test_trust_in_the_configuration_reaches_the_handler() -> None:
    found = spec_of(properties=Properties(models={"m": {"2.0": {"trust": "pickle"}}}))
    assert found.config.trust == "pickle"
    assert found.setup["model_yaml_config"] == {"trust": "pickle"}


def test_ts_yaml_wins_lets_the_yaml_override_the_request() -> None:
    yaml, registration = {"batchSize": 4}, RegisterRequest(url="m.mar", batch_size=2, initial_workers=3)
    assert spec_of(yaml=yaml, registration=registration).settings.batch_size == 2
    found = spec_of(yaml=yaml, registration=registration, properties=Properties(ts_yaml_wins=True)).settings
    assert (found.batch_size, found.min_workers) == (4, 3)


def test_workers_receive_the_metrics_of_the_file() -> None:
    declared = {"gauge": [{"name": "a", "unit": "ms", "dimensions": []}]}
    source = ArchiveSource(Archive(Path("/models/m"), MANIFEST, True), "m.mar", "m.mar", {}, Path("/models/m"))
    request = VersionRequest(RegisterRequest(url="m.mar"), {}, 0)
    spec = make_spec(source, Properties(), request, environment={}, model_metrics=declared)
    assert spec.setup["model_metrics"] == declared
