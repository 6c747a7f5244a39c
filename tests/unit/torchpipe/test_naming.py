"""The package: its names, the modules it loads, and its import as torchpipe."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import penstock.torchpipe as torchpipe
from penstock.errors import BadRequest, DeadlineExceeded, ItemFailed
from penstock.torchpipe.boundary import INSTEAD, NoData, as_runtime_error

PUBLISHED = {
    "Event", "Interpreter", "Pipe", "Status", "TASK_BOX_KEY", "TASK_CONTEXT_KEY", "TASK_DATA_KEY", "TASK_EVENT_KEY",
    "TASK_INFO_KEY", "TASK_NODE_NAME_KEY", "TASK_RESULT_KEY", "ThreadSafeKVStorage", "__version__", "encrypt",
    "infer_shape", "is_registered", "list_backends", "parse_toml", "pipe", "register_backend", "register_filter",
    "show", "supported_opset", "utils",
}  # fmt: skip


def run(code: str, *path: Path) -> str:
    """The output of a program that imports from `path` first."""
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_published_name_can_be_imported() -> None:
    assert {name for name in PUBLISHED if not hasattr(torchpipe, name)} == set()


def test_programs_that_compare_the_version_as_a_text_run() -> None:
    assert torchpipe.__version__.startswith("0.")
    for release in ("0.2.2b1", "0.3.3", "0.4.1b2", "0.6.3"):
        assert release < torchpipe.__version__


def test_the_keys_are_spelled_as_published() -> None:
    keys = {name: getattr(torchpipe, name) for name in PUBLISHED if name.startswith("TASK_")}
    assert keys == {
        "TASK_BOX_KEY": "_box",
        "TASK_CONTEXT_KEY": "context",
        "TASK_DATA_KEY": "data",
        "TASK_EVENT_KEY": "event",
        "TASK_INFO_KEY": "_info",
        "TASK_NODE_NAME_KEY": "node_name",
        "TASK_RESULT_KEY": "result",
    }


@pytest.mark.parametrize("name", INSTEAD)
def test_unavailable_names_explain_the_replacement(name: str) -> None:
    found: object = torchpipe
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
    with pytest.raises(NotImplementedError, match=f"torchpipe.{name} is not available: "):
        found("anything", key=1)
    assert "not available" in repr(found)


def test_the_import_loads_no_runtime() -> None:
    loaded = run(
        "import penstock.torchpipe as t; import sys; print(*{m.partition('.')[0] for m in sys.modules})"
    ).split()
    assert not set(loaded) & {"torch", "cv2", "onnxruntime", "PIL", "simplejpeg", "prometheus_client", "click", "rich"}


def test_it_can_take_torchpipes_name(tmp_path: Path) -> None:
    code = """
import penstock.torchpipe
penstock.torchpipe.install()
penstock.torchpipe.install()
import torchpipe
import torchpipe.utils.test
from torchpipe import pipe, TASK_DATA_KEY
from torchpipe.utils.cpp_extension import load
assert torchpipe is penstock.torchpipe
assert torchpipe.utils.test is penstock.torchpipe.utils.test
item = {TASK_DATA_KEY: 3}
pipe({"backend": "Identity"})(item)
print(item["result"])
"""
    assert run(code) == "3"


def test_it_does_not_replace_an_installed_torchpipe(tmp_path: Path) -> None:
    (tmp_path / "torchpipe").mkdir()
    (tmp_path / "torchpipe" / "__init__.py").write_text("theirs = True\n")
    code = """
import penstock.torchpipe
for imported in (False, True):
    try:
        penstock.torchpipe.install()
    except ImportError as e:
        print("another torchpipe is installed" in str(e))
    import torchpipe
    print(torchpipe.theirs)
"""
    assert run(code, tmp_path).split() == ["True"] * 4


@pytest.mark.parametrize("cls", [BadRequest, ItemFailed, DeadlineExceeded])
def test_an_error_has_its_own_class_and_runtime_error_and_can_be_pickled(cls: type[BadRequest]) -> None:
    error = as_runtime_error(cls("what", retry_after_s=2.0, detail="where"))
    assert isinstance(error, cls)
    assert isinstance(error, RuntimeError)
    assert (type(error).__name__, str(error), error.detail) == (cls.__name__, "what", "where")
    assert error.__notes__ == ["where"], "a traceback shows it"
    assert as_runtime_error(error) is error
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), copied.message, copied.retry_after_s) == (cls, "what", 2.0)


def test_a_missing_field_is_an_index_error_as_published() -> None:
    assert isinstance(as_runtime_error(NoData("no data")), IndexError)
