import asyncio
import json
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ArchiveError, LoadFailed
from penstock.torchserve.admin.archives import mar_name, read_yaml, run_in_thread
from penstock.torchserve.archive import ArchiveExists, DownloadFailed
from penstock.torchserve.archive.store import ModelStore
from penstock.torchserve.protocol.api import ApiError, RegisterRequest
from support.archives import write_wheel

ServerSetup = Any  # see conftest.py
Refused = Callable[[pytest.ExceptionInfo[ApiError]], tuple[int, str, str]]


def with_requirements(server: ServerSetup) -> str:
    model = {"modelName": "m", "modelVersion": "1.0", "handler": "service.py", "requirementsFile": "requirements.txt"}
    with zipfile.ZipFile(server.store / "m.mar", "w") as mar:
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": model}))
        mar.writestr("service.py", "def handle(data, context): ...")
        mar.writestr("requirements.txt", "some-package")
    return "m.mar"


class Installs:
    """What was asked of pip; `fails` makes it fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bool]] = []
        self.fails = False

    def __call__(self, file: Path, folder: Path, *, model: str, venv: bool) -> Path:
        assert file.read_text() == "some-package"
        self.asked.append((file.name, model, venv))
        if self.fails:
            raise LoadFailed(f"the packages of model '{model}' were not installed", detail="why")
        return folder


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Installs:
    installs = Installs()
    monkeypatch.setattr("penstock.torchserve.admin.archives.install_requirements", installs)
    return installs


async def test_packages_are_installed_if_enabled(server: ServerSetup, installs: Installs) -> None:
    admin = server.open(install_py_dep_per_model=True).administrator
    await admin.register(RegisterRequest(url=with_requirements(server)))
    assert installs.asked == [("requirements.txt", "m", False)]
    server.archive("n")
    await admin.register(RegisterRequest(url="n.mar"))
    assert len(installs.asked) == 1


async def test_packages_of_a_folder_in_the_store_are_installed_elsewhere(server: ServerSetup) -> None:
    folder = server.store / "m"
    (folder / "MAR-INF").mkdir(parents=True)
    model = {"modelName": "m", "modelVersion": "1.0", "handler": "service.py", "requirementsFile": "requirements.txt"}
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": {**model, "configFile": "c.yaml"}}))
    (folder / "c.yaml").write_text("useVenv: true")
    (folder / "requirements.txt").write_text(f"{write_wheel(server.folder)}\n")
    (folder / "helper.py").write_text("from penstock_tiny import NAME")
    code = "import helper\ndef handle(data, context):\n    return data and [helper.NAME for _ in data]\n"
    (folder / "service.py").write_text(code)
    before = sorted(server.store.rglob("*"))
    for _ in range(2):  # the second time, nothing is installed
        admin = server.open(install_py_dep_per_model=True).administrator
        await admin.register(RegisterRequest(url="m", initial_workers=1))
        assert await server.ask("m") == "tiny"
        await server.close()
    assert sorted(server.store.rglob("*")) == before


async def test_packages_are_not_installed_by_default(server: ServerSetup, installs: Installs) -> None:
    await server.open().administrator.register(RegisterRequest(url=with_requirements(server)))
    assert installs.asked == []


async def test_a_model_whose_packages_cannot_be_installed_is_not_registered(
    server: ServerSetup, installs: Installs, refused: Refused
) -> None:
    admin = server.open(install_py_dep_per_model=True).administrator
    installs.fails = True
    with pytest.raises(ApiError) as found:
        await admin.register(RegisterRequest(url=with_requirements(server), initial_workers=1))
    assert refused(found) == (400, "ModelException", "Custom pip package installation failed for model m")
    assert admin.models() == []
    assert list((server.folder / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ArchiveExists("Model file already exists f.mar"), 500, "InternalServerException"),
        (DownloadFailed("Failed to download archive from: u"), 400, "DownloadArchiveException"),
        (ArchiveError("rule"), 400, "InvalidModelException"),
    ],
)
async def test_errors_of_the_store_have_torchserves_types(
    server: ServerSetup, refused: Refused, monkeypatch: pytest.MonkeyPatch, error: ArchiveError, status: int, kind: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ModelStore, "open", fail)
    with pytest.raises(ApiError) as found:
        await server.open().administrator.register(RegisterRequest(url="u"))
    assert refused(found) == (status, kind, error.message)


async def test_a_full_disk_is_reported_without_its_path(
    server: ServerSetup, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "/secret/path")

    monkeypatch.setattr(ModelStore, "open", fail)
    with pytest.raises(ApiError) as found:
        await server.open().administrator.register(RegisterRequest(url="m.mar"))
    assert refused(found) == (500, "InternalServerException", "Failed to save model: m.mar")


async def test_a_download_is_removed_with_its_model(server: ServerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(ModelStore, "forget", lambda _, url: forgotten.append(url))
    admin = server.open().administrator
    await admin.register(RegisterRequest(url=server.archive("m")))
    await admin.unregister("m", None)
    assert forgotten == ["m.mar"]
    await asyncio.sleep(0)


async def test_versions_with_build_numbers_are_served(server: ServerSetup) -> None:
    admin = server.open().administrator
    await admin.register(RegisterRequest(url=server.archive("m", "1.0+cu118"), initial_workers=1))
    assert await server.ask("m", "1.0+cu118") == "1.0+cu118 hi"


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("m.mar", "m.mar"),
        ("https://x/y/m.mar?token=1", "m.mar"),
        ("https://x/y/a%20b.mar", "a b.mar"),
        ("file:///y/m.mar", "m.mar"),
        ("/models/m/", "m"),
    ],
)
def test_snapshots_and_store_use_the_same_archive_name(url: str, name: str) -> None:
    assert mar_name(url) == name


def test_a_missing_yaml_is_reported(tmp_path: Path) -> None:
    assert read_yaml(tmp_path, "") == {}
    (tmp_path / "empty.yaml").write_text("# nothing")
    assert read_yaml(tmp_path, "empty.yaml") == {}
    with pytest.raises(ApiError, match="no such file"):
        read_yaml(tmp_path, "model-config.yaml")


async def test_shutdown_does_not_wait_for_an_opening_archive(
    server: ServerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.torchserve.admin.administrator.CLOSE_S", 0.05)
    begun, end = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        begun.set()
        end.wait()
        raise ArchiveError("too late")

    monkeypatch.setattr(ModelStore, "open", slow)
    register = asyncio.create_task(server.open().administrator.register(RegisterRequest(url="m.mar")))
    await server.until(begun.is_set)
    async with asyncio.timeout(5):
        await server.close()
        with pytest.raises(asyncio.CancelledError):
            await register
    end.set()


# ---- work on threads


async def test_the_loop_keeps_running_during_the_work() -> None:
    seen = threading.Event()

    def work() -> str:
        assert seen.wait(10)
        return threading.current_thread().name

    task = asyncio.create_task(run_in_thread(work))
    await asyncio.sleep(0)
    seen.set()
    assert await task == "penstock-archives"


async def test_an_error_of_the_work_is_raised() -> None:
    def work() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        await run_in_thread(work)


async def test_the_caller_can_be_cancelled() -> None:
    begun, end, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(10)
        done.set()

    task = asyncio.create_task(run_in_thread(work))
    while not begun.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    end.set()
    assert done.wait(10)
    await asyncio.sleep(0.01)  # what the thread posts finds nobody


def test_a_loop_closed_during_the_work_is_harmless() -> None:
    end, ended = threading.Event(), threading.Event()

    async def run() -> None:
        task = asyncio.create_task(run_in_thread(lambda: (end.wait(10), ended.set())))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(run())
    end.set()
    assert ended.wait(10)
