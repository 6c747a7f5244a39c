"""A unit test of a handler runs with TorchServe's packages and with Penstock's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

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


def test_a_unit_test_of_a_handler_prints_the_same(program: Any, tmp_path: Path) -> None:
    printed = {}
    for owner in ("torchserve", "penstock"):
        folder = tmp_path / owner
        folder.mkdir()
        (folder / "handler.py").write_text("def handle(data, context): ...")
        mine = os.pathsep.join([str(COMPAT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": mine if owner == "penstock" else ""}
        command = [program(owner, "python"), "-c", SCRIPT]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed[owner] = done.stdout
    assert printed["penstock"] == printed["torchserve"]
