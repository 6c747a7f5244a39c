"""Models with packages, or an interpreter, of their own."""

import json
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import Engine, ModelConfig
from penstock.config.checks import check_model
from penstock.errors import ConfigError, LoadFailed
from support.archives import write_wheel

APP = """
import sys


def version(items):
    import penstock_tiny
    return [penstock_tiny.VERSION for _ in items]


def python(items):
    return [sys.prefix for _ in items]


def both(items):
    import penstock_tiny
    return [[sys.prefix, penstock_tiny.VERSION] for _ in items]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "wheels").mkdir()
    for version in ("1.0", "2.0"):
        write_wheel(tmp_path / "wheels", version)
        (tmp_path / f"v{version[0]}.txt").write_text(f"--no-index\n--find-links wheels\npenstock_tiny == {version}\n")
    return tmp_path


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of an environment that has Penstock, as after `pip install penstock`."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    lib = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    paths = [path for path in sys.path if path.endswith(("site-packages", "src"))]
    (lib / "penstock_of_the_test.pth").write_text("".join(f"{path}\n" for path in paths))
    return folder / "bin" / "python"


def test_two_models_have_two_versions_of_a_package(serve: Callable[..., Any], folder: Path) -> None:
    (folder / "penstock.toml").write_text(
        '[models.one]\ntarget = "app.py:version"\nrequirements = "v1.txt"\n'
        '[models.two]\ntarget = "app.py:version"\nrequirements = "v2.txt"\n'
    )
    for _ in range(2):  # a second server finds both in the cache
        server = serve(None, "penstock.toml", cwd=folder)
        found = [server.post(f"/predictions/{name}", b"1")[1].decode() for name in ("one", "two")]
        assert found == ["1.0", "2.0"]
        for wheel in (folder / "wheels").iterdir():
            wheel.unlink()


def test_a_model_has_its_own_interpreter_and_packages(
    serve: Callable[..., Any], folder: Path, other_python: Path
) -> None:
    (folder / "penstock.toml").write_text(
        f'[models.own]\ntarget = "app.py:both"\npython = "{other_python}"\nrequirements = "v1.txt"\n'
        '[models.servers]\ntarget = "app.py:python"\n'
    )
    server = serve(None, "penstock.toml", cwd=folder)
    assert json.loads(server.post("/predictions/own", b"1")[1]) == [str(other_python.parents[1]), "1.0"]
    assert server.post("/predictions/servers", b"1")[1].decode() == sys.prefix


async def refused(**keys: Any) -> LoadFailed:
    async with Engine() as engine:
        with pytest.raises(LoadFailed) as e:
            await engine.load("m", ModelConfig(target="app.py:version", **keys))
    return e.value


async def test_what_cannot_be_provided_is_said(folder: Path, tmp_path: Path) -> None:
    (folder / "no.txt").write_text("--no-index\nno-such-package-of-penstock\n")
    error = await refused(requirements=str(folder / "no.txt"))
    assert "the packages of model 'm' were not installed: ERROR: No matching distribution" in error.message
    assert "no-such-package-of-penstock" in error.detail
    (folder / "round.txt").write_text("-r no.txt\n-r round.txt\n")
    assert (
        "the packages of model 'm' were not installed"
        in (await refused(requirements=str(folder / "round.txt"))).message
    )
    error = await refused(requirements=str(folder / "missing.txt"))
    assert "missing.txt cannot be read: No such file" in error.message
    error = await refused(python="/no/such/python")
    assert "/no/such/python cannot be run: No such file" in error.message
    bare = tmp_path / "bare"
    venv.create(bare)
    error = await refused(python=str(bare / "bin" / "python"))
    assert "has no Penstock, expected" in error.message
    assert "-m pip install penstock==" in error.message


@pytest.mark.parametrize("key", ["requirements", "python"])
@pytest.mark.parametrize("transport", ["thread", "inline", "ray"])
def test_only_worker_processes_have_them(key: str, transport: Any) -> None:
    config = ModelConfig(target="app.py:f", transport=transport, **{key: "x"})
    with pytest.raises(ConfigError, match=f"{key}: found x, but the {transport} transport has no worker process"):
        check_model(config, "m: ")
