from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from penstock.config.schema import ModelConfig
from penstock.core.transports.launch import Child, _python, pack_spec, pack_target
from penstock.core.wire.slabs import anonymous_file, map_read_only
from penstock.core.worker.spec import WorkerSpec, Wrapped
from penstock.errors import LoadFailed


def spec(target):
    return WorkerSpec("m", "1", ModelConfig(target="m:m"), target)


def test_names_and_objects_of_modules_are_sent():
    for target in ("app.py:Model", os.path.join):
        packed, script = pack_spec(spec(target))
        assert pickle.loads(packed).target == target
        assert script == ("", "")


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
    assert pickle.loads(pack_spec(spec(packed))[0]).target.load().target is os.path.join
    with pytest.raises(LoadFailed, match="the target, a function, cannot be sent"):
        pack_target(Wrapped(lambda items: items, "m:m"))


def test_where_python_is_built_into_a_server_its_own_interpreter_runs_the_workers(monkeypatch, tmp_path):
    assert _python() == sys.executable
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert _python() == "/usr/bin/uwsgi"  # there is no other
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    assert _python() == str(tmp_path / "bin" / "python3")


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
    (tmp_path / "script.py").touch()
    script.__file__ = str(tmp_path / "script.py")
    for target in (script.Model, script.Model(), Wrapped(os.path.join, "m:m", {"args": (script.Model(),)})):
        where, name = pack_spec(spec(target))[1]
        assert where == script.__file__
        assert sys.modules[name] is script


def test_a_module_that_is_run_as_a_script_keeps_its_package(script):
    script.__spec__ = ModuleSpec("package.app", None)
    assert pack_spec(spec(script.Model))[1] == ("package.app", "package.app")


def test_console_definitions_are_not_available_to_workers(script):
    with pytest.raises(LoadFailed, match="needs the main program"):
        pack_spec(spec(script.Model()))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise SystemExit(4)", "exited with code 4"),
        (f"import os; os.kill(0, {int(signal.SIGKILL)})", "killed by SIGKILL"),
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
