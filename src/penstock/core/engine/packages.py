"""Packages of one model: its requirements file, and the interpreter of its workers."""

# Two models may need different versions of a package, so a model's packages are installed where only its workers look.
# With `requirements` they go into a folder of the user's cache, which is named by what was asked: the contents of the
# file and of those it names, and this Python. So servers and versions that ask for the same share one installation, a
# restart installs nothing, and a changed file never touches the packages of a running model. A lock on the folder keeps
# two processes from installing at once; the mark is written last, so an installation that was cut off begins again.
# With `python` the workers run in another environment, which must have this version of Penstock.

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import re
import signal
import site
import subprocess
import sys
import venv as virtual
from pathlib import Path
from typing import Final

from penstock._version import __version__
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import LoadFailed

log = logging.getLogger("penstock.engine")

INSTALL_TIMEOUT_S: Final = 1800.0  # torch and its libraries are 3 GB
ASK_TIMEOUT_S: Final = 60.0
MARK: Final = ".penstock-requirements"  # records the installed requirements, which a restart skips
MAX_OUTPUT_CHARS: Final = 4000  # pip's output in errors and logs
_NAMED: Final = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)[ =]*(\S+)", re.M)


async def provide(spec: WorkerSpec) -> None:
    """Sees to the packages of a model before its workers start. Raises LoadFailed."""
    config = spec.config
    if config.python is not None:
        await asyncio.to_thread(_check_python, spec.name, config.python)
    if config.requirements is not None:
        folder = await asyncio.to_thread(_installed, spec.name, Path(config.requirements), config.python)
        spec.sys_path.insert(0, str(folder))


def _check_python(model: str, python: str) -> None:
    """Raises LoadFailed for an interpreter that cannot run a worker."""
    command = [python, "-P", "-c", "import penstock; print(penstock.__version__)"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, env=environment)
    except (OSError, subprocess.SubprocessError) as e:
        why = getattr(e, "strerror", None) or "it does not answer"
        raise LoadFailed(f"model '{model}': python: {python} cannot be run: {why}; give the path of a Python") from None
    version = found.stdout.strip()
    if found.returncode or version != __version__:
        has = f"Penstock {version}" if not found.returncode else "no Penstock"
        text = f"model '{model}': python: {python} has {has}, expected {__version__}, as in the server"
        raise LoadFailed(f"{text}: {python} -m pip install penstock=={__version__}", detail=found.stderr)


def _installed(model: str, file: Path, python: str | None) -> Path:
    """The folder with the packages of a requirements file."""
    wanted = hashlib.sha256(f"{python} {sys.version}".encode())
    _digest(wanted, file, set())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "penstock" / "packages" / wanted.hexdigest()[:32]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return install_requirements(file, folder, model=model, python=python)
    except OSError as e:
        raise LoadFailed(f"model '{model}': its packages cannot be kept in {folder}: {e.strerror}") from None


def _digest(wanted: hashlib._Hash, file: Path, seen: set[str]) -> None:
    """Adds a requirements file, and the files that it names, each once; a missing one is left to pip."""
    if (path := os.path.realpath(file)) in seen:
        return
    seen.add(path)
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return
    wanted.update(text.encode())
    for name in _NAMED.findall(text):
        _digest(wanted, file.parent / name, seen)


def install_requirements(
    file: Path,
    folder: Path,
    *,
    model: str,
    venv: bool = False,
    python: str | None = None,
    timeout_s: float = INSTALL_TIMEOUT_S,
) -> Path:
    """Installs the packages that `file` lists and returns the folder to put on the workers' PYTHONPATH.

    The packages go into `folder`, or with `venv` into `folder`/venv, which inherits the packages of this Python.
    `python`: the interpreter that they are for, by default this one. Requirements that are already installed there are
    skipped. Blocks; call once at a time per folder. Raises LoadFailed with pip's output as its detail.
    """
    failed = f"the packages of model '{model}' were not installed"
    try:
        wanted = f"{hashlib.sha256(file.read_bytes()).hexdigest()} {sys.version}"
    except OSError as e:
        raise LoadFailed(f"{failed}: {file.name} cannot be read: {e.strerror}", detail=str(file)) from None
    packages = folder / "venv" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    target = packages if venv else folder
    mark = target / MARK
    if mark.is_file() and mark.read_text() == wanted:
        return target
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if venv:
            _create_venv(folder / "venv", packages)
            pip, options = str(folder / "venv" / "bin" / "python"), ["--upgrade-strategy", "only-if-needed"]
        else:
            pip, options = python or sys.executable, ["-t", str(folder)]
        _run_pip([pip, "-m", "pip", "install", "-U", *options, "-r", str(file.absolute())], file.parent, timeout_s)
    except (OSError, subprocess.SubprocessError) as e:
        output = str(getattr(e, "stdout", None) or e)[-MAX_OUTPUT_CHARS:]
        log.warning("model=%s requirements were not installed: %s", model, output)
        last = output.strip().rpartition("\n")[2]
        raise LoadFailed(f"{failed}: {last}", detail=output) from None
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
