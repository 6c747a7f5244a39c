from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.torchserve.admin.model_spec import ArchiveSource, VersionRequest, make_spec
from penstock.torchserve.admin.models import ModelVersion, VersionRegistry
from penstock.torchserve.archive.manifest import Manifest
from penstock.torchserve.archive.store import Archive, UnpackedArchive
from penstock.torchserve.config import Properties
from penstock.torchserve.protocol.api import ApiError, RegisterRequest

Refused = Callable[[pytest.ExceptionInfo[ApiError]], tuple[int, str, str]]


def version(name: str, number: str) -> ModelVersion:
    archive = Archive(Path("/m"), Manifest(model_name=name, model_version=number, handler="h"))
    source = ArchiveSource(archive, f"{name}.mar", f"{name}.mar", {}, archive.folder)
    spec = make_spec(source, Properties(), VersionRequest(RegisterRequest(url="x"), {}, 0))
    return ModelVersion(spec, UnpackedArchive(archive), 0, 0)


@pytest.fixture
def models() -> VersionRegistry:
    """m 1.0 (the default) and 2.0."""
    models = VersionRegistry()
    for number in ("1.0", "2.0"):
        models.add(version("m", number))
    return models


def test_the_first_version_is_the_default(models: VersionRegistry) -> None:
    assert models.find("m", None).version == "1.0"
    assert models.route("m", None).version == "1.0"
    assert models.route("m", "2.0").version == "2.0"
    assert [v.version for v in models.all_of("m")] == ["1.0", "2.0"]


def test_the_oldest_other_version_replaces_a_default_that_failed(models: VersionRegistry) -> None:
    models.remove(models.find("m", "1.0"))
    assert models.find("m", None).version == "2.0"


def test_traffic_is_split_by_weight_until_a_default_is_set(models: VersionRegistry) -> None:
    models.set_traffic("m", {"1.0": 3, "2.0": 1})
    found = [models.route("m", None).version for _ in range(40)]
    assert (found.count("1.0"), found.count("2.0")) == (30, 10)
    assert models.route("m", "1.0").version == "1.0"
    models.set_default("m", "1.0")
    assert {models.route("m", None).version for _ in range(8)} == {"1.0"}


@pytest.mark.parametrize(
    "weights", [{}, {"1.0": 0}, {"1.0": -1, "2.0": 2}, {"1.0": float("nan")}, {"1.0": float("inf")}]
)
def test_invalid_weights_are_refused(models: VersionRegistry, weights: dict[str, float]) -> None:
    with pytest.raises(ApiError, match="weights") as found:
        models.set_traffic("m", weights)
    assert found.value.status == 400
    assert models.route("m", None).version == "1.0"
