"""The PID file: one server per temporary folder."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.errors import ConfigError, Conflict
from penstock.torchserve.cli import pid_file
from penstock.torchserve.cli.pid_file import PidFile, remove_own, running_pid, stop


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / ".model_server.pid")


def sleeper(path: str, on_term: str = "lambda *_: end.set()") -> subprocess.Popen[bytes]:
    """A running process that owns the file like a server."""
    code = (
        "import sys, signal, threading; from penstock.torchserve.cli.pid_file import PidFile\n"
        "own = PidFile(sys.argv[1]); end = threading.Event()\n"
        f"signal.signal(signal.SIGTERM, {on_term})\n"
        "print('up', flush=True); end.wait(60); own.remove()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.stdout.close()
    return process


def test_the_file_names_the_process_and_is_gone_at_the_end(path: str) -> None:
    own = PidFile(path)
    assert Path(path).read_text() == f"{os.getpid()}\n"
    assert running_pid(path) == os.getpid()
    own.remove()
    assert running_pid(path) is None
    assert not os.path.exists(path)


def test_a_second_server_is_refused(path: str) -> None:
    own = PidFile(path)
    with pytest.raises(Conflict, match="TorchServe is already running, please use torchserve --stop to stop"):
        PidFile(path)
    own.remove()
    PidFile(path).remove()


def test_one_of_many_concurrent_starts_gets_the_file(path: str) -> None:
    found: list[PidFile] = []
    refused: list[Conflict] = []
    together = threading.Barrier(8)

    def claim() -> None:
        together.wait()
        try:
            found.append(PidFile(path))
        except Conflict as error:
            refused.append(error)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(refused)) == (1, 7)
    found[0].remove()


@pytest.mark.parametrize("text", ["", "no number", "1\n", f"{os.getpid()}\n"], ids=["", "none", "1", "own"])
def test_the_file_of_a_dead_server_is_replaced(path: str, text: str) -> None:
    Path(path).write_text(text)
    assert running_pid(path) is None
    assert stop(path) == "TorchServe is not currently running."
    assert not os.path.exists(path)
    Path(path).write_text(text)
    PidFile(path).remove()


def test_a_file_of_another_user_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(path).write_text(f"{os.getpid()}\n")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        running_pid(path)


def test_a_link_is_not_followed(path: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("1\n")
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(ConfigError, match="cannot be read"):
        running_pid(path)
    assert (tmp_path / "elsewhere").read_text() == "1\n"


@pytest.mark.parametrize(
    ("marks", "is_server"),
    [((pid_file.JAVA_SERVER,), True), ((pid_file.SERVER_MODULE, pid_file.JAVA_SERVER), False)],
    ids=["TorchServe", "another Penstock server, with the number of a crashed one"],
)
def test_a_process_that_holds_no_lock_is_the_server_only_if_it_is_torchserves(
    path: str, marks: tuple[str, ...], is_server: bool
) -> None:
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, *marks]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        Path(path).write_text(f"{process.pid}")
        assert running_pid(path) == (process.pid if is_server else None)
        process.kill()
    assert running_pid(path) is None


def test_stop_ends_the_server_and_waits_for_it(path: str) -> None:
    with sleeper(path) as process:
        assert running_pid(path) == process.pid
        waiter = threading.Thread(target=process.wait)  # a child that nobody waits for stays, as a zombie
        waiter.start()
        assert stop(path) == "TorchServe has stopped."
        waiter.join()
        assert process.returncode == 0
    assert not os.path.exists(path)
    assert stop(path) == "TorchServe is not currently running."


def test_stop_reports_a_timeout(path: str) -> None:
    with sleeper(path, on_term="signal.SIG_IGN") as process:
        assert stop(path, wait_s=0.05) == "Stopping TorchServe took too long."
        assert running_pid(path) == process.pid
        process.kill()


def test_a_server_in_the_background_owns_the_file(path: str, tmp_path: Path) -> None:
    (tmp_path / "behind.py").write_text(
        "import sys, os, signal\n"
        "from penstock.torchserve.cli.pid_file import remove_own\n"
        "os.read(0, 1)\n"  # nothing: it is the end of the file
        "os.mkfifo(sys.argv[2]); open(sys.argv[2]).read()\n"
        "remove_own(sys.argv[3])\n"
    )
    fifo = str(tmp_path / "fifo")
    code = (
        "import sys; from penstock.torchserve.cli.pid_file import PidFile\n"
        "pid = PidFile(sys.argv[1]).start_in_background([sys.argv[2], sys.argv[1]], 'behind')\n"
        "open(sys.argv[3], 'w').write(str(pid))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code, path, fifo, str(tmp_path / "pid")], env=env, check=True)
    pid = int((tmp_path / "pid").read_text())
    assert running_pid(path) == pid
    while not os.path.exists(fifo):
        os.sched_yield()
    with open(fifo, "w"):
        assert running_pid(path) == pid
    while os.path.exists(path):  # until it is at its end
        os.sched_yield()
    assert running_pid(path) is None


def test_remove_own_keeps_other_files(path: str) -> None:
    Path(path).write_text("1\n")
    remove_own(path)
    assert os.path.exists(path)
    Path(path).write_text(f"{os.getpid()}\n")
    remove_own(path)
    assert not os.path.exists(path)
