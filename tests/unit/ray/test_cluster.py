from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from penstock.config.schema import ModelConfig, RayConfig
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import ConfigError, LoadFailed
from penstock.plugins import resolve
from penstock.ray.cluster import connect, load_ray, no_room, wanted


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    spec = WorkerSpec("m", "1", ModelConfig(target="a:b", transport="ray"), "a:b")
    with pytest.raises(ConfigError, match=r"need the package ray: pip install '\.\[ray\]'"):
        resolve("transport", "ray")(spec)


@pytest.mark.parametrize("version", ["1.13.0", "2.9.3", "3.0.0", "unknown"])
def test_another_version_of_ray_is_refused_with_what_is_expected(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__=version))
    with pytest.raises(ConfigError, match=rf"found version {version}, expected 2\.60 or newer below 3\.0: pip install"):
        load_ray()


def test_the_address_of_rays_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.60.1"))
    with pytest.raises(ConfigError, match=r"ray.address: found ray://head:10001.*such as 10\.0\.0\.1:6379"):
        connect("ray://head:10001")


def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("refused")

    ray = SimpleNamespace(__version__="2.60.0", is_initialized=lambda: False, init=init)
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
    ray = SimpleNamespace(__version__="2.60.0", nodes=lambda: nodes, available_resources=lambda: {"CPU": 0.5})
    monkeypatch.setitem(sys.modules, "ray", ray)
    text = no_room({"CPU": cpus, "GPU": 0.0}, 60.0)
    assert (
        f"with CPU {cpus} within ray.placement_timeout_s=60, because {why}: its 2 nodes have CPU 5 (0.5 free)" in text
    )
