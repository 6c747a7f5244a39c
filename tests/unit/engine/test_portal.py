from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.engine.portal import Portal
from penstock.errors import ModelNotFound, ModelNotReady, PenstockError
from penstock.types import Item


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


def test_the_first_failed_item_raises_unless_exceptions_are_asked_for() -> None:
    with Portal() as portal:
        portal.load("m", config(), target=double)
        with pytest.raises(Exception, match=r"ValueError|negative"):
            portal.predict("m", [1, -1])
        results = portal.predict("m", [1, -1], return_exceptions=True)
        assert results[0] == 2
        assert isinstance(results[1], Exception)
        assert portal.predict("m", []) == []


def test_submit_gives_a_real_future() -> None:
    gate = threading.Event()

    def gated(items: list[Any]) -> list[Any]:
        gate.wait(10)
        return items

    with Portal() as portal:
        portal.load("m", config(max_batch_size=1), target=gated)
        first, second, third = (portal.submit("m", i) for i in range(3))
        assert third.cancel()
        gate.set()
        assert first.result(10) == 0
        assert first.result(10) == 0
        assert second.result(10) == 1
        with pytest.raises(ModelNotFound):
            portal.submit("n", 1).result(10)


def test_a_closed_portal_says_so() -> None:
    portal = Portal()
    portal.close()
    portal.close()
    with pytest.raises(ModelNotReady, match="closed"):
        portal.predict("m", [1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_the_child_starts_workers_of_its_own_and_the_parents_go_on(tmp_path: Path) -> None:
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


def test_a_cancelled_future_counts_as_done() -> None:
    gate = threading.Event()

    def gated(items: list[Any]) -> list[Any]:
        gate.wait(10)
        return items

    with Portal() as portal:
        portal.load("m", config(max_batch_size=1), target=gated)
        running, waiting = portal.submit("m", 1), portal.submit("m", 2)
        assert waiting.cancel()
        done, _ = concurrent.futures.wait([waiting], timeout=5)
        gate.set()
        assert done == {waiting}
        assert running.result(5) == 1


def test_close_ends_a_load_that_goes_on_in_another_thread() -> None:
    at_gate, gate = threading.Event(), threading.Event()

    class LoadsAtTheGate:
        def load(self, device: str) -> None:
            at_gate.set()
            gate.wait(10)

        def predict(self, items: list[Any]) -> list[Any]:
            return items

    portal = Portal()
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(portal.load, "m", config(), target=LoadsAtTheGate)
        assert at_gate.wait(5)
        closing = pool.submit(portal.close, 0.0)
        with pytest.raises(ModelNotReady):
            loading.result(5)
        gate.set()
        closing.result(5)


def test_a_request_that_meets_the_close_is_refused_and_not_forgotten() -> None:
    portal = Portal()
    portal.load("m", config(), target=double)
    inbox = portal._life.inbox
    portal.close()
    refused: list[Any] = []
    inbox.put("m", Item(1), refused.append, None, 0)  # its thread looked before the close, and comes after it
    assert [r.error.code for r in refused] == ["model_not_ready"]
    with pytest.raises(ModelNotReady):
        portal.statistics("m")


def test_what_cannot_be_queued_is_an_error_and_no_hang() -> None:
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
    assert "thread of the answers" in str(caught[0])
