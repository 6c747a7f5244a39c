"""TorchServe's Python packages outside a server, as compat/torchserve installs them."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHIM = ROOT / "compat" / "torchserve"
HANDLER = """
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException

class Upper(BaseHandler):
    def initialize(self, context):
        context.metrics.add_counter("Loads", 1)
        self.initialized = True

    def handle(self, data, context):
        if not data[0]["body"]:
            raise PredictionException("empty", 400)
        return [bytes(row["body"]).upper() for row in data]
"""
UNIT_TEST = """
import pytest
import ts
from handler import Upper
from model_archiver import ModelArchiver, ModelArchiverConfig
from model_archiver.model_archiver_error import ModelArchiverError
from ts.context import Context
from ts.metrics.metrics_store import MetricsStore
from ts.service import Service
from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext
from ts.utils.util import PredictionException


def test_the_handler_answers():
    handler = Upper()
    handler.initialize(MockContext(model_dir="."))
    assert handler.handle([{"body": b"a"}], None) == [b"A"]
    with pytest.raises(PredictionException):
        handler.handle([{"body": b""}], None)


def test_the_context_has_torchserves_metrics():
    context = Context("m", ".", {}, 1, None, ts.__version__, metrics=MetricsStore(["id"], "m"))
    Upper().initialize(context)
    assert [metric.name for metric in context.metrics.store] == ["Loads"]
    assert Service(context, Upper().handle).context is context


def test_an_archive_is_written_from_python(tmp_path):
    config = ModelArchiverConfig("m", "handler.py", "1.0", export_path=str(tmp_path))
    ModelArchiver.generate_model_archive(config)
    assert (tmp_path / "m.mar").is_file()
    with pytest.raises(ModelArchiverError, match="already exists"):
        ModelArchiver.generate_model_archive(config)
"""
LAUNCHER = """
import sys
from ts import launcher

lines = launcher.start(model_store=".", snapshot_file="config.properties", no_config_snapshots=True,
                       disable_token=True, models="m.mar", enable_model_api=True)
launcher.stop()
printed = []
while (line := lines.get(timeout=60)) is not None:
    printed.append(line.strip())
assert "Torchserve stopped." in printed, printed
print("the end")
"""


def environment(**more: str) -> dict[str, str]:
    """The environment of a program for which compat/torchserve is installed."""
    path = os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", ""), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": path, **more}


def test_unit_tests_of_handlers_run(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(HANDLER)
    (tmp_path / "test_handler.py").write_text(UNIT_TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "test_handler.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_every_package_is_in_the_distribution() -> None:
    project = tomllib.loads((SHIM / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(packages) == sorted(path.parent.name for path in SHIM.glob("*/__init__.py"))


def test_the_launcher_starts_and_stops_a_server(torchserve: Any) -> None:
    folder: Path = torchserve.folder
    torchserve.add_model("from ts.launcher import stop\n" + HANDLER)
    (folder / "store" / "m.mar").rename(folder / "m.mar")
    torchserve.configure(model_store=".", default_workers_per_model="1")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**torchserve.env, **environment(PATH=path, TMPDIR=torchserve.env["TMPDIR"])}
    done = subprocess.run([sys.executable, "-c", LAUNCHER], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the end\n")
    assert "loaded model=m version=1.0 workers=1" in done.stdout
