import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from penstock.config.schema import ModelConfig, RayConfig
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import ConfigError, LoadFailed
from penstock.plugins import resolve
from penstock.ray import deployment
from penstock.ray.transport import connect, no_room, wanted


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Makes the installed version of Ray appear as another; None: as not installed."""

    def pretend(found: str | None) -> None:
        def version(name: str) -> str:
            assert name == "ray"
            if found is None:
                raise PackageNotFoundError(name)
            return found

        monkeypatch.setattr("penstock.ray.transport.version", version)

    return pretend


def make() -> None:
    resolve("transport", "ray")(WorkerSpec("m", "1", ModelConfig(target="a:b", transport="ray"), "a:b"))


@pytest.mark.parametrize("use", [make, lambda: deployment("a.py:b")])
def test_without_ray_the_error_names_the_extra(
    use: Callable[[], object], installed: Callable[[str | None], None]
) -> None:
    installed(None)
    with pytest.raises(ConfigError, match=r"need the package ray: pip install 'ray"):
        use()


@pytest.mark.parametrize("version", ["1.13.0", "2.9.3", "3.0.0", "unknown"])
def test_another_version_of_ray_is_refused_with_what_is_expected(
    version: str, installed: Callable[[str | None], None]
) -> None:
    installed(version)
    with pytest.raises(ConfigError, match=rf"found version {version}, expected 2\.60 or newer below 3\.0: pip install"):
        make()


def test_a_transport_is_made_without_importing_ray(
    installed: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import takes seconds, in which the server would answer nobody."""
    installed("2.60.0")
    monkeypatch.setitem(sys.modules, "ray", None)
    make()


def test_the_address_of_rays_client_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ray.address: found ray://head:10001.*such as 10\.0\.0\.1:6379"):
        connect("ray://head:10001")


def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("refused")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(LoadFailed, match=r"the Ray cluster at 10\.0\.0\.1:6379 cannot be used .*refused"):
        connect("10.0.0.1:6379")


def test_an_instance_takes_what_its_section_asks_for() -> None:
    assert wanted(RayConfig(), "cpu") == {"CPU": 1, "GPU": 0}
    assert wanted(RayConfig(), "cuda:3") == {"CPU": 1, "GPU": 1}
    asked = RayConfig(num_cpus=2, num_gpus=0.5, resources={"a100": 0.5})
    assert wanted(asked, "cuda") == {"CPU": 2, "GPU": 0.5, "a100": 0.5}


@pytest.mark.parametrize(("cpus", "why"), [(4, "no node has as much"), (2, "other work takes it")])
def test_an_instance_without_a_place_is_told_what_the_nodes_have(
    cpus: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": True, "Resources": {"CPU": 3.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    ray = SimpleNamespace(nodes=lambda: nodes, available_resources=lambda: {"CPU": 0.5})
    monkeypatch.setitem(sys.modules, "ray", ray)
    text = no_room({"CPU": cpus, "GPU": 0.0}, 60.0)
    assert (
        f"with CPU {cpus} within ray.placement_timeout_s=60, because {why}: its 2 nodes have CPU 5 (0.5 free)" in text
    )
