"""A subsystem can be deleted: without its folder and its lines in tables, everything else imports and passes its tests.

By default every remaining module is imported. `DELETION=full` also runs the remaining unit tests: about 30 minutes.
"""

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
    "pipeline": ["pipeline", "testing/ops.py", "torchpipe", "torchserve/workflow.py"],
    "bulk": ["bulk", "ray/captions.py"],
    "perf": ["perf", "cli/demo"],
    "ray": ["ray"],
    "torchserve": ["torchserve", "platforms/sagemaker.py", "platforms/sagemaker_handler.py"],
    "torchpipe": ["torchpipe"],
}
IMPORT_ALL = """
import importlib, os, pkgutil, sys
for name in ("cv2", "gevent", "grpc", "torch", "transformers"):
    try:
        importlib.import_module(name)  # once for all copies
    except ImportError:
        pass
for copy in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    sys.path.insert(0, copy)
    import penstock
    assert penstock.__file__.startswith(copy), penstock.__file__
    failed = []
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        try:
            importlib.import_module(module.name)
        except Exception as e:
            failed.append(f"{module.name}: {e!r}")
    with open(f"{copy}/failed", "w") as file:
        file.write("\\n".join(failed))
    os._exit(0)
"""


WITHOUT_TORCHPIPE = """
from penstock.errors import ConfigError
from penstock.pipeline.check import check
from penstock.pipeline.load import parse_graph

def graph(**keys):
    check(parse_graph({"a": {"ops": ["Identity"]} | keys}, name="t", folder="/"))

graph(ops=["DecodeMat", {"op": "ResizeMat", "resize_h": 2, "resize_w": 3}, "Copy[data_format:kept]"], max_batch=4)
for keys in ({"ops": ["S[Identity]"]}, {"ops": ["cp[a:b]"]}, {"filter": "HasKey"}, {"instance_num": 2}):
    try:
        graph(**keys)
    except ConfigError:
        continue
    raise AssertionError(f"without TorchPipe's package nothing knows {keys}")
"""


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sources without each subsystem; a file `failed` in each names the modules that cannot be imported."""
    found = {}
    for subsystem, deleted in SUBSYSTEMS.items():
        src = found[subsystem] = tmp_path_factory.mktemp(subsystem) / "src"
        shutil.copytree(ROOT / "src", src)  # with the compiled files
        for name in deleted:
            remove(src / "penstock" / name)
        for table in ("cli/main.py", "plugins.py", "__init__.py"):
            file = src / "penstock" / table
            names = "|".join(name.removesuffix(".py").replace("/", r"\.") for name in deleted)
            line = re.compile(rf"^.*penstock\.({names})\b.*\n", re.MULTILINE)
            file.write_text(line.sub("", file.read_text()))
    subprocess.run([sys.executable, "-c", IMPORT_ALL, *map(str, found.values())], check=True, cwd="/", timeout=300)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("subsystem", SUBSYSTEMS)
def test_without_a_subsystem_everything_else_works(subsystem: str, copies: dict[str, Path], tmp_path: Path) -> None:
    src = copies[subsystem]
    assert (src / "failed").read_text() == ""
    if os.environ.get("DELETION") == "full":
        tests = tmp_path / "tests"
        shutil.copytree(ROOT / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") and entry.name not in ("src", "tests"):
                (tmp_path / entry.name).symlink_to(entry)
        for name in SUBSYSTEMS[subsystem]:
            folder, _, file = name.rpartition("/")
            remove(tests / "unit" / name)
            remove(tests / "unit" / folder / f"test_{file}")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["--ignore-glob=*page*.py", "tests/unit"]  # pages tell about every subsystem
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(src)}, cwd=tmp_path, check=True)


@pytest.mark.slow
def test_torchpipes_dialect_is_deleted_with_its_package(copies: dict[str, Path]) -> None:
    env = {**os.environ, "PYTHONPATH": str(copies["torchpipe"])}
    subprocess.run([sys.executable, "-c", WITHOUT_TORCHPIPE], env=env, check=True, cwd="/")
