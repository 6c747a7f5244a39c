import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine.engine import Engine
from penstock.core.portal.portal import Portal
from penstock.core.portal.waiters import Future, the_item
from penstock.errors import DeadlineExceeded, ModelNotFound, ModelNotReady, PenstockError
from penstock.types import Item, ItemResult


def double(items: list[Any]) -> list[Any]:
    return [ValueError("negative") if x < 0 else 2 * x for x in items]


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(target="here", transport="thread", batching=BatchingConfig(**keys))


def test_many_threads_share_batches_and_each_gets_its_own_answer() -> None:
    sizes: list[int] = []

    def slow_double(items: list[Any]) -> list[Any]:
        sizes.append(len(items))
        threading.Event().wait(0.01)
        return double(items)

    with Portal() as portal, ThreadPoolExecutor(16) as pool:
        portal.load("m", config(), target=slow_double)
        answers = list(pool.map(lambda i: portal.predict("m", [i, i + 1]), range(200)))
    assert answers == [[2 * i, 2 * i + 2] for i in range(200)]
    assert max(sizes) > 2


def test_the_first_failed_item_raises_unless_exceptions_are_requested() -> None:
    with Portal() as portal:
        portal.load("m", config(), target=double)
        with pytest.raises(Exception, match=r"ValueError|negative"):
            portal.predict("m", [1, -1])
        results = portal.predict("m", [1, -1], return_exceptions=True)
        assert results[0] == 2
        assert isinstance(results[1], Exception)
        assert portal.predict("m", []) == []


def test_an_interrupted_call_leaves_no_answer_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_double(items: list[Any]) -> list[Any]:
        threading.Event().wait(0.05 if items == [2] else 0)  # the answer to the first call comes well before
        return double(items)

    with Portal() as portal:
        portal.load("m", config(max_batch_size=1), target=slow_double)
        inbox = portal._alive().inbox.of("m")
        put = inbox.put

        def interrupted(*request: Any) -> None:
            put(*request)
            raise KeyboardInterrupt  # as a signal handler may

        monkeypatch.setattr(inbox, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            portal.predict("m", [1])
        monkeypatch.undo()
        assert portal.predict("m", [2]) == [4]


def test_submit_gives_a_real_future() -> None:
    gate = threading.Event()

    def gated(items: list[Any]) -> list[Any]:
        gate.wait(10)
        return items

    with Portal() as portal:
        portal.load("m", config(max_batch_size=1), target=gated)
        first, second, third = (portal.submit("m", i) for i in range(3))
        assert third.cancel()
        assert concurrent.futures.wait([third], timeout=5).done == {third}
        gate.set()
        assert first.result(10) == 0
        assert first.result(10) == 0
        assert second.result(10) == 1
        with pytest.raises(ModelNotFound):
            portal.submit("n", 1).result(10)


def test_a_closed_portal_raises() -> None:
    portal = Portal()
    portal.close()
    portal.close()
    with pytest.raises(ModelNotReady, match="closed"):
        portal.predict("m", [1])


class Echo:
    """A backend that answers when the test lets it, and counts."""

    def __init__(self) -> None:
        self.asked: list[tuple[Item, Any]] = []
        self.cancelled: list[Item] = []
        self.closed: list[float] = []
        self.forgotten = 0

    def submit(self, model: str, version: str | None, item: Item, sink: Any, **keys: Any) -> Any:
        if model == "none":
            raise ModelNotFound("no model is named 'none'")
        self.asked.append((item, sink))
        if model == "at once":
            sink(ItemResult(item.payload))
        return SimpleNamespace(cancel=lambda: self.cancelled.append(item))

    def statistics(self, model: str) -> dict[str, object]:
        return {"model": model}

    async def close(self, drain_s: float) -> None:
        self.closed.append(drain_s)

    def forget(self) -> None:
        self.forgotten += 1


@pytest.fixture
def echo() -> Iterator[tuple[Portal, Echo]]:
    backend = Echo()
    with Portal(make=lambda: backend) as portal:
        yield portal, backend
    assert backend.closed == [30.0]


def test_a_portal_runs_on_any_backend(echo: tuple[Portal, Echo]) -> None:
    portal, backend = echo
    assert portal.predict("at once", [1, 2]) == [1, 2]
    assert portal.submit("at once", 3).result(5) == 3
    assert portal.statistics("m") == {"model": "m"}
    with pytest.raises(ModelNotFound):
        portal.predict("none", [1])
    with pytest.raises(TypeError, match="a portal of Echo loads no models"):
        portal.load("m", config(), target=double)

    async def asked(found: Any) -> int:
        return len(found.asked)

    assert portal.call(asked) == len(backend.asked) == 2


def test_every_call_passes_on_its_deadline_and_priority(echo: tuple[Portal, Echo]) -> None:
    portal, backend = echo
    portal.predict("at once", [1, 2], budget_s=5.0, priority=3)
    portal.submit("at once", 1, budget_s=6.0, priority=2).result(5)
    portal.predict("at once", [1])
    assert [(item.budget_s, item.priority) for item, _ in backend.asked] == [(5.0, 3), (6.0, 2), (None, 0)]


def test_a_call_that_times_out_takes_its_request_back(echo: tuple[Portal, Echo]) -> None:
    portal, backend = echo
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.01 s"):
        portal.predict("m", [1], timeout_s=0.01)
    assert portal.predict("at once", [2]) == [2]  # the late answer of the first wakes nobody
    [(item, sink), _] = backend.asked
    assert backend.cancelled == [item]
    sink(ItemResult([1]))
    assert portal.predict("at once", [3]) == [3]

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        portal.call(never, timeout_s=0.01)


def test_a_failed_backend_reports_the_reason() -> None:
    def broken() -> Echo:
        raise OSError("no such place")

    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no such place"):
        Portal(make=broken)
    for thread in set(threading.enumerate()) - before:
        if thread.name == "penstock-portal":
            thread.join(5)
            assert not thread.is_alive()


def test_a_lazy_portal_starts_with_its_first_call() -> None:
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo())
        return made[-1]

    portal = Portal(make=make, lazy=True)
    assert not made
    assert portal.predict("at once", [1]) == [1]
    assert len(made) == 1
    portal.close()
    Portal(make=make, lazy=True).close()
    assert len(made) == 1


@pytest.mark.parametrize("worker_id", [0, 1])
def test_a_portal_starts_no_thread_before_uwsgi_forks(monkeypatch: pytest.MonkeyPatch, worker_id: int) -> None:
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo())
        return made[-1]

    monkeypatch.setitem(sys.modules, "uwsgi", cast(ModuleType, SimpleNamespace(worker_id=lambda: worker_id)))
    with Portal(make=make) as portal:
        assert len(made) == worker_id
        assert portal.predict("at once", [1]) == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_whose_second_model_does_not_load_again_keeps_no_loop_of_the_first(tmp_path: Path) -> None:
    code = """
        import os, threading, warnings
        from penstock import Portal
        from penstock.config.schema import ModelConfig

        class Once:
            def load(self, device):
                if os.getpid() != parent:
                    raise ValueError("not here")
            def predict(self, items):
                return items

        parent = os.getpid()
        portal = Portal()
        for name, target in (("good", lambda items: items), ("once", Once)):
            portal.load(name, ModelConfig(target="here", transport="thread"), target=target)
        child = os.fork()
        if child == 0:
            warnings.simplefilter("ignore")
            told = 0
            for _ in range(5):
                try:
                    portal.predict("good", [1])
                except Exception as e:
                    told += "not here" in str(e)
            threads = [t.name for t in threading.enumerate() if t.name == "penstock-portal"]
            os._exit(0 if told == 5 and not threads else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        portal.close()
        print("fine")
    """
    (tmp_path / "main.py").write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_its_own_workers_and_the_parent_continues(tmp_path: Path) -> None:
    code = """
        import os, sys, warnings
        from penstock import Portal
        from penstock.config.schema import ModelConfig

        def pid(items):
            return [os.getpid()] * len(items)

        portal = Portal()
        portal.load("m", ModelConfig(target="here", transport="thread"), target=pid)
        assert portal.predict("m", [1]) == [os.getpid()]
        portal.load("p", ModelConfig(target="helper:pid"))
        before = portal.predict("p", [1])
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                mine = portal.predict("m", [1])
            good = mine == [os.getpid()] and any("forked" in str(w.message) for w in caught)
            good = good and portal.predict("p", [1]) != before
            portal.close()
            os._exit(0 if good else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert portal.predict("m", [1]) == [os.getpid()]
        assert portal.predict("p", [1]) == before
        portal.close()
        print("fine")
    """
    helper = "import os\ndef pid(items):\n    return [os.getpid()] * len(items)\n"
    (tmp_path / "helper.py").write_text(helper)
    (tmp_path / "main.py").write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_a_program_that_forgets_its_portal_ends_by_itself() -> None:
    code = """
        from penstock import Portal
        from penstock.config.schema import ModelConfig
        portal = Portal()
        portal.load("m", ModelConfig(target="here", transport="thread"), target=lambda items: items)
        print(portal.predict("m", [1]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1]"


def test_close_ends_a_load_in_another_thread() -> None:
    at_gate, gate, unloaded = threading.Event(), threading.Event(), threading.Event()

    class LoadsAtTheGate:
        def load(self, device: str) -> None:
            at_gate.set()
            gate.wait(10)

        def predict(self, items: list[Any]) -> list[Any]:
            return items

        def unload(self) -> None:
            unloaded.set()

    portal = Portal()
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(portal.load, "m", config(), target=LoadsAtTheGate)
        assert at_gate.wait(5)
        closing = pool.submit(portal.close, 0.0)
        with pytest.raises(ModelNotReady):
            loading.result(5)
        gate.set()
        closing.result(5)
    assert unloaded.wait(5)


def test_a_request_that_meets_the_close_is_refused_and_not_forgotten() -> None:
    portal = Portal()
    portal.load("m", config(), target=double)
    inbox = portal._loop_thread.inbox
    portal.close()
    refused: list[Any] = []
    inbox.put("m", Item(1), refused.append)  # its thread looked before the close, and comes after it
    assert [r.error.code for r in refused] == ["model_not_ready"]
    with pytest.raises(ModelNotReady):
        portal.statistics("m")


def test_a_request_that_comes_when_the_backend_has_ended_is_refused_also_if_the_close_is_interrupted() -> None:
    class Ends(Echo):
        async def close(self, drain_s: float) -> None:
            closing.set()
            await asyncio.to_thread(gate.wait, 10)
            asyncio.get_running_loop().call_soon(inbox.put, "m", Item(1), late)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    gate, closing = threading.Event(), threading.Event()
    backend = Ends()
    portal = Portal(make=lambda: backend, word="streamer")
    inbox = portal._alive().inbox
    late = Future(inbox, the_item)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            portal.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert closing.wait(5)
    gate.set()
    with pytest.raises(ModelNotReady, match="the streamer is closed"):
        late.result(5)
    assert not backend.asked
    with pytest.raises(ModelNotReady):
        portal.statistics("m")


def test_a_rejected_request_raises_instead_of_hanging() -> None:
    class Odd:
        nbytes = "many"

    class Odder:
        @property
        def nbytes(self) -> int:
            raise OSError("gone")

    with Portal() as portal:
        portal.load("m", config(), target=lambda items: [1 for _ in items])
        with pytest.raises(PenstockError, match="OSError"):
            portal.submit("m", Odder()).result(5)
        assert portal.submit("m", Odd()).result(5) == 1
        assert portal.predict("m", [2]) == [1]


def test_a_blocking_call_on_the_portals_own_thread_is_refused() -> None:
    gate, told = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def gated(items: list[Any]) -> list[Any]:
        gate.wait(10)
        return items

    with Portal() as portal:
        portal.load("m", config(), target=gated)

        def again(_: object) -> None:
            try:
                portal.predict("m", [1])
            except RuntimeError as e:
                caught.append(e)
            told.set()

        portal.submit("m", 1).add_done_callback(again)
        gate.set()
        assert told.wait(5)
    assert "thread that delivers the answers" in str(caught[0])


def test_a_coroutine_on_the_loop_gets_the_answers_of_a_models_thread() -> None:
    def counted(items: list[int]) -> Iterator[list[int]]:
        for step in range(3):
            yield [x + step for x in items]

    async def parts(engine: Engine) -> list[int]:
        return [part async for part in engine.stream("counted", 1)]

    with Portal() as portal:
        portal.load("m", config(), target=double)
        portal.load("counted", config(), target=counted)
        assert portal.call(lambda engine: engine.infer("m", 1), timeout_s=10) == 2
        assert portal.call(lambda engine: engine.infer_many("m", [1, 2]), timeout_s=10) == [2, 4]
        assert portal.call(parts, timeout_s=10) == [1, 2, 3]


def test_a_request_that_meets_a_new_version_is_answered_by_it_where_that_runs() -> None:
    async def check_threads(_: Engine) -> None:
        asyncio.get_running_loop().set_debug(True)

    with Portal() as portal:
        portal.load("m", config(), target=double)
        before = portal._alive().inbox.of("m")
        portal.call(check_threads)
        new = ModelConfig(target="here", version="2", transport="inline")
        portal.load("m", new, target=lambda items: [f"{x} here" for x in items])
        future = Future(before, the_item)
        before.put("m", Item(1), future)  # by a caller that had found the way to the thread of the first version
        assert future.result(10) == "1 here"
