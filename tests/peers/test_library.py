"""A unit test of a handler runs with TorchServe's packages and with Penstock's."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.archives import write_mar

pytestmark = pytest.mark.peer

COMPAT = Path(__file__).parents[2] / "compat" / "torchserve"
SCRIPT = """
import ts
import model_archiver.model_packaging
from model_archiver import ModelArchiver, ModelArchiverConfig
from model_archiver.manifest_components.manifest import RuntimeType
from model_archiver.model_archiver_error import ModelArchiverError
from ts import launcher
from ts.context import Context
from ts.metrics.metrics_store import MetricsStore
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext
from ts.utils.util import PredictionException


class Upper(BaseHandler):
    def initialize(self, context):
        context.metrics.add_counter("Loads", 1)

    def handle(self, data, context):
        return [bytes(row["body"]).upper() for row in data]


context = MockContext(model_dir=".")
handler = Upper()
handler.initialize(context)
print(ts.__version__, handler.handle([{"body": b"a"}], context), [str(m.value) for m in context.metrics.store])
context = Context("m", ".", {}, 1, None, "1", metrics=MetricsStore(["id"], "m"))
print(context.system_properties, callable(launcher.start), callable(launcher.register_model))
config = ModelArchiverConfig("m", "handler.py", "1.0", runtime=RuntimeType.PYTHON.value)
ModelArchiver.generate_model_archive(config)
try:
    model_archiver.model_packaging.generate_model_archive(config)
except ModelArchiverError:
    print("there already")
print(PredictionException("no", 400))
"""

LAUNCHED = """
import urllib.request
from ts import launcher

lines = launcher.start(
    model_store=".", snapshot_file="config.properties", no_config_snapshots=True, disable_token=True, models="m.mar"
)
with urllib.request.urlopen("http://127.0.0.1:PORT/predictions/m", b"a", timeout=60) as response:
    print("answer", response.read())
launcher.stop()
print("last item", [*iter(lines.get, None)][-1:] != [])
try:
    urllib.request.urlopen("http://127.0.0.1:PORT/ping", timeout=60)
except OSError:
    print("stopped")
"""


def run(program: Any, owner: str, folder: Path, script: str) -> str:
    """What a script prints with the packages of the owner."""
    mine = os.pathsep.join([str(COMPAT), os.environ.get("PYTHONPATH", "")])
    python = program(owner, "python")
    env = {
        **os.environ,
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": mine if owner == "penstock" else "",
        "TMPDIR": str(folder),
        "LOG_LOCATION": "logs",
    }
    done = subprocess.run([python, "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_launcher_starts_and_stops_a_server(program: Any, free_ports: Any, tmp_path: Path) -> None:
    for owner in ("torchserve", "penstock"):
        folder = tmp_path / owner
        write_mar(folder, "m", "def handle(data, context):\n    return data and ['ok' for _ in data]\n")
        ports = free_ports(5)
        names = ("inference_address", "management_address", "metrics_address")
        keys = {name: f"http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=False)}
        keys |= {"grpc_inference_port": str(ports[3]), "grpc_management_port": str(ports[4])}
        keys |= {"default_workers_per_model": "1", "disable_system_metrics": "true", "vmargs": "-Xmx512m"}
        (folder / "config.properties").write_text("".join(f"{key}={value}\n" for key, value in keys.items()))
        printed = run(program, owner, folder, LAUNCHED.replace("PORT", str(ports[0]))).splitlines()
        assert [line for line in printed if line.startswith("Model server started")], owner
        assert "answer b'ok'" in printed, owner
        assert printed[-1] == "stopped", owner


def test_a_unit_test_of_a_handler_prints_the_same(program: Any, tmp_path: Path) -> None:
    printed = {}
    for owner in ("torchserve", "penstock"):
        folder = tmp_path / owner
        folder.mkdir()
        (folder / "handler.py").write_text("def handle(data, context): ...")
        printed[owner] = run(program, owner, folder, SCRIPT)
    assert printed["penstock"] == printed["torchserve"]
