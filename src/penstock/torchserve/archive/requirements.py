"""Installs the packages in a model's requirements file, for this model only."""

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

from penstock.torchserve.archive import InstallFailed

log = logging.getLogger("penstock.torchserve")

TIMEOUT_S: Final = 1800.0  # torch and its libraries are 3 GB
MARK: Final = ".penstock-requirements"  # records the installed requirements, which a restart skips
MAX_OUTPUT_CHARS: Final = 4000  # pip's output in errors and logs


def install_requirements(
    file: Path, folder: Path, *, model: str, venv: bool = False, timeout_s: float = TIMEOUT_S
) -> Path:
    """Installs the packages that `file` lists and returns the folder to put on the workers' PYTHONPATH.

    The packages go into `folder`, or with `venv` into `folder`/venv, which inherits the packages of this Python.
    Requirements that are already installed there are skipped. Blocks; call once at a time per folder. Raises
    InstallFailed.
    """
    failed = f"Custom pip package installation failed for model {model}"
    try:
        wanted = f"{hashlib.sha256(file.read_bytes()).hexdigest()} {sys.version}"
    except OSError as e:
        raise InstallFailed(failed, detail=f"{file.name} cannot be read: {e.strerror}") from None
    packages = folder / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    target = packages if venv else folder
    mark = target / MARK
    if mark.is_file() and mark.read_text() == wanted:
        return target
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if venv:
            _create_venv(folder / "venv", packages)
            python, options = str(folder / "venv" / "bin" / "python"), ["--upgrade-strategy", "only-if-needed"]
        else:
            python, options = sys.executable, ["-t", str(folder)]
        _run_pip([python, "-m", "pip", "install", "-U", *options, "-r", str(file)], file.parent, timeout_s)
    except (OSError, subprocess.SubprocessError) as e:
        output = str(getattr(e, "stdout", None) or e)[-MAX_OUTPUT_CHARS:]
        log.warning("model=%s requirements were not installed: %s", model, output)
        raise InstallFailed(failed, detail=output) from None
    mark.write_text(wanted)
    return target


def _run_pip(command: list[str], cwd: Path, timeout_s: float) -> None:
    """Runs pip; kills it with all its children on timeout. Raises SubprocessError, OSError."""
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
            output, _ = pip.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(pip.pid, signal.SIGKILL)
            raise
    if pip.returncode:
        raise subprocess.CalledProcessError(pip.returncode, command, output)


def _create_venv(folder: Path, packages: Path) -> None:
    """A new virtual environment whose imports fall back to the packages of this Python."""
    virtual.create(folder, clear=True, with_pip=True)
    inherited = [path for path in [*site.getsitepackages(), site.getusersitepackages()] if os.path.isdir(path)]
    (packages / "inherited.pth").write_text("".join(f"{path}\n" for path in inherited))
