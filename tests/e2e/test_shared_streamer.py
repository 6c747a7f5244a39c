"""One batcher for several processes: who starts it, what they share, how it ends, and servers that fork."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock import Streamer, tracing
from penstock.errors import ConfigError, ModelNotReady
from penstock.streamer.base import BaseStreamer
from support.shared_batchers import Batchers, batchers
from support.spans import check_links
from support.waiting import wait_for
from support.webservers import ask, served

BIN = Path(sys.executable).parent
MODEL = """
import os, time
from penstock import ManagedModel

class Model(ManagedModel):
    def init_model(self):
        with open(os.path.join(os.path.dirname(__file__), "loads"), "a") as file:
            print(os.getpid(), file=file)

    def predict(self, batch):
        time.sleep(0.02)
        return [(os.getpid(), len(batch), item) for item in batch]
"""
APP = """
    import json, os, sys
    from penstock import Streamer
    from model import Model

    streamer = Streamer(Model, 64, shared="app", linger_s=0.2)

    def app(environ, start_response):
        [(worker, size, _)] = streamer.predict([1])
        start_response("200 OK", [("content-type", "application/json"), ("connection", "close")])
        return [json.dumps([os.getpid(), worker, size]).encode()]

    async def asgi(scope, receive, send):
        [(worker, size, _)] = await streamer.apredict([1])
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps([os.getpid(), worker, size]).encode()})
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Batchers]:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    with batchers(tmp_path / "run") as found:
        yield found


GUNICORN = ["gunicorn", "-b", "{socket}", "-w", "8", "--graceful-timeout", "5"]
UWSGI = ["uwsgi", "--http-socket", "{socket}", "--module", "app:app", "--processes", "4", "--master", "--die-on-term"]
SERVERS = {
    "gunicorn_sync": [*GUNICORN, "app:app"],
    "gunicorn_threads": [*GUNICORN, "-k", "gthread", "--threads", "4", "app:app"],
    "gunicorn_gevent": [*GUNICORN, "-k", "gevent", "app:app"],
    "gunicorn_preload": [*GUNICORN, "-k", "gthread", "--threads", "4", "--preload", "app:app"],
    "uvicorn": ["uvicorn", "app:asgi", "--port", "{port}", "--workers", "4", "--lifespan", "off"],
    "uwsgi_forked": [*UWSGI, "--enable-threads"],
}


@pytest.mark.parametrize("name", SERVERS)
def test_all_processes_of_a_web_server_share_one_model_and_one_queue(
    shared: Batchers, tmp_path: Path, name: str
) -> None:
    command = SERVERS[name]
    if not (BIN / command[0]).exists():
        pytest.skip(f"{command[0]} is not installed")
    with served(tmp_path, APP, shared.environment(), str(BIN / command[0]), *command[1:]) as (url, process, said):
        ask(url)
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(ask, [url] * 160))
        assert len(shared.running()) == 1
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        text = os.pread(said.fileno(), 2**20, 0).decode()
    assert len({server for server, _, _ in answers}) > 1, "one process answered everything"
    assert len({worker for _, worker, _ in answers}) == 1
    assert max(size for _, _, size in answers) > 1
    assert len((tmp_path / "loads").read_text().splitlines()) == 1, "the model was loaded more than once"
    assert "Traceback" not in text, text


def test_eight_processes_at_once_start_one_batcher_although_a_dead_one_left_its_socket(
    shared: Batchers, tmp_path: Path
) -> None:
    program = """
        import sys
        from penstock import Streamer
        from model import Model

        print("up", flush=True)
        sys.stdin.readline()
        with Streamer(Model, 64, shared="race", linger_s=0.3, worker_timeout=60) as streamer:
            print(streamer.predict([7])[0][0], flush=True)
            sys.stdin.readline()
    """
    for round_ in range(2):
        programs = [shared.start(program, cwd=tmp_path) for _ in range(8)]
        pipes = [(one.stdin, one.stdout) for one in programs if one.stdin and one.stdout]
        assert [out.readline() for _, out in pipes] == ["up\n"] * 8
        for stdin, _ in pipes:
            print(file=stdin, flush=True)
        assert len({out.readline() for _, out in pipes}) == 1
        assert len((tmp_path / "loads").read_text().splitlines()) == round_ + 1
        (batcher,) = shared.running()
        if round_ == 0:
            batcher.kill()
            batcher.wait(20)
            assert shared.sockets()
        for one in programs:
            one.communicate("\n")
            assert one.returncode == 0


def test_a_batcher_ends_after_its_last_client_and_a_new_one_starts(shared: Batchers, tmp_path: Path) -> None:
    from model import Model

    from penstock import Streamer, connect

    first = Streamer(Model, 4, shared="often", linger_s=0.05)
    second = connect("unix:often")
    pids = {streamer.predict([1])[0][0] for streamer in (first, second)}
    assert len(pids) == 1
    assert first.statistics()["clients"] == 2
    first.destroy_workers()
    assert second.predict([1])[0][0] in pids, "the other client has left, but not this one"
    second.destroy_workers()
    wait_for(lambda: not shared.running())
    assert not shared.sockets()
    with pytest.raises(ModelNotReady, match="no batcher listens"):
        connect("unix:often").predict([1])
    for _ in range(3):  # each may find the one before in any state of its end
        with Streamer(Model, 4, shared="often", linger_s=0.0) as streamer:
            assert streamer.predict([1])[0][2] == 1


def test_other_settings_under_the_same_name_get_a_batcher_of_their_own(
    shared: Batchers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from model import Model

    from penstock import Streamer, connect

    with ExitStack() as stack:

        def started(size: int) -> Streamer:
            return stack.enter_context(Streamer(Model, size, shared="mine", linger_s=0.1, wait_for_worker_ready=True))

        def worker(streamer: BaseStreamer) -> int:
            pid: int = streamer.predict([1])[0][0]
            return pid

        first, second = started(4), started(8)
        assert "batch_size is 4 there and 8 here" in caplog.text
        assert worker(first) != worker(second)
        assert worker(started(4)) == worker(first)
        assert worker(stack.enter_context(connect("unix:mine"))) == worker(second), "the newest serves guests"
        third, fourth = started(16), started(32)
        with pytest.raises(ConfigError, match=r"4 batchers of this name run .*: give the same in all processes, or"):
            started(64)
        assert len({worker(each) for each in (first, second, third, fourth)}) == len(shared.running()) == 4
    wait_for(lambda: not shared.running())
    with Streamer(Model, 4, shared="mine", linger_s=0.1) as streamer:
        assert streamer.predict([1])
        assert len(list((tmp_path / "run").glob("mine.sock.*.log"))) == 1, "files of dead batchers are left"


DEPLOYED = """
    import os

    from penstock import Streamer
    from predicting import predict
    from version import VERSION

    streamer = Streamer(predict, 16, shared="deployed", linger_s=3, worker_timeout=60)

    def app(environ, start_response):
        [version] = streamer.predict([1])
        start_response("200 OK", [("content-type", "application/json"), ("connection", "close")])
        return [f"[{VERSION}, {version}, {os.getpid()}]".encode()]
"""
PREDICTING = """
def predict(batch):
    from version import VERSION  # late: it is a part of the code all the same
    return [VERSION] * len(batch)
"""


def test_a_rolling_restart_serves_new_code_from_a_second_batcher_without_an_error(
    shared: Batchers, tmp_path: Path
) -> None:
    """gunicorn replaces its processes upon SIGHUP, under load, after a deployment that changed an imported file."""
    (tmp_path / "predicting.py").write_text(PREDICTING)
    (tmp_path / "version.py").write_text("VERSION = 1\n")
    command = [str(BIN / "gunicorn"), "-b", "{socket}", "-w", "3", "--graceful-timeout", "20", "app:app"]
    environment = {**shared.environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    with served(tmp_path, DEPLOYED, environment, *command) as (url, process, said):
        assert ask(url)[:2] == [1, 1]
        answers: list[list[int]] = []

        def deployed(version: int) -> bool:
            """Whether all processes have the new code: one that still starts would read the next change."""
            last = answers[-40:]
            return all(answer[:2] == [version] * 2 for answer in last) and len({pid for *_, pid in last}) == 3

        over = threading.Event()

        def load() -> None:
            while not over.is_set():
                with urllib.request.urlopen(url, timeout=60) as response:  # raises for a refused connection, too
                    answers.append(json.load(response))

        with ThreadPoolExecutor(8) as pool:
            loading = [pool.submit(load) for _ in range(8)]
            try:
                for version in (2, 3):
                    (tmp_path / "version.py").write_text(f"VERSION = {version}\n")
                    process.send_signal(signal.SIGHUP)
                    wait_for(lambda version=version: deployed(version))
                wait_for(lambda: len(shared.running()) == 1)
            finally:
                over.set()
            for each in loading:
                each.result()
        assert {tuple(answer[:2]) for answer in answers} == {(1, 1), (2, 2), (3, 3)}, "code of two versions was mixed"
        assert "Traceback" not in os.pread(said.fileno(), 2**20, 0).decode()
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def test_a_function_of_the_main_program_runs_in_a_shared_batcher(shared: Batchers, tmp_path: Path) -> None:
    program = """
        import dataclasses
        from penstock import Streamer

        @dataclasses.dataclass
        class Point:
            x: int

        class Refused(ValueError):
            pass

        def move(points):
            if any(point.x < 0 for point in points):
                raise Refused("negative")
            return [Point(point.x + 1) for point in points]

        if __name__ == "__main__":
            with Streamer(move, 4, shared="main", linger_s=0.1) as streamer:
                found = streamer.predict([Point(1), Point(-1)], return_exceptions=True)
                assert found[0] == Point(2), found
                assert type(found[1]) is Refused, found
                print("fine")
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=shared.environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stderr


def test_traced_calls_are_linked_to_their_batches_in_the_batcher_that_an_untraced_process_started(
    shared: Batchers, tmp_path: Path
) -> None:
    other = shared.start(
        """
        import sys
        from penstock import Streamer
        from model import Model

        with Streamer(Model, 8, shared="traced", linger_s=0.2, worker_timeout=60) as streamer:
            print(streamer.predict([7])[0][0], flush=True)
            sys.stdin.readline()
            print(streamer.predict([7])[0][0], flush=True)
            sys.stdin.readline()
        """,
        cwd=tmp_path,
    )
    assert other.stdout is not None
    worker = int(other.stdout.readline())
    model: Any = importlib.import_module("model").Model
    exporter = InMemorySpanExporter()
    tracing.start(exporter=exporter, ratio=0.0)
    try:
        app = TracerProvider().get_tracer("app")
        with Streamer(model, 8, shared="traced", linger_s=0.2, worker_timeout=60) as streamer:
            assert streamer.predict([1])[0][0] == worker, "an untraced call"
            with app.start_as_current_span("work") as work, ThreadPoolExecutor(4) as pool:
                contexts = [copy_context() for _ in range(12)]
                answers = [pool.submit(each.run, streamer.predict, [n]) for n, each in enumerate(contexts)]
                assert {answer.result()[0][0] for answer in answers} == {worker}
        said, _ = other.communicate("go on\nend\n", timeout=60)
        assert int(said) == worker, "the batcher goes on after the client that took its spans"
        tracing.flush()
    finally:
        tracing.stop()
    spans = list(exporter.get_finished_spans())
    _, requests = check_links(spans, "request")
    calls = {span.context.span_id: span for span in spans if span.name.startswith("call ")}
    assert len(requests) == len(calls) == 12
    for request in requests:
        caller = calls[request.parent.span_id]
        assert caller.parent.span_id == work.get_span_context().span_id
        assert caller.context.trace_id == request.context.trace_id == work.get_span_context().trace_id
        assert caller.start_time <= request.start_time <= request.end_time
    assert {span.name for span in spans} > {"queue", "run", "batch Model", "predict Model"}
