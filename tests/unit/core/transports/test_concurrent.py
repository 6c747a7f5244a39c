"""The worker's end for batches side by side, without a worker: what is written, when, and what is let go."""

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import metrics
from penstock.config.schema import BatchingConfig
from penstock.core.transports import concurrent
from penstock.core.transports.concurrent import ConcurrentBatches
from penstock.core.wire import messages as frames
from penstock.core.wire.messages import FromWorker, MessageReader, PartMessage, RunBatch, WorkerNews, write
from penstock.core.wire.slabs import SlabPool, lease
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.types import Item
from support.interleavings import Flag, Lock, Run, explore

LIMIT_S = 10.0


class Model:
    """Keeps what it was given until the test answers; `turn` is what its loop is to call next."""

    __penstock_concurrency__ = 8

    def __init__(self) -> None:
        self.values: list[list[Any]] = []
        self.answers: list[Callable[[list[tuple[int, Any]]], None]] = []
        self.turn: list[Callable[[], None]] = []

    def predict(self, items: list[Any]) -> list[Any]:
        return items

    def __penstock_submit__(self, values: list[Any], budgets_s: list[float | None], answer: Any) -> Any:
        self.values.append(values)
        self.answers.append(answer)
        return lambda: None

    def __penstock_soon__(self, call: Callable[[], None]) -> None:
        self.turn.append(call)

    def end_turn(self) -> None:
        for call in self.turn:
            call()
        self.turn = []


class Stage:
    def __init__(self, pool: SlabPool | None = None) -> None:
        self.model = Model()
        wrapped = PythonModel(self.model)
        wrapped.load("cpu")
        self.runner = BatchRunner(wrapped, wrapped.metadata("m", "1"), BatchingConfig())
        self.pool = pool or SlabPool(2**16)
        self.writes: list[list[Any]] = []
        self.news = threading.Event()
        self.concurrent = ConcurrentBatches(
            self.runner, self.pool, lambda message, box: write(message, box.buffers), self.send
        )

    def send(self, pieces: list[Any]) -> None:
        inbox = MessageReader(FromWorker, lambda *place: b"")
        self.writes.append([inbox.read(frame) for frame in frames.FrameDecoder().feed(b"".join(pieces))])
        if any(isinstance(message, WorkerNews) and message.let_go for message in self.writes[-1]):
            self.news.set()

    def run(self, id: int, count: int) -> None:
        items = [Item(n) for n in range(count)]
        self.concurrent.run(RunBatch(id, items, []), self.runner.decode(items), [])

    def run_with_slab(self, id: int, wrap: Callable[[Any], Any] = lambda view: view) -> None:
        """A batch of one item, whose payload lies in a slab, or what `wrap` makes of it."""
        view, alive = lease(self.pool.memory, 0, 100)
        items = [Item(wrap(view))]
        self.concurrent.run(RunBatch(id, items, []), self.runner.decode(items), [(0, alive)])

    @property
    def told(self) -> list[list[tuple[int, list[int], bool]]]:
        """Of each write: (batch, places, whether it was the last) of each part."""
        return [
            [(m.part.batch_id, m.part.at or [], m.part.final) for m in written if isinstance(m, PartMessage)]
            for written in self.writes
        ]


@pytest.fixture
def stage() -> Stage:
    metrics.drain()  # what other tests counted would be news
    return Stage()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is collected by chance."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_answers_of_one_loop_iteration_share_a_write(stage: Stage) -> None:
    stage.run(1, 3)
    stage.run(2, 1)
    stage.model.answers[0]([(2, "c")])
    stage.model.answers[1]([(0, "x")])
    stage.model.answers[0]([(0, "a")])
    assert (len(stage.model.turn), stage.writes) == (1, [])
    stage.model.end_turn()
    stage.model.answers[0]([(1, "b")])
    stage.model.end_turn()
    assert stage.told == [[(1, [2, 0], False), (2, [0], True)], [(1, [1], True)]]


def test_close_waits_for_nothing_else(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = stage.pool

    def make(run: Run) -> list[Callable[[], object]]:
        own = SimpleNamespace(Lock=lambda: Lock(run), Event=lambda: Flag(run))
        monkeypatch.setattr(concurrent, "threading", own)
        stage = Stage(pool)
        stage.runner.model.soon = None
        stage.run(1, 1)
        return [stage.concurrent.attend, stage.concurrent.stop, lambda: stage.model.answers[0]([(0, "a")])]

    monkeypatch.setattr(ConcurrentBatches, "send_news", lambda self: None)
    explore([concurrent], make)


def test_a_slab_in_garbage_is_let_go_without_another_batch(stage: Stage, uncollected: None) -> None:
    def in_a_circle(view: Any) -> list[Any]:
        box = [view]
        box.append(box)
        return box

    stage.runner.model.soon = None
    stage.run_with_slab(1, in_a_circle)
    stage.model.values.clear()
    stage.model.answers.pop()([(0, "a")])
    ((part,),) = stage.writes
    assert part.held == [0]
    main = threading.Thread(target=stage.concurrent.attend, daemon=True)
    main.start()
    assert stage.news.wait(LIMIT_S)
    stage.concurrent.stop()
    main.join()
    assert [m.let_go for written in stage.writes for m in written if isinstance(m, WorkerNews)] == [[0]]
