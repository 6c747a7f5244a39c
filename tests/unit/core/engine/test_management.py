"""Management over real engines with the thread transport; `app.py` and a model store in a folder of the test's own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from penstock.config.schema import AutoscaleConfig, Config, LimitsConfig, ModelConfig, ServerConfig
from penstock.core.engine.engine import Engine
from penstock.core.engine.management import AllowedTargets, Management
from penstock.errors import BadRequest, Conflict, Forbidden, LoadFailed, ModelNotFound, ModelNotReady
from penstock.types import ModelStatus

SOURCE = """
import threading
import time

go = threading.Event()


class Model:
    def predict(self, items):
        time.sleep(max(0, *items, 0) if all(isinstance(i, float) for i in items) else 0)
        return ["{tag}" for _ in items]


class Slow(Model):
    def load(self, device):
        go.wait(10)


class Broken(Model):
    def load(self, device):
        raise RuntimeError("no weights in /a/secret/place")


class Third(Model):
    # the first loads, the second loads once `go` is set, the third hangs until then and fails
    loads = []

    def load(self, device):
        self.loads.append(device)
        number = len(self.loads)
        if number > 1:
            go.wait(10)
        if number > 2:
            time.sleep(0.1)
            raise RuntimeError("one too many")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "store" / "deep").mkdir(parents=True)
    (tmp_path / "app.py").write_text(SOURCE.replace("{tag}", "one"))
    (tmp_path / "store" / "two.py").write_text(SOURCE.replace("{tag}", "two"))
    (tmp_path / "store" / "deep" / "three.py").write_text(SOURCE.replace("{tag}", "three"))
    (tmp_path / "store" / "notes.txt").write_text("")
    (tmp_path / "store" / "net.onnx").write_text("")
    (tmp_path / "store" / "out.onnx").symlink_to(tmp_path / "app.py")
    (tmp_path / "store" / "out.py").symlink_to(tmp_path / "app.py")
    (tmp_path / "store" / "in.py").symlink_to("two.py")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def config(folder: Path) -> Config:
    return Config(
        server=ServerConfig(management=True, model_store=str(folder / "store"), drain_s=5.0),
        limits=LimitsConfig(max_instances=4),
        models={"m": ModelConfig(target=f"{folder}/app.py:Model", transport="thread", trust="pickle")},
    )


@pytest.fixture
async def engine(config: Config) -> AsyncIterator[Engine]:
    async with Engine(config.limits) as engine:
        await engine.load("m", config.models["m"])
        yield engine


@pytest.fixture
async def manage(engine: Engine, config: Config) -> Management:
    management = Management(engine, config)
    management.started = True
    return management


def keys(target: str, **more: Any) -> dict[str, Any]:
    return {"target": target, "transport": "thread", **more}


def shown(manage: Management) -> list[tuple[str, str]]:
    return sorted((s.version, s.state) for s in manage.statuses())


def only(manage: Management) -> ModelStatus:
    (status,) = manage.statuses()
    return status


# ---- load, swap, unload


async def test_a_newer_version_replaces_a_default_that_was_not_set(manage: Management, engine: Engine) -> None:
    await manage.put("m", "2", keys("two.py:Model"))
    assert await engine.infer("m", 0) == "two"
    assert await engine.infer("m", 0, version="1") == "one"
    await manage.set_default("m", "1")
    await manage.put("m", "3", keys("two.py:Model"))
    assert await engine.infer("m", 0) == "one"
    await manage.set_default("m", "2")
    assert await engine.infer("m", 0) == "two"
    await manage.unload("m", "3")
    await manage.unload("m", "2")
    assert await engine.infer("m", 0) == "one"
    assert shown(manage) == [("1", "READY")]


async def test_a_loading_version_is_hidden_and_the_server_stays_ready(manage: Management, engine: Engine) -> None:
    loading = asyncio.ensure_future(manage.put("m", "2", keys("two.py:Slow")))
    await asyncio.sleep(0.05)
    assert shown(manage) == [("1", "READY"), ("2", "LOADING")]
    assert [s.version for s in engine.statuses()] == ["1"]
    assert engine.ready()
    with pytest.raises(ModelNotFound):
        await engine.infer("m", 0, version="2")
    sys.modules["two"].go.set()
    await loading
    assert await engine.infer("m", 0, version="2") == "two"


async def test_a_swap_answers_the_accepted_requests_of_the_old_version(manage: Management, engine: Engine) -> None:
    old = [asyncio.ensure_future(engine.infer("m", 0.1)) for _ in range(3)]
    await asyncio.sleep(0)
    await manage.put("m", None, keys("two.py:Model"))
    assert [f.result() for f in old] == ["one"] * 3
    assert await engine.infer("m", 0) == "two"
    assert shown(manage) == [("1", "READY")]


async def test_unloading_a_model_unloads_all_versions(manage: Management, engine: Engine) -> None:
    await manage.put("m", "2", keys("two.py:Model"))
    await manage.unload("m", None)
    assert manage.statuses() == []
    with pytest.raises(ModelNotFound):
        await manage.unload("m", None)
    await manage.put("m", "7", keys("two.py:Model"))
    assert await engine.infer("m", 0) == "two"


async def test_unload_ends_a_hanging_load(manage: Management, engine: Engine) -> None:
    loading = asyncio.ensure_future(manage.put("m", "2", keys("two.py:Slow")))
    await asyncio.sleep(0.05)
    await manage.unload("m", "2")
    with pytest.raises(Conflict, match="was unloaded while it was loading"):
        await loading
    assert shown(manage) == [("1", "READY")]
    sys.modules["two"].go.set()


async def test_a_failed_load_changes_nothing_and_reveals_no_path(manage: Management, engine: Engine) -> None:
    for version in ("1", "2"):
        with pytest.raises(LoadFailed, match="nothing has changed") as caught:
            await manage.put("m", version, keys("two.py:Broken"))
        assert "secret" not in caught.value.message
    assert shown(manage) == [("1", "READY")]
    assert await engine.infer("m", 0) == "one"


async def test_changes_run_in_sequence_per_model_and_concurrently_across_models(
    manage: Management, engine: Engine
) -> None:
    slow = asyncio.ensure_future(manage.put("m", "2", keys("two.py:Slow")))
    await asyncio.sleep(0.05)
    scaling = asyncio.ensure_future(manage.scale("m", "1", 2))
    await manage.put("n", None, keys("deep/three.py:Model"))
    assert not scaling.done()
    sys.modules["two"].go.set()
    await asyncio.gather(slow, scaling)
    assert {s.name: s.instances for s in manage.statuses() if s.version == "1"} == {"m": 2, "n": 1}


async def test_a_caller_that_leaves_does_not_leave_half_a_change(manage: Management, engine: Engine) -> None:
    leaving = asyncio.ensure_future(manage.put("m", "2", keys("two.py:Slow")))
    await asyncio.sleep(0.05)
    leaving.cancel()
    sys.modules["two"].go.set()
    await manage.set_default("m", "2")  # its turn comes after the load
    assert await engine.infer("m", 0) == "two"


async def test_unload_ends_a_running_load_and_queued_ones(manage: Management, engine: Engine) -> None:
    loads = [asyncio.ensure_future(manage.put("m", "2", keys("two.py:Slow"))) for _ in range(3)]
    other = asyncio.ensure_future(manage.put("m", "3", keys("two.py:Model")))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await manage.unload("m", "2")
        for load, words in zip(loads, ("was unloaded while it was loading", *["nothing was started"] * 2), strict=True):
            with pytest.raises(Conflict, match=words):
                await load
        await other
    assert shown(manage) == [("1", "READY"), ("3", "READY")]
    sys.modules["two"].go.set()


async def test_unload_cancels_a_queued_load(manage: Management) -> None:
    hanging = asyncio.ensure_future(manage.put("m", "3", keys("two.py:Slow")))
    waiting = asyncio.ensure_future(manage.put("m", "2", keys("two.py:Model")))
    await asyncio.sleep(0.05)
    unloading = asyncio.ensure_future(manage.unload("m", "2"))
    await asyncio.sleep(0)
    sys.modules["two"].go.set()
    async with asyncio.timeout(5):
        await hanging
        with pytest.raises(Conflict, match="nothing was started"):
            await waiting
        await unloading
    assert shown(manage) == [("1", "READY"), ("3", "READY")]


async def test_a_load_after_an_unload_succeeds(manage: Management, engine: Engine) -> None:
    hanging = asyncio.ensure_future(manage.put("m", "2", keys("two.py:Slow")))
    await asyncio.sleep(0.05)
    unloading = asyncio.ensure_future(manage.unload("m", None))
    await asyncio.sleep(0)
    again = asyncio.ensure_future(manage.put("m", "2", keys("deep/three.py:Model")))
    async with asyncio.timeout(5):
        await asyncio.gather(unloading, again)
    with pytest.raises(Conflict):
        await hanging
    assert await engine.infer("m", 0) == "three"
    assert shown(manage) == [("2", "READY")]
    sys.modules["two"].go.set()


async def test_unload_ends_a_hanging_scale_and_a_queued_one(manage: Management, engine: Engine) -> None:
    await manage.put("n", None, keys("two.py:Third"))
    scales = [asyncio.ensure_future(manage.scale("n", None, n)) for n in (2, 3)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await manage.unload("n", None)
    for scale, words in zip(scales, ("was unloaded while it was scaled", "nothing was started"), strict=True):
        with pytest.raises(Conflict, match=words):
            await scale
    assert [s.name for s in manage.statuses()] == ["m"]
    sys.modules["two"].go.set()


@pytest.mark.parametrize("transport", ["thread", "process"])
async def test_a_scale_that_hangs_ends_with_its_time_and_leaves_the_model_free(
    manage: Management, engine: Engine, folder: Path, transport: str
) -> None:
    (folder / "store" / "hangs.py").write_text(
        f"""
import os, time

class Model:
    def load(self, device):
        if os.path.exists({str(folder / "loaded")!r}):
            time.sleep(60 if {transport == "process"} else 1)
        open({str(folder / "loaded")!r}, "w").close()

    def predict(self, items):
        return items
"""
    )
    await manage.put("n", None, {"target": "hangs.py:Model", "transport": transport})
    spec = engine.handle("n", None).instances._spec
    config, spec.config = spec.config, structs.replace(spec.config, load_timeout_s=0.2)
    async with asyncio.timeout(10):
        with pytest.raises(LoadFailed, match="nothing has changed"):
            await manage.scale("n", None, 2)
        assert await engine.infer("n", 3) == 3
        (folder / "loaded").unlink()
        spec.config = config
        await manage.scale("n", None, 2)
    assert {s.name: s.ready_instances for s in manage.statuses()} == {"m": 1, "n": 2}


# ---- scale


async def test_a_new_instance_that_has_work_answers_it_though_the_other_did_not_load(
    manage: Management, engine: Engine
) -> None:
    await manage.put("n", None, keys("two.py:Third", batching={"max_batch_size": 1, "idempotent": False}))
    scaling = asyncio.ensure_future(manage.scale("n", None, 3))
    await asyncio.sleep(0.05)
    sys.modules["two"].go.set()
    ready = [s.ready_instances for s in manage.statuses() if s.name == "n"]
    async with asyncio.timeout(5):
        while ready != [2]:
            await asyncio.sleep(0.005)
            ready = [s.ready_instances for s in manage.statuses() if s.name == "n"]
    answers = [asyncio.ensure_future(engine.infer("n", 0.3)) for _ in range(2)]  # both run longer than the load fails
    with pytest.raises(LoadFailed):
        await scaling
    assert await asyncio.gather(*answers) == ["two", "two"]
    assert [(s.instances, s.ready_instances) for s in manage.statuses() if s.name == "n"] == [(1, 1)]


async def test_scaling_moves_the_instances_and_the_bound_of_the_queue(manage: Management, engine: Engine) -> None:
    scheduler = engine.handle("m", None).batcher.scheduler  # type: ignore[union-attr]
    one = scheduler.max_queue
    for n in (3, 3, 1, 4, 2):
        await manage.scale("m", None, n)
        assert (only(manage).instances, only(manage).ready_instances, len(only(manage).devices)) == (n, n, n)
        assert scheduler.max_queue == n * one
        assert await engine.infer_many("m", [0] * 50) == ["one"] * 50


async def test_a_removed_instance_answers_its_batch(manage: Management, engine: Engine) -> None:
    await manage.scale("m", None, 3)
    running = [asyncio.ensure_future(engine.infer("m", 0.1)) for _ in range(3)]
    await asyncio.sleep(0.02)
    await manage.scale("m", None, 1)
    assert await asyncio.gather(*running) == ["one"] * 3
    assert only(manage).state == "READY"


async def test_the_inline_transport_cannot_be_scaled(manage: Management) -> None:
    await manage.put("n", None, {"target": "two.py:Model", "transport": "inline"})
    with pytest.raises(BadRequest, match="one instance"):
        await manage.scale("n", None, 2)


@pytest.mark.parametrize("instances", [0, -1, 5, 10**6])
async def test_an_invalid_number_of_instances_is_refused(manage: Management, instances: int) -> None:
    with pytest.raises(BadRequest, match="expected 1 to 4"):
        await manage.scale("m", None, instances)


# ---- when and what


async def test_nothing_changes_unless_the_configuration_allows_it(engine: Engine) -> None:
    closed = Management(engine, Config())
    closed.started = True
    for change in (
        closed.put("m", "2", {}),
        closed.unload("m", None),
        closed.scale("m", None, 2),
        closed.set_default("m", "1"),
        closed.set_traffic("m", {"1": 1.0}),
    ):
        with pytest.raises(Forbidden, match="management = true"):
            await change
    assert [s.instances for s in engine.statuses()] == [1]


async def test_a_drained_version_answers_what_it_accepted_and_takes_nothing_new_until_it_is_set_back(
    manage: Management, engine: Engine, wait_until: Any
) -> None:
    with pytest.raises(Conflict, match="no other version of model 'm' is ready"):
        await manage.drain("m", "1", True)
    await manage.put("m", "2", keys("two.py:Model"))
    with pytest.raises(Conflict, match="version '2' is ready, not drained"):
        await manage.drain("m", "2", False)
    running = asyncio.create_task(engine.infer("m", 0.3, version="2"))
    await asyncio.sleep(0)
    draining = [asyncio.create_task(manage.drain("m", "2", True)) for _ in range(2)]
    await wait_until(lambda: engine.handle("m", "2").state == "DRAINED")
    with pytest.raises(ModelNotReady, match="model 'm' is drained"):
        await engine.infer("m", 0.0, version="2")
    assert await engine.infer("m", 0.0) == "one", "requests without a version go to the other one"
    assert not any(task.done() for task in draining)
    assert await running == "two"
    await asyncio.gather(*draining)
    assert engine.ready()
    assert [(s.version, s.state, s.ready_instances) for s in manage.statuses()][1] == ("2", "DRAINED", 1)
    with pytest.raises(Conflict, match="no other version"):
        await manage.drain("m", "1", True)
    await manage.drain("m", "2", False)
    assert await engine.infer("m", 0.0) == "two"
    await manage.set_default("m", "2")
    with pytest.raises(Conflict, match="set another one first"):
        await manage.drain("m", "2", True)
    with pytest.raises(ModelNotFound):
        await manage.drain("m", "3", True)


async def test_a_drain_that_takes_too_long_is_an_error_and_the_version_stays_drained(
    engine: Engine, config: Config
) -> None:
    manage = Management(engine, structs.replace(config, server=structs.replace(config.server, drain_s=0.1)))
    manage.started = True
    await manage.put("m", "2", keys("app.py:Model"))
    running = asyncio.create_task(engine.infer("m", 0.5, version="2"))
    await asyncio.sleep(0)
    with pytest.raises(ModelNotReady, match=r"1 are not answered after 0.1 s \(server.drain_s\)"):
        await manage.drain("m", "2", True)
    assert await running == "one"
    assert engine.handle("m", "2").state == "DRAINED"


async def test_nothing_changes_while_the_server_starts_or_drains(manage: Management, engine: Engine) -> None:
    manage.started = False
    with pytest.raises(ModelNotReady, match="starting"):
        await manage.unload("m", None)
    manage.started = True
    engine.drain()
    with pytest.raises(ModelNotReady, match="draining"):
        await manage.unload("m", None)


async def test_closing_the_engine_ends_a_change_under_way(manage: Management, engine: Engine) -> None:
    loading = asyncio.ensure_future(manage.put("m", "1", keys("two.py:Slow")))
    waiting = asyncio.ensure_future(manage.scale("m", None, 2))
    await asyncio.sleep(0.05)
    await engine.close(0)
    for change in (loading, waiting):
        with pytest.raises(ModelNotReady):
            await change
    assert manage.statuses() == []
    sys.modules["two"].go.set()


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ({}, BadRequest, "target: found none"),
        ({"target": 5}, BadRequest, "target: found 5, expected a string"),
        ({"targt": "x"}, BadRequest, "target: found none"),
        (keys("two.py:Model", instancs=1), BadRequest, "did you mean 'instances'"),
        (keys("two.py:Model", instances=0), BadRequest, "instances: found 0"),
        (keys("two.py:Model", instances=5), BadRequest, "expected 1 to 4"),
        ({"target": "two.py:Model", "transport": "inline", "instances": 2}, BadRequest, "inline transport runs one"),
        (keys("two.py:Model", devices=["cuda:x"]), BadRequest, "devices: found 'cuda:x'"),
        (keys("two.py:Model", devices=["cuda:-1"]), BadRequest, "devices: found 'cuda:-1'"),
        (keys("two.py:Model", batching={"priority": []}), BadRequest, "priority: found a list of 0"),
        (keys("two.py:Model", load_timeout_s=0), BadRequest, "load_timeout_s: found 0, expected a number above 0"),
        (keys("two.py:Model", batching={"policy": "adaptiv"}), BadRequest, "did you mean 'adaptive'"),
        (keys("two.py:Model", version="3"), BadRequest, "names version '2'"),
        (keys("two.py:Model", name="n"), BadRequest, "names the model 'm'"),
        (keys("two.py:Model", traffic={"1": 1.0}), BadRequest, "/traffic"),
        (keys("two.py:Model", env={"LD_PRELOAD": "x"}, transport="process"), Forbidden, "env"),
        (keys("two.py:Model", trust="pickle"), Forbidden, "trust"),
        ({"target": "two.py:Model", "transport": "os:system"}, Forbidden, "transport"),
        (keys("two.py:Model", batching={"policy": "os:system"}), Forbidden, "policy"),
        (keys("two.py"), BadRequest, "expected for instance app.py:Model"),
        (keys("two.py:Model.x"), BadRequest, "without dots"),
        (keys("two.py:\0"), BadRequest, "expected for instance app.py:Model"),
        (keys("four.py:Model"), BadRequest, "no such file"),
        (keys("notes.txt/:Model"), BadRequest, "no such file"),
        (keys("os:system"), Forbidden, "neither"),
        (keys("app.py:Slow"), BadRequest, "no such file"),  # of the configured file, but not what is configured
        (keys("../app.py:Slow"), Forbidden, "neither"),
        (keys("out.py:Model"), Forbidden, "neither"),
        (keys("/etc/passwd.py:x"), Forbidden, "neither"),
        (keys("https://example.com/m.py:Model"), Forbidden, "URLs"),
        (keys("https://example.com/m.onnx"), Forbidden, "URLs"),
        (keys("four.onnx"), BadRequest, "no such file"),
        (keys("out.onnx"), Forbidden, "neither"),
        (keys("../net.onnx"), Forbidden, "neither"),
        (keys("/etc/net.pt"), Forbidden, "neither"),
        (keys("two.py:Model", weights="/etc/net.pt"), Forbidden, "weights"),
        (keys("two.py:Model", options={"model": "/etc"}), Forbidden, "options"),
        (keys("two.py:Model", labels={"y": "/etc/passwd"}), Forbidden, "labels"),
        (keys("net.onnx", inputs={"x": "FP99[-1]"}), BadRequest, "inputs.x: found 'FP99"),
        (keys("net.onnx"), LoadFailed, "could not be loaded"),
    ],
)
async def test_a_forbidden_target_is_refused(
    manage: Management, folder: Path, body: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        await manage.put("m", "2", body)
    assert str(folder) not in str(caught.value)
    assert shown(manage) == [("1", "READY")]


@pytest.mark.parametrize("target", ["app.py:Model", "{}/app.py:Model", "in.py:Model", "deep/three.py:Model"])
async def test_targets_from_the_configuration_or_the_store_can_be_loaded(
    manage: Management, engine: Engine, folder: Path, target: str
) -> None:
    await manage.put("m", "2", keys(target.format(folder)))
    expected = {"app": "one", "in.": "two", "dee": "three"}[target.removeprefix("{}/")[:3]]
    assert await engine.infer("m", 0, version="2") == expected
    trust = engine.handle("m", "2").config.trust
    assert trust == ("pickle" if expected == "one" else "none"), "what only the configuration may say stays"


async def test_of_two_sections_with_one_target_the_models_own_applies(manage: Management, folder: Path) -> None:
    target = f"{folder}/app.py:Model"
    sections = {
        "first": ModelConfig(target=target, env={"A": "first"}),
        "m": ModelConfig(target=target, env={"A": "m"}, trust="pickle"),
        "m_next": ModelConfig(target=target, name="m", version="2", env={"A": "m 2"}),
    }
    targets = AllowedTargets(Config(models=sections))
    for model, version, env in (("m", "1", "m"), ("m", "2", "m 2"), ("m", "3", "m"), ("new", "1", "first")):
        assert targets.resolve("app.py:Model", model, version) == (target, sections_of(sections, env))


def test_files_of_pipelines_are_found_as_model_files_are(config: Config, folder: Path) -> None:
    (folder / "store" / "resnet.toml").write_text("")
    section = ModelConfig(target=str(folder / "net.toml"))
    targets = AllowedTargets(structs.replace(config, models={"n": section}))
    assert targets.resolve("resnet.toml", "m", "1") == (str(folder / "store" / "resnet.toml"), None)
    assert targets.resolve("net.toml", "m", "1") == (section.target, section)
    with pytest.raises(Forbidden):
        targets.resolve(str(folder / "other.toml"), "m", "1")


def test_model_files_must_be_configured_or_in_the_store(config: Config, folder: Path) -> None:
    (folder / "net.pt").write_text("")
    section = ModelConfig(target=f"{folder}/net.pt")
    targets = AllowedTargets(structs.replace(config, models={"n": section}))
    assert targets.resolve("net.onnx", "m", "1") == (str(folder / "store" / "net.onnx"), None)
    for target in ("net.pt", str(folder / "net.pt"), str(folder / "store" / ".." / "net.pt")):
        assert targets.resolve(target, "m", "1") == (section.target, section)


def sections_of(sections: dict[str, ModelConfig], env: str) -> ModelConfig:
    return next(s for s in sections.values() if s.env == {"A": env})


async def test_the_number_of_versions_is_bounded(engine: Engine, config: Config) -> None:
    few = Engine(LimitsConfig(max_versions=2))
    manage = Management(few, config)
    manage.started = True
    async with few:
        await manage.put("m", "1", keys("two.py:Model"))
        await manage.put("n", "1", keys("two.py:Model"))
        await manage.put("m", "1", keys("deep/three.py:Model"))  # a swap is no more
        with pytest.raises(Conflict, match=r"2 versions are loaded, the maximum of limits.max_versions"):
            await manage.put("m", "2", keys("two.py:Model"))
        await manage.unload("n", None)
        await manage.put("m", "2", keys("two.py:Model"))


async def test_an_error_in_a_change_without_a_caller_is_logged(
    manage: Management, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "set_default", lambda model, version: 1 / 0)
    leaving = asyncio.ensure_future(manage.set_default("m", "1"))
    await asyncio.sleep(0)
    leaving.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert "change_failed error=ZeroDivisionError" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("version", ["scale", "default", "traffic", "a/b", "", "v" * 129, "-1"])
async def test_a_version_that_cannot_be_in_a_path_is_refused(manage: Management, version: str) -> None:
    with pytest.raises(BadRequest, match="version"):
        await manage.put("m", None, keys("two.py:Model", version=version))


@pytest.mark.parametrize("model", ["a b", "", "../m", "x" * 129])
async def test_a_name_that_no_model_can_have_is_refused(manage: Management, model: str) -> None:
    with pytest.raises(BadRequest, match="is not a valid model name"):
        await manage.put(model, None, keys("two.py:Model"))


async def test_changes_of_unknown_models_are_not_found(manage: Management) -> None:
    for change in (
        manage.unload("m", "9"),
        manage.unload("n", None),
        manage.scale("m", "9", 2),
        manage.set_default("m", "9"),
        manage.set_traffic("n", {"1": 1.0}),
    ):
        with pytest.raises(ModelNotFound):
            await change
    with pytest.raises(ModelNotFound, match="version '9' of model"):
        await manage.set_traffic("m", {"9": 1.0})
    with pytest.raises(BadRequest, match="add up to"):
        await manage.set_traffic("m", {"1": 0.5})


# ---- reload


async def test_a_reload_keeps_what_was_put_and_scaled_unless_its_section_has_changed(
    manage: Management, engine: Engine, config: Config, folder: Path
) -> None:
    await manage.scale("m", None, 3)
    assert await manage.reload(config.models) == {}
    os.utime(folder / "app.py")
    assert await manage.reload(config.models) == {("m", "1"): None}
    assert only(manage).ready_instances == 3
    await manage.put("m", "1", keys("two.py:Model", instances=2))
    assert await manage.reload(config.models) == {}
    assert await engine.infer("m", 0) == "two"
    broken = {"m": structs.replace(config.models["m"], target=f"{folder}/app.py:Broken")}
    for _ in range(2):  # until it loads
        found = await manage.reload(broken)
        assert type(found["m", "1"]) is LoadFailed
    assert (await engine.infer("m", 0), only(manage).ready_instances) == ("two", 2)
    changed = {"m": structs.replace(config.models["m"], load_timeout_s=100.0)}
    assert await manage.reload(changed) == {("m", "1"): None}
    assert (await engine.infer("m", 0), only(manage).ready_instances) == ("one", 1)
    assert await manage.reload(changed) == {}


async def test_a_reload_begins_with_the_instances_that_the_load_needed(config: Config, folder: Path) -> None:
    model = structs.replace(config.models["m"], autoscale=AutoscaleConfig(max=4))
    async with Engine(config.limits) as engine:
        await engine.load("m", model)
        manage = Management(engine, config)
        engine.handle("m", None).instances.follow(3, 5.0)
        assert only(manage).instances == 3
        os.utime(folder / "app.py")
        assert await manage.reload({"m": model}) == {("m", "1"): None}
        assert engine.handle("m", None).instances.full == 3
