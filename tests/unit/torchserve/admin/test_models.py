from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.core.contracts import Observer
from penstock.torchserve.admin.model_spec import ArchiveSource, VersionRequest, make_spec
from penstock.torchserve.admin.models import ModelVersion, VersionRegistry
from penstock.torchserve.admin.startup import load_startup
from penstock.torchserve.archive.manifest import Manifest
from penstock.torchserve.archive.store import Archive, UnpackedArchive
from penstock.torchserve.config import Properties
from penstock.torchserve.protocol.api import ApiError, RegisterRequest


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
    models.add(version("m", "3.0"))
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


# ---- requests


class LabelObserver(Observer):
    """Records the version label of each components request."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def on_served(
        self, model: str, version: str, labels: Sequence[str], waits_s: Sequence[float], latencies_s: Sequence[float]
    ) -> None:
        self.labels += labels


async def test_requests_are_counted_by_the_requested_version(server: Any) -> None:
    components = server.open(disable_token_authorization=True)
    observer = LabelObserver()
    server.engine._observers = (observer,)
    server.archive("m")
    await components.administrator.register(RegisterRequest(url="m.mar", initial_workers=1))
    for version in (None, "1.0", None):
        assert await server.ask("m", version) == "1.0 hi"
    for model, version in (("nobody", None), ("m", "9")):
        with pytest.raises(ApiError):
            await server.ask(model, version)
    assert components.backend.take_requests() == {("m", "default"): 2, ("m", "1.0"): 1}
    assert observer.labels == ["default", "1.0", "default"]


async def test_a_request_without_a_model_goes_to_the_only_one_of_the_start(server: Any) -> None:
    server.archive("m")
    components = server.open(disable_token_authorization=True, load_models=["m.mar"], default_workers_per_model=1)
    for model, version in (("", None), ("m", None), ("m", "1.0")):
        with pytest.raises(ApiError, match="is opening 1 more of its archives") as raised:
            await server.ask(model, version)
        assert raised.value.status == 503
    await load_startup(components)
    server.archive("other")
    await components.administrator.register(RegisterRequest(url="other.mar", initial_workers=1))
    assert await server.ask("") == "1.0 hi"
    assert components.backend.model_ready("", None)
    assert components.backend.take_requests() == {("m", "default"): 1}
