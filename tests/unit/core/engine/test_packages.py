import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.core.engine.packages import MARK, install_requirements
from penstock.errors import LoadFailed
from support.archives import write_wheel
from support.waiting import wait_for


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder whose requirements name a package that is a file beside it: no network is needed."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "requirements.txt").write_text(f"{write_wheel(tmp_path)}\n")
    return folder


def imported(path: Path, statement: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(path)}
    found = subprocess.run([sys.executable, "-c", statement], env=env, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_packages_are_installed_into_the_models_folder_once(model: Path, monkeypatch: pytest.MonkeyPatch):
    (model / MARK).write_text("of other requirements")
    assert install_requirements(model / "requirements.txt", model, model="m") == model
    assert imported(model, "import penstock_tiny; print(penstock_tiny.NAME)") == "tiny"
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("installed again"))
    assert install_requirements(model / "requirements.txt", model, model="m") == model


def test_a_venv_inherits_the_packages_of_this_python(model: Path):
    packages = install_requirements(model / "requirements.txt", model, model="m", venv=True)
    assert packages.is_relative_to(model / "venv")
    assert imported(packages, "import penstock_tiny; print(penstock_tiny.__file__)").startswith(str(packages))
    python = model / "venv" / "bin" / "python"
    subprocess.run([python, "-c", "import msgspec, penstock_tiny"], check=True)


def test_a_failure_has_the_last_line_of_pips_output(model: Path, caplog: pytest.LogCaptureFixture):
    (model / "requirements.txt").write_text("/nono/nothing-1.0-py3-none-any.whl\n")
    with pytest.raises(LoadFailed, match=r"^the packages of model 'm' were not installed: ERROR: ") as e:
        install_requirements(model / "requirements.txt", model, model="m")
    assert "nothing-1.0" in e.value.detail
    assert "model=m" in caplog.text
    assert not (model / MARK).exists()


def test_a_missing_requirements_file_is_a_failure(model: Path):
    with pytest.raises(LoadFailed) as e:
        install_requirements(model / "nono.txt", model, model="m")
    assert "nono.txt cannot be read" in e.value.message


def test_a_timeout_kills_pip_and_its_children(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nsleep 600 & echo $! > child\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    with pytest.raises(LoadFailed) as e:
        install_requirements(model / "requirements.txt", model, model="m", timeout_s=1.0)
    assert "timed out" in e.value.detail
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((model / "child").read_text()))
        wait_for(lambda: child.status() == psutil.STATUS_ZOMBIE, 10)  # killed, but perhaps not yet gone
