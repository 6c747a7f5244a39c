"""A streamer that a web app makes when it is imported, under servers that fork before or after that."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.shared_batchers import batchers
from support.waiting import wait_for
from support.webservers import ask, served

BIN = Path(sys.executable).parent
# gevent's own callback, when a thread's greenlet dies after the interpreter cleared gevent's module
GEVENT_EXIT = re.compile(
    r"Exception ignored in: <function _make_cleanup_id.*\nTraceback.*\n.*gevent/threading.*\n(?:    .*\n)?Attr.*"
)
APP = """
    import json, os, time
    import penstock

    def predict(batch):
        time.sleep(0.01)
        return [(os.getpid(), len(batch))] * len(batch)

    streamer = getattr(penstock, os.environ["KIND"])(predict, 8)

    def app(environ, start_response):
        [(worker, size)] = streamer.predict([1])
        start_response("200 OK", [("content-type", "application/json"), ("connection", "close")])
        return [json.dumps([os.getpid(), worker, size]).encode()]
"""


def check(folder: Path, kind: str, forked: bool, together: bool, *command: str) -> None:
    """Every process of the server answers with workers of its own, and nothing is left of it at the end.

    `forked`: the streamer started before the fork. `together`: a process takes many requests at a time.
    """
    with served(folder, APP, {"KIND": kind}, *command) as (url, process, said):
        ask(url)
        with ThreadPoolExecutor(16) as pool:
            answers: list[list[int]] = list(pool.map(ask, [url] * 48))
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        text = os.pread(said.fileno(), 2**20, 0).decode()
    workers = {server: {w for s, w, _ in answers if s == server} for server, _, _ in answers}
    assert all(len(theirs) == 1 for theirs in workers.values())
    assert len(set.union(*workers.values())) == len(workers), "two servers share a worker"
    for server, (worker,) in workers.items():
        assert (worker == server) == (kind == "ThreadedStreamer")
    if together:
        assert max(size for _, _, size in answers) > 1
    assert ("starts its own workers" in text) == forked, text
    assert "Traceback" not in GEVENT_EXIT.sub("", text), text
    for worker in set.union(*workers.values()):
        wait_for(lambda worker=worker: not Path(f"/proc/{worker}").exists(), 5)


@pytest.mark.parametrize("preload", [False, True], ids=["imported_after_the_fork", "preload"])
@pytest.mark.parametrize(
    ("kind", "worker_class"),
    [("Streamer", "sync"), ("Streamer", "gthread"), ("Streamer", "gevent"), ("ThreadedStreamer", "gevent")],
)
def test_gunicorn(tmp_path: Path, kind: str, worker_class: str, preload: bool) -> None:
    command = [str(BIN / "gunicorn"), "-k", worker_class, "-w", "2", "-b", "{socket}"]
    # with gevent and --preload some of its workers hang at their start, also those of an empty app: it replaces them
    command += ["--timeout", "4", "--graceful-timeout", "2"]
    if worker_class == "gthread":
        command += ["--threads", "8"]
    if preload:
        command.append("--preload")
    check(tmp_path, kind, preload, worker_class != "sync", *command, "app:app")


@pytest.mark.skipif(not (BIN / "uwsgi").exists(), reason="uWSGI is not installed: pip install pyuwsgi")
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("Streamer", []),
        ("Streamer", ["--lazy-apps"]),
        ("ThreadedStreamer", ["--enable-threads", "--threads", "8"]),
    ],
    ids=["forked", "lazy_apps", "threads"],
)
def test_uwsgi(tmp_path: Path, kind: str, flags: list[str]) -> None:
    command = [str(BIN / "uwsgi"), "--http-socket", "{socket}", "--module", "app:app", "--processes", "2", "--master"]
    check(tmp_path, kind, False, "--threads" in flags, *command, "--die-on-term", *flags)


def test_a_gevent_program_waits_for_one_answer_and_runs_its_other_greenlets_meanwhile(tmp_path: Path) -> None:
    program = """
        from gevent import monkey
        monkey.patch_all()
        import gevent
        import penstock
        from model import nap

        def main(kind, **keys):
            with kind(nap, 4, **keys) as streamer:
                assert streamer.predict([1]) == [1]  # nothing else keeps the hub alive
                ticks = []
                def tick():
                    while True:
                        gevent.sleep(0.01)
                        ticks.append(1)
                ticking = gevent.spawn(tick)
                calls = [gevent.spawn(streamer.predict, [i]) for i in range(12)]
                gevent.joinall(calls, raise_error=True)
                assert [call.value for call in calls] == [[i] for i in range(12)]
                assert len(ticks) >= 10, len(ticks)
                ticking.kill()
                futures = [streamer.submit([i]) for i in range(8)]
                assert [f.result(20) for f in futures] == [[i] for i in range(8)]
                told = []
                future = streamer.submit([1])
                future.add_done_callback(lambda f: (gevent.sleep(0.01), told.append(f.result())))  # it may block
                assert future.result(20) == [1]
                running, waiting = streamer.submit([1]), streamer.submit([2] * 8)
                assert waiting.cancel() and running.result(20) == [1]
                gevent.sleep(0.05)
                assert told == [[1]]
                try:
                    streamer.predict([1], deadline=0.02)
                except TimeoutError:
                    pass
                else:
                    raise AssertionError("no timeout")
                with gevent.Timeout(0.02, False):
                    streamer.predict([1])
                assert streamer.predict([3]) == [3]
                assert gevent.wait(timeout=10), "something is still expected"

        if __name__ == "__main__":
            main(penstock.ThreadedStreamer)
            main(penstock.Streamer)
            main(penstock.Streamer, shared="gevent", linger_s=0.1)
            left_open = penstock.Streamer(nap, 4)
            left_open.predict([1])
            print("fine")
    """
    (tmp_path / "model.py").write_text("import time\ndef nap(batch):\n    time.sleep(0.05)\n    return batch\n")
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    with batchers(tmp_path / "run") as shared:
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=shared.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == "fine\n", done.stderr
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
