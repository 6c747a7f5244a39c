"""A subsystem can be deleted: without its folder and its lines in tables, everything else imports and passes its tests.

By default every remaining module is imported. `DELETION=full` also runs the remaining unit tests: about 30 minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUBSYSTEMS = {  # with what is built on them: their conformance checks, the demo's load generator, TorchPipe's dialect
    "streamer": ["streamer"],
    "pipeline": ["pipeline", "testing/ops.py", "torchpipe"],
    "bulk": ["bulk"],
    "perf": ["perf", "cli/demo"],
    "torchserve": ["torchserve"],
    "torchpipe": ["torchpipe"],
}
IMPORT_ALL = """
import importlib, pkgutil, sys, penstock
failed = []
for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
    try:
        importlib.import_module(module.name)
    except Exception as e:
        failed.append(f"{module.name}: {e!r}")
print(*failed, sep="\\n")
sys.exit(bool(failed))
"""


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("subsystem", SUBSYSTEMS)
def test_without_a_subsystem_everything_else_works(subsystem: str, tmp_path: Path) -> None:
    src = tmp_path / "src"
    shutil.copytree(ROOT / "src", src)  # with the compiled files
    deleted = SUBSYSTEMS[subsystem]
    for name in deleted:
        remove(src / "penstock" / name)
    for table in ("cli/main.py", "plugins.py", "__init__.py"):
        file = src / "penstock" / table
        names = "|".join(deleted)
        line = re.compile(rf"^.*penstock\.({names})\b.*\n", re.MULTILINE)
        file.write_text(line.sub("", file.read_text()))
    environment = {**os.environ, "PYTHONPATH": str(src)}
    found = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120
    )
    assert found.returncode == 0, found.stdout + found.stderr
    if os.environ.get("DELETION") == "full":
        tests = tmp_path / "tests"
        shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        for name in deleted:
            remove(tests / "unit" / name)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/unit"]
        subprocess.run(command, env=environment, cwd=tmp_path, check=True)
