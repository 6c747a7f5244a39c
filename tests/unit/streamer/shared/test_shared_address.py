from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.streamer.shared import start
from penstock.streamer.shared.start import connected, listening, socket_path
from penstock.torchserve.archive.store import ModelStore
from penstock.torchserve.cli.pid_file import pid_path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def test_a_name_is_a_socket_in_a_directory_for_this_user_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        assert socket_path("bert-1.2_b") == f"{folder}/bert-1.2_b.sock"
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert socket_path(f"{folder}/./x") == f"{folder}/x"
    monkeypatch.delenv("PENSTOCK_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert socket_path("bert") == f"{folder}/penstock-{os.geteuid()}/bert.sock"


def test_a_machine_without_a_writable_folder_is_told_which_variable_names_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file is there")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", f"{folder}/x")
    with pytest.raises(ConfigError, match=r"/x for the socket cannot be made: .*; set PENSTOCK_RUNTIME_DIR"):
        socket_path("bert")
    monkeypatch.delenv("PENSTOCK_RUNTIME_DIR")

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(ConfigError, match="no directory for temporary files can be written; set PENSTOCK_RUNTIME_DIR"):
        socket_path("bert")
    for other in (pid_path, lambda: ModelStore(None)):
        with pytest.raises(ConfigError, match="no directory for temporary files can be written; set TMPDIR"):
            other()


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "-x", "a b", "ä", "x" * 65, "a\0"])
def test_a_name_that_could_leave_the_directory_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected an absolute path, or a name of at most 64"):
        socket_path(name)


def test_a_path_that_is_too_long_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="more than 107 bytes: set PENSTOCK_RUNTIME_DIR"):
        socket_path("/" + "x" * 107)


def test_a_directory_that_others_can_use_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(0o755)
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="has mode 0750, expected 0700"):
        socket_path("x")
    folder.rmdir()
    (tmp_path / "real").mkdir(0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is not a directory"):
        socket_path("x")
    with pytest.raises(ConfigError, match="cannot be made: No such file"):
        socket_path("/nowhere/at/all/x.sock")


def test_a_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(0o700)
    monkeypatch.setattr(start.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.getuid()}, expected user {os.getuid() + 1}"):
        socket_path("x")


def test_the_file_of_a_dead_listener_is_replaced_and_no_other_file_is(folder: Path) -> None:
    path = socket_path("x")
    assert connected(path) is None
    dead = listening(path)
    dead.close()
    assert connected(path) is None, "its file is left, but nobody listens"
    with listening(path) as alive, connected(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert not alive.getblocking()
    os.unlink(path)
    Path(path).write_text("valuable")
    with pytest.raises(ConfigError, match="is not a socket"):
        listening(path)
    assert Path(path).read_text() == "valuable"


def test_a_socket_of_another_user_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = socket_path("x")
    with listening(path):
        monkeypatch.setattr(start, "peer_uid", lambda sock: os.geteuid() + 1)
        with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}, expected user {os.geteuid()}"):
            connected(path)


def test_the_kernel_reports_the_user_at_the_other_end() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert start.peer_uid(one) == os.geteuid()


def test_a_forked_process_closes_its_copies_of_sockets() -> None:
    one, other = socket.socketpair()
    with one, other:
        start.keep(one)
        if (child := os.fork()) == 0:
            try:
                one.getpeername()
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        start.close(one)
        assert not start._OPEN & {one}
