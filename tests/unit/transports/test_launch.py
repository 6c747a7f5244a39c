from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys

import pytest

from penstock.config.schema import ModelConfig
from penstock.errors import LoadFailed
from penstock.transports.launch import Child, pack_spec
from penstock.wire.slabs import anonymous_file, map_read_only
from penstock.worker.spec import WorkerSpec


def spec(target):
    return WorkerSpec("m", "1", ModelConfig(target="m:m"), target)


def test_names_and_objects_of_modules_are_sent():
    for target in ("app.py:Model", os.path.join):
        packed, script = pack_spec(spec(target))
        assert pickle.loads(packed).target == target
        assert script == ""


@pytest.mark.parametrize("target", [lambda items: items, {"lock": (x for x in ())}])
def test_what_cannot_be_sent_is_named(target):
    with pytest.raises(LoadFailed, match=r"a (function|dict), cannot be sent to a worker process .*app.py:Model"):
        pack_spec(spec(target))


def test_an_object_of_the_script_becomes_its_path(monkeypatch, tmp_path):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", str(tmp_path / "script.py"), raising=False)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def predict(items):
        return items

    predict.__module__, predict.__qualname__ = "__main__", "predict"
    packed, script = pack_spec(spec(predict))
    assert pickle.loads(packed).target == f"{tmp_path / 'script.py'}:predict"
    assert sys.modules[script] is main


def test_an_instance_of_the_scripts_class_cannot_be_found_by_a_worker(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    made = type("Model", (), {"__module__": "__main__"})()
    with pytest.raises(LoadFailed, match="a Model of the main script"):
        pack_spec(spec(made))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise SystemExit(4)", "exited with code 4"),
        (f"import os; os.kill(0, {int(signal.SIGKILL)})", "killed by SIGKILL"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(code, told):
    fd = anonymous_file(4096)
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    import socket

    ours, theirs = socket.socketpair()
    theirs.close()
    child = Child(process, ours, None, map_read_only(fd, 4096))
    assert told in child.ended()
    child.close()
    os.close(fd)
