import os
import pickle
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from penstock.config.schema import ModelConfig
from penstock.core.transports.launch import Child, launch, pack_spec, pack_target, python
from penstock.core.wire.slabs import anonymous_file, map_read_only
from penstock.core.worker import nesting
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import LoadFailed
from penstock.plugins import load_object


def spec(target):
    return WorkerSpec("m", "1", ModelConfig(target="m:m"), target)


def test_names_and_objects_of_modules_are_sent():
    for target in ("app.py:Model", os.path.join):
        packed = pack_spec(spec(target))
        assert pickle.loads(packed.data).target == target
        assert (packed.files, packed.main) == ([], "")


@pytest.mark.parametrize("target", [lambda items: items, {"lock": (x for x in ())}])
def test_an_unsendable_target_is_named(target):
    with pytest.raises(LoadFailed, match=r"a (function|dict), cannot be sent to a worker process .*app.py:Model"):
        pack_spec(spec(target))


def test_an_argument_that_cannot_be_sent_is_named():
    with pytest.raises(LoadFailed, match=r"init_args, a tuple, cannot be sent to a worker process"):
        pack_spec(spec(Wrapped(os.path.join, "m:m", {"init_args": ((x for x in ()),)})))


def test_a_target_can_be_packed_before_its_workers_start():
    packed = pack_target(Wrapped(os.path.join, "m:m"))
    assert packed.load().target is os.path.join
    assert pickle.loads(pack_spec(spec(packed)).data).target.load().target is os.path.join
    with pytest.raises(LoadFailed, match="the target, a function, cannot be sent"):
        pack_target(Wrapped(lambda items: items, "m:m"))


def test_where_python_is_built_into_a_server_its_own_interpreter_runs_the_workers(monkeypatch, tmp_path):
    assert python() == sys.executable
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert python() == "/usr/bin/uwsgi"  # there is no other
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    assert python() == str(tmp_path / "bin" / "python3")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3.11")
    assert python() == str(tmp_path / "bin" / "python3")  # of the virtual environment
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert python() == "/usr/bin/python3.11"


@pytest.fixture
def script(monkeypatch):
    """The main module, as of a script that defines `Model`; what is put into `sys.modules` leaves it again."""
    main = ModuleType("__main__")
    main.Model = type("Model", (), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", main)
    yield main
    for name in [name for name, module in sys.modules.items() if module is main and name != "__main__"]:
        del sys.modules[name]


def test_a_worker_receives_the_script_of_its_target(script, tmp_path):
    (tmp_path / "script.py").write_text("if __name__ == '__main__': ...")
    script.__file__ = str(tmp_path / "script.py")
    for target in (script.Model, script.Model(), Wrapped(os.path.join, "m:m", {"args": (script.Model(),)})):
        packed = pack_spec(spec(target))
        assert packed.files == [(script.__file__, packed.main)]
        assert sys.modules[packed.main] is script


def test_a_module_that_is_run_as_a_script_keeps_its_package(script):
    script.__spec__ = ModuleSpec("package.app", None)
    packed = pack_spec(spec(script.Model))
    assert (packed.files, packed.main) == ([("package.app", "package.app")], "package.app")


def test_a_worker_receives_modules_that_were_loaded_from_files(monkeypatch, tmp_path):
    (tmp_path / "two words.py").write_text("def predict(items): return items")
    path = str(tmp_path / "two words.py")
    monkeypatch.setattr(sys, "path", list(sys.path))
    predict = load_object(f"{path}:predict")
    monkeypatch.setitem(sys.modules, predict.__module__, sys.modules.pop(predict.__module__))  # removed at the end
    assert pack_spec(spec(predict)).files == [(path, predict.__module__)]


@pytest.mark.parametrize("packing", [pack_target, lambda target: pack_spec(spec(target))])
def test_a_script_without_a_guard_is_refused_because_workers_would_run_it(script, tmp_path, packing):
    (tmp_path / "script.py").write_text("class Model: ...\nserve(Model)")
    script.__file__ = str(tmp_path / "script.py")
    with pytest.raises(LoadFailed, match=r"script.py has no line if __name__ == '__main__': .* run the main code"):
        packing(script.Model)


@pytest.mark.parametrize(
    ("importing", "depth", "error"), [(True, 0, "under if __name__ == '__main__'"), (False, 5, "must not start itself")]
)
def test_workers_that_would_start_workers_without_end_are_not_started(monkeypatch, importing, depth, error):
    monkeypatch.setattr(nesting, "importing", importing)
    monkeypatch.setenv(nesting.DEPTH_VARIABLE, str(depth))
    with pytest.raises(LoadFailed, match=error):
        launch(spec(os.path.join), pack_spec(spec(os.path.join)), "cpu", None, 4096)


def test_console_definitions_are_not_available_to_workers(script):
    with pytest.raises(LoadFailed, match="needs the main program"):
        pack_spec(spec(script.Model()))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise SystemExit(4)", "exited with code 4"),
        (f"import os; os.kill(0, {int(signal.SIGKILL)})", "killed by SIGKILL: probably memory ran out, see the limit"),
    ],
)
def test_the_exit_of_a_process_is_described_in_words(code, told):
    fd = anonymous_file(4096)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    import socket

    ours, theirs = socket.socketpair()
    theirs.close()
    child = Child(process, ours, None, map_read_only(fd, 4096))
    assert told in child.ended()
    child.close()
    os.close(fd)
