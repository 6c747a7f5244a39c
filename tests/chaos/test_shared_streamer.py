"""A shared batcher in trouble: killed, stopped or frozen under load, with clients that die or do not read."""

import json
import os
import signal
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from penstock import DeadlineExceeded, Streamer, WorkerDied, connect
from penstock.errors import ConfigError, ModelNotReady
from penstock.streamer.shared.protocol import IDENTITY
from support.shared_batchers import Batchers, batchers
from support.waiting import wait_for

MODELS = """
    import os, time

    def echo(batch):
        time.sleep(0.002)
        return batch

    def gated(batch):
        for folder, text, *_ in batch:
            with open(os.path.join(folder, "ran"), "a") as file:
                print(text, file=file)
            while not os.path.exists(os.path.join(folder, "open")):
                time.sleep(0.01)
        return [len(item) for item in batch]
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The functions above, in a module that workers can import."""
    (tmp_path / "shared_in_trouble.py").write_text(textwrap.dedent(MODELS))
    monkeypatch.syspath_prepend(str(tmp_path))
    import shared_in_trouble

    yield shared_in_trouble
    del sys.modules["shared_in_trouble"]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batchers]:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    with batchers(tmp_path / "run") as found:
        yield found


def batcher_of(streamer: Streamer) -> psutil.Process:
    pid = streamer.statistics()["pid"]
    assert isinstance(pid, int)
    return psutil.Process(pid)


CALLERS = """
    import json, sys, threading
    from collections import Counter
    from penstock import Streamer
    from shared_in_trouble import echo

    told, over, asked = Counter(), threading.Event(), [0] * 4

    def call(number):
        while not over.is_set():
            asked[number] += 1
            batch = [number, asked[number]]
            try:
                told["right" if streamer.predict(batch) == batch else "wrong"] += 1
            except Exception as e:
                told[type(e).__name__] += 1

    with Streamer(echo, 4, shared="killed", linger_s=0.2, worker_timeout=60) as streamer:
        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        print("up", flush=True)
        for line in sys.stdin:
            if line == "end\\n":
                break
            print(told["right"], flush=True)
        over.set()
        [t.join() for t in threads]
    print(json.dumps([sum(asked), told]), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_callers_of_three_processes_lose_nothing_when_their_batcher_ends_under_load(
    models: SimpleNamespace, shared: Batchers, chaos: SimpleNamespace, tmp_path: Path, number: int
) -> None:
    programs = [shared.start(CALLERS, cwd=tmp_path) for _ in range(3)]
    pipes = [(one.stdin, one.stdout) for one in programs if one.stdin and one.stdout]
    assert [out.readline() for _, out in pipes] == ["up\n"] * 3

    def answered() -> list[int]:
        for stdin, _ in pipes:
            print("count", file=stdin, flush=True)
        return [int(out.readline()) for _, out in pipes]

    seen = set()
    for _ in range(chaos.count(4, 40)):
        before = answered()
        wait_for(lambda before=before: all(now > then + 10 for now, then in zip(answered(), before, strict=True)))
        with Streamer(models.echo, 4, shared="killed", linger_s=0.2, worker_timeout=60) as streamer:
            batcher = batcher_of(streamer)
        seen.add(batcher.pid)
        workers = batcher.children()
        batcher.send_signal(number)
        _, alive = psutil.wait_procs([batcher, *workers], timeout=20)
        assert not alive, "a worker is left behind"
    before = answered()
    wait_for(lambda: all(now > then + 10 for now, then in zip(answered(), before, strict=True)))
    assert len(shared.running()) == 1
    assert len(seen) > 1, "nobody took over"
    for one in programs:
        out, _ = one.communicate("end\n", timeout=60)
        asked, told = json.loads(out.splitlines()[-1])
        assert sum(told.values()) == asked, "a caller was told twice, or never"
        assert told == {"right": asked}


def test_a_call_that_must_not_run_twice_is_told_that_its_batcher_died(
    models: SimpleNamespace, shared: Batchers, tmp_path: Path
) -> None:
    told: Counter[str] = Counter()
    with Streamer(models.gated, 2, shared="once", linger_s=0.1, idempotent=False) as streamer:
        futures = [streamer.submit([(str(tmp_path), str(i))]) for i in range(5)]
        for future in futures:
            future.add_done_callback(lambda f: told.update([type(f.exception()).__name__]))
        wait_for((tmp_path / "ran").exists)
        batcher_of(streamer).kill()
        assert [type(future.exception(20)) for future in futures] == [WorkerDied] * 5
        (tmp_path / "open").touch()
        assert streamer.predict([(str(tmp_path), "again")]) == [2]
    assert told == {"WorkerDied": 5}


def test_a_call_that_is_in_flight_at_three_deaths_is_not_sent_again(
    models: SimpleNamespace, shared: Batchers, tmp_path: Path
) -> None:
    with Streamer(models.gated, 2, shared="deadly", linger_s=0.1) as streamer:
        future = streamer.submit([(str(tmp_path), "deadly")])
        for deaths in range(3):
            wait_for(lambda deaths=deaths: lines(tmp_path / "ran") > deaths)
            assert not future.done()
            batcher_of(streamer).kill()
        assert isinstance(future.exception(20), WorkerDied)
        (tmp_path / "open").touch()
        assert streamer.predict([(str(tmp_path), "fine")]) == [2]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_deadlines_end_calls_to_a_frozen_batcher_and_it_goes_on_when_it_thaws(
    models: SimpleNamespace, shared: Batchers
) -> None:
    with Streamer(models.echo, 4, shared="frozen", linger_s=0.1) as streamer:
        batcher = batcher_of(streamer)
        batcher.suspend()
        try:
            late = streamer.submit([1], deadline=0.1)
            patient = streamer.submit([2])
            assert isinstance(late.exception(20), DeadlineExceeded)
            with pytest.raises(TimeoutError):
                streamer.predict([3], deadline=0.05)
            assert not patient.done()
        finally:
            batcher.resume()
        assert patient.result(20) == [2]
        assert batcher_of(streamer).pid == batcher.pid


def test_a_killed_client_leaves_the_queue_and_its_memory_is_freed(
    models: SimpleNamespace, shared: Batchers, tmp_path: Path
) -> None:
    program = """
        import sys
        import numpy as np
        from penstock import connect

        streamer = connect("unix:left")
        futures = [streamer.submit([(sys.argv[1], "theirs", np.ones(2**20))]) for i in range(20)]
        print("sent", flush=True)
        sys.stdin.readline()
    """
    with Streamer(models.gated, 1, shared="left", linger_s=0.1, worker_timeout=60) as streamer:
        running = streamer.submit([(str(tmp_path), "ours")])
        wait_for((tmp_path / "ran").exists)
        batcher = batcher_of(streamer)
        held = memory_of(batcher), batcher.num_fds()
        client = shared.start(program, str(tmp_path), cwd=tmp_path)
        assert client.stdout is not None
        assert client.stdout.readline() == "sent\n"
        wait_for(lambda: memory_of(batcher) == held[0] + 2)
        client.kill()
        wait_for(lambda: streamer.statistics()["clients"] == 1)
        mine = [streamer.submit([(str(tmp_path), "ours")]) for _ in range(3)]
        (tmp_path / "open").touch()
        assert [future.result(30) for future in (running, *mine)] == [[2]] * 4
        wait_for(lambda: (memory_of(batcher), batcher.num_fds()) == held)  # one of theirs had been sent ahead
    ran = (tmp_path / "ran").read_text().split()
    assert ran.count("ours") == 4
    assert ran.count("theirs") <= 1, "more was run than what had been sent ahead"


def memory_of(process: psutil.Process) -> int:
    """The number of anonymous shared memories that the process has mapped."""
    return Path(f"/proc/{process.pid}/maps").read_text().count("memfd:penstock")


def test_a_client_that_does_not_read_its_answers_holds_up_nobody(
    models: SimpleNamespace, shared: Batchers, tmp_path: Path
) -> None:
    """It is stopped by a signal while it has many large answers to come."""
    program = """
        import sys
        from penstock import connect

        streamer = connect("unix:slow")
        streamer.predict([0])
        print("up", flush=True)
        sys.stdin.readline()
        futures = [streamer.submit([b"x" * 60_000] * 4) for i in range(2000)]
        print("sent", flush=True)
        assert all(future.result(60) == [b"x" * 60_000] * 4 for future in futures)
        print("read", flush=True)
    """
    with Streamer(models.echo, 64, shared="slow", linger_s=0.1, worker_timeout=60) as streamer:
        batcher = batcher_of(streamer)
        client = shared.start(program, cwd=tmp_path)
        assert client.stdout is not None
        assert client.stdin is not None
        assert client.stdout.readline() == "up\n"
        print(file=client.stdin, flush=True)
        assert client.stdout.readline() == "sent\n"
        client.send_signal(signal.SIGSTOP)
        try:
            for i in range(50):
                assert streamer.predict([i]) == [i]
            assert batcher.memory_info().rss < 900 * 2**20
        finally:
            client.send_signal(signal.SIGCONT)
        assert client.stdout.readline() == "read\n"


def test_large_calls_of_many_threads_survive_the_death_of_their_batcher(
    models: SimpleNamespace, shared: Batchers
) -> None:
    wrong: list[object] = []
    finished = [0]

    def call(number: int) -> None:
        for i in range(30):
            array = np.full((300, 500), number * 100 + i, np.float32)
            (found,) = streamer.predict([array])
            if not np.array_equal(found, array):
                wrong.append((number, i))
            finished[0] += 1

    with Streamer(models.echo, 8, shared="large", linger_s=0.1, worker_timeout=60) as streamer:
        streamer.predict([0])
        threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        wait_for(lambda: finished[0] > 40)
        batcher_of(streamer).kill()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert finished[0] == 180
    assert not wrong


def test_a_batcher_that_cannot_start_is_an_error_with_the_place_of_its_log(
    models: SimpleNamespace, shared: Batchers, tmp_path: Path
) -> None:
    with Streamer(models.echo, 4, shared="file", linger_s=0.1) as streamer:
        assert streamer.predict([1]) == [1]
        (path,) = shared.sockets()
    wait_for(lambda: not shared.running())
    path.touch()
    with Streamer(models.echo, 4, shared="file", linger_s=0.1) as streamer:
        for _ in range(2):  # the second call may meet the pause before the next attempt
            with pytest.raises(ModelNotReady, match=r"ended before it listened; its log is .*file\.sock\..*\.log"):
                streamer.predict([1])
        assert f"{path} is not a socket: remove it, or use another name" in shared.log()
        path.unlink()
        wait_for(lambda: answers(streamer))


def answers(streamer: Streamer) -> bool:
    try:
        return streamer.predict([1]) == [1]
    except Exception:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_offer_a_socket_nor_use_one(
    models: SimpleNamespace, shared: Batchers, tmp_path: Path
) -> None:
    program = """
        import os, socket, sys, time
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        what, path = sys.argv[1:]
        with socket.socket(socket.AF_UNIX) as sock:
            if what == "offer":
                sock.bind(path)
                sock.listen()
                print("listening", flush=True)
                sys.stdin.readline()
            else:
                sock.settimeout(20)
                sock.connect(path)
                try:
                    print(sock.recv(1000), flush=True)
                except ConnectionResetError:
                    print(b"", flush=True)
    """
    with Streamer(models.echo, 4, shared="private", linger_s=0.1) as streamer:
        assert streamer.predict([1]) == [1]
        (path,) = shared.sockets()
        for part in [path.parent, *tmp_path.parents, tmp_path]:  # so that only the credentials are left to refuse them
            if part != Path("/"):
                part.chmod(part.stat().st_mode | 0o055)
        path.chmod(0o777)
        thief = shared.start(program, "use", str(path), cwd=Path("/"))
        assert thief.communicate()[0] == "b''\n"
        assert "client_refused error=the other end of the socket belongs to user 65534" in shared.log()
        path.parent.chmod(0o700)
        assert streamer.predict([2]) == [2]
    trap = tmp_path / "trap"
    trap.mkdir()
    trap.chmod(0o777)
    liar = shared.start(program, "offer", f"{trap}/trap.sock.{'0' * IDENTITY}", cwd=Path("/"))
    assert liar.stdout is not None
    assert liar.stdout.readline() == "listening\n"
    with pytest.raises(ConfigError, match="mode 0777, expected 0700"):
        connect(f"unix:{trap}/trap.sock")
    trap.chmod(0o700)
    with pytest.raises(ConfigError, match="belongs to user 65534, expected user 0"):
        connect(f"unix:{trap}/trap.sock").predict([1])
    os.chown(trap, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534, expected user 0"):
        connect(f"unix:{trap}/trap.sock")


def test_programs_that_are_killed_leave_no_batcher(shared: Batchers, models: SimpleNamespace, tmp_path: Path) -> None:
    program = """
        import time
        from penstock import Streamer
        from shared_in_trouble import echo

        streamer = Streamer(echo, 4, shared="orphan", linger_s=0.1)
        streamer.predict([1])
        print("up", flush=True)
        time.sleep(60)
    """
    programs = [shared.start(program, cwd=tmp_path) for _ in range(2)]
    assert [one.stdout.readline() for one in programs if one.stdout] == ["up\n"] * 2
    (batcher,) = shared.running()
    workers = batcher.children()
    for one in programs:
        one.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs([batcher, *workers], timeout=20)[1]
