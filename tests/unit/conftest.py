"""Fixtures that several packages' tests share."""

import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.core import os_threads
from penstock.core.contracts import BatchRecord, HttpSnapshot, ListenerSnapshot, ModelSnapshot, ServerSnapshot
from penstock.errors import ItemFailed
from penstock.serving.observe.prometheus import PrometheusObserver
from penstock.types import ModelStatus
from support.waiting import until


@pytest.fixture(autouse=True)
def no_cpu_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count the cores of the machine, also in a container."""
    monkeypatch.setattr(os_threads, "cpu_quota", lambda root: math.inf)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], object]], Any]:
    return until


@pytest.fixture
def own_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Undoes what a handler's worker does to its process: cwd, path, environment, modules."""
    cwd, path, env, finders = os.getcwd(), list(sys.path), dict(os.environ), list(sys.meta_path)
    modules = set(sys.modules)
    yield
    os.chdir(cwd)
    sys.path[:], sys.meta_path[:] = path, finders
    os.environ.clear()
    os.environ.update(env)
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if name == "ts" or name.startswith("ts.") or file.startswith(str(tmp_path_factory.getbasetemp())):
            del sys.modules[name]


@pytest.fixture
def make_handler(tmp_path: Path, own_process: None) -> Callable[..., Any]:
    """`make_handler("def handle(data, context): ...")` writes the handler's file and makes the model of it."""

    import msgspec

    from penstock.torchserve.handlers.handler import HandlerModel, HandlerSetup

    def make(source: str, *, handler: str = "my_handler.py", load: bool = True, **setup: Any) -> HandlerModel:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "my_handler.py").write_text(textwrap.dedent(source))
        setup = {"model_name": "m", "model_dir": str(folder), "handler": handler, **setup}
        model = HandlerModel(None, setup=msgspec.to_builtins(msgspec.convert(setup, HandlerSetup)))
        if load:
            model.load("cpu")
        return model

    return make


# ---- metrics

TOLD = {
    "ready": True,
    "fitted": True,
    "a_s": 0.005,
    "b_s": 0.0002,
    "held_s": 1.5,
    "sent_tokens": 1000,
    "padded_tokens": 50,
    "holds_by_kind": {"stagger": 2, "regroup": 3},
}


@pytest.fixture
def record() -> Callable[..., BatchRecord]:
    def make(rows: int = 5, seconds: float = 0.2, model: str = "m", version: str = "1", **more: object) -> BatchRecord:
        fields = {
            "slot": 0,
            "rows": rows,
            "max_batch_size": 64,
            "reason": "full",
            "ahead": False,
            "run_s": seconds,
            "seconds": seconds,
            "waits_s": [0.0] * rows,
            "failed": 0,
        }
        return BatchRecord(model=model, version=version, **{**fields, **more})  # type: ignore[arg-type]

    return make


@pytest.fixture
def reading() -> Callable[..., ServerSnapshot]:
    """One READY model whose worker is this process, and one listener."""

    def make(model: str = "m", version: str = "1", http: bool = True, **more: object) -> ServerSnapshot:
        status = ModelStatus(model, version, "READY", 2, 1, 64, ("cpu",), queue=3)
        fields = {"scheduler": TOLD, "pids": {0: os.getpid()}, "in_flight": 7, "queue_rows": 5, "queue_bytes": 50}
        fields |= {"resident": {"evictions": 2}, "helpers": 2}
        one = ModelSnapshot(status, **{**fields, "max_queue_rows": 100, **more})  # type: ignore[arg-type]
        listener = HttpSnapshot(9, 1, {2: 10, 4: 3}) if http else None
        return ServerSnapshot(
            [one], 4096, 8192, listener, [("cpu", 100, 60)], {"http": ListenerSnapshot(10, {"queue_full": 1})}
        )

    return make


@pytest.fixture
def busy(
    record: Callable[..., BatchRecord], reading: Callable[..., ServerSnapshot]
) -> Callable[..., PrometheusObserver]:
    """An observer with at least one event of every kind."""

    def make(model: str = "m", version: str = "1", reason: str = "queue_full") -> PrometheusObserver:
        observer = PrometheusObserver(lambda: reading(model, version))
        for _ in range(6):
            observer.on_arrival(model, version)
        observer.on_answer(model, version, [0.2] * 5, 1)
        observer.on_complete(record(model=model, version=version, ahead=True))
        observer.on_reject(model, version, reason)
        observer.on_error(model, version, ItemFailed("no"))
        for state in ("ready", "died", "ready"):
            observer.on_worker(model, version, 0, state)
        return observer

    return make


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """nvidia-ml-py, with one GPU."""
    nvml, energy_mj = ModuleType("pynvml"), count(7_000, 500)
    nvml.nvmlInit = lambda: None  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetCount = lambda: 1  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetHandleByIndex = lambda i: i  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetName = lambda handle: b"Card 9000"  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=25)  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetUUID = lambda handle: "GPU-9a"  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 20_085  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetPowerManagementLimit = lambda handle: 60_000  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: next(energy_mj)  # type: ignore[attr-defined]
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=3, total=8)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml
