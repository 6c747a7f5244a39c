"""Installs the packages that a model's requirements file names, for that model alone."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import site
import subprocess
import sys
import venv as virtual
from pathlib import Path
from typing import Final

from penstock.torchserve.archive.errors import InstallFailed

log = logging.getLogger("penstock.archive")

TIMEOUT_S: Final = 1800.0  # torch and its libraries are 3 GB
MARK: Final = ".penstock-requirements"  # what was installed beside it; so a second start installs nothing
MOST_SAID: Final = 4000  # characters of pip's words that are kept


def install_requirements(
    folder: Path, requirements: str, *, model: str, venv: bool = False, timeout_s: float = TIMEOUT_S
) -> Path:
    """The folder in which the packages of `folder`/`requirements` now are, to stand on the workers' PYTHONPATH.

    That is `folder` itself, or with `venv` the site-packages of `folder`/venv, where what this Python has is not
    installed again. Nothing is done if the same was installed there before. Raises InstallFailed. Blocks; one at a time
    for one folder.
    """
    failed = f"Custom pip package installation failed for model {model}"
    file = folder / requirements
    try:
        wanted = _wanted(file.read_bytes())
    except OSError as e:
        raise InstallFailed(failed, detail=f"{requirements} cannot be read: {e.strerror}") from None
    python, target = (_venv_python(folder), _venv_packages(folder)) if venv else (sys.executable, folder)
    mark = target / MARK
    if mark.is_file() and mark.read_text() == wanted:
        return target
    try:
        if venv:
            _make_venv(folder)
            how = ["--upgrade-strategy", "only-if-needed"]
        else:
            how = ["-t", str(folder)]
        _pip([str(python), "-m", "pip", "install", "-U", *how, "-r", str(file)], folder, timeout_s)
    except (OSError, subprocess.SubprocessError) as e:
        said = str(getattr(e, "stdout", None) or e)[-MOST_SAID:]
        log.warning("model=%s requirements were not installed: %s", model, said)
        raise InstallFailed(failed, detail=said) from None
    mark.write_text(wanted)
    return target


def _wanted(requirements: bytes) -> str:
    return f"{hashlib.sha256(requirements).hexdigest()} {sys.version}"


def _pip(command: list[str], cwd: Path, timeout_s: float) -> None:
    """Runs pip, and ends it with all its children after the time. Raises SubprocessError, OSError."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as pip:
        try:
            said, _ = pip.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(pip.pid, signal.SIGKILL)
            raise
    if pip.returncode:
        raise subprocess.CalledProcessError(pip.returncode, command, said)


def _venv_python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def _venv_packages(folder: Path) -> Path:
    return folder / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _make_venv(folder: Path) -> None:
    """A new virtual environment that sees the packages of this Python after its own."""
    virtual.create(folder / "venv", clear=True, with_pip=True)
    inherited = [path for path in [*site.getsitepackages(), site.getusersitepackages()] if os.path.isdir(path)]
    (_venv_packages(folder) / "inherited.pth").write_text("".join(f"{path}\n" for path in inherited))
