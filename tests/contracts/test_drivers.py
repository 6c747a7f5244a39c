"""Every driver of a Batcher keeps one contract: on the event loop of a portal, and in the threads of the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from random import Random
from typing import Any

import pytest
from msgspec import structs

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.batching.entry import Dispatch, Entry
from penstock.core.batching.scheduler import Scheduler
from penstock.core.engine import direct, engine, handle, inbox
from penstock.core.engine.rules import policy_of
from penstock.core.portal import portal as portal_module
from penstock.core.portal import waiters
from penstock.core.portal.portal import Portal
from penstock.core.portal.waiters import Future, every_item
from penstock.errors import (
    DeadlineExceeded,
    ItemFailed,
    ModelNotReady,
    PenstockError,
    QueueFull,
    QueueTimeout,
    RunTimeout,
    WorkerDied,
)
from penstock.types import Item, ItemResult
from support import devices
from support.interrupts import interrupt

WAIT_S = 3.0
Load = Callable[..., Portal]


class Witness(Scheduler):
    """A Scheduler that records its calls, which must come one at a time."""

    made: list[Witness]

    def __init__(self, policy: Any, **keys: Any) -> None:
        self.keys, self.calls, self.busy = keys, [], threading.Lock()
        super().__init__(policy, **keys)
        self.made.append(self)

    @property
    def sizes(self) -> list[int]:
        """Rows of its batches."""
        polls = [found for name, _, found in self.calls if name == "poll"]
        return [sum(rows for _, _, rows in event[2]) for found in polls for event in found if type(event) is tuple]


def _call(scheduler: Scheduler, name: str, arguments: tuple[Any, ...]) -> Any:
    """What a method returns or raises, as values that can be compared."""
    copies = (structs.replace(a) if isinstance(a, Entry) else a for a in arguments)
    try:
        found = getattr(Scheduler, name)(scheduler, *copies)
    except PenstockError as e:
        return type(e)
    return [_plain(event) for event in found] if name == "poll" else found


def _plain(event: Any) -> Any:
    if not isinstance(event, Dispatch):
        return event
    return event.batch_id, event.slot, [(e.id, e.start, e.rows) for e in event.entries], event.reason


def _witnessed(name: str) -> Callable[..., Any]:
    def method(self: Witness, *arguments: Any) -> Any:
        assert self.busy.acquire(blocking=False), f"{name} while another thread is in the scheduler"
        given = tuple(structs.replace(a) if isinstance(a, Entry) else a for a in arguments)
        try:
            found = getattr(Scheduler, name)(self, *arguments)
        except PenstockError as e:
            self.calls.append((name, given, type(e)))
            raise
        else:
            self.calls.append((name, given, [_plain(event) for event in found] if name == "poll" else found))
            return found
        finally:
            self.busy.release()

    return method


for each in ("prime", "offer", "cancel", "slot_up", "slot_down", "slot_retired", "complete", "poll"):
    setattr(Witness, each, _witnessed(each))


@pytest.fixture(params=["loop", "direct"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "loop":
        monkeypatch.setattr(engine, "inbox_of", lambda loop: None)  # the engine finds no portal to which threads belong
    monkeypatch.setattr(handle, "Scheduler", Witness)
    monkeypatch.setattr(Witness, "made", [], raising=False)
    return str(request.param)


@pytest.fixture
def load(driver: str) -> Iterator[Load]:
    """Loads a model into a new portal: `load(function, **batching)`. In the end, a pure scheduler that gets the same
    calls must decide the same."""
    portals: list[Portal] = []
    configs: list[BatchingConfig] = []

    def start(target: Any, instances: int = 1, **keys: Any) -> Portal:
        configs.append(BatchingConfig(**{"max_batch_size": 4, "max_hold_s": 0.0, **keys}))
        portals.append(Portal())
        config = ModelConfig(target="here", transport="thread", instances=instances, batching=configs[-1])
        portals[-1].load("m", config, target=target)
        return portals[-1]

    yield start
    for portal in portals:
        portal.close(1.0)
    for config, witness in zip(configs, Witness.made, strict=True):
        pure = Scheduler(policy_of(config), **witness.keys)
        for name, arguments, found in witness.calls:
            assert _call(pure, name, arguments) == found, name


class Gate:
    """A model that runs while its gate is shut."""

    def __init__(self) -> None:
        self.runs, self.open = threading.Semaphore(0), threading.Event()
        self.ran: list[list[Any]] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        self.ran.append(items)
        self.runs.release()
        assert self.open.wait(WAIT_S)
        return items

    def running(self) -> None:
        """Waits until a batch runs."""
        assert self.runs.acquire(timeout=WAIT_S)


class Once:
    """A caller that must get one response."""

    def __init__(self) -> None:
        self.results: list[ItemResult] = []

    def accepted(self, ticket: Any) -> None: ...

    def __call__(self, result: ItemResult) -> None:
        self.results.append(result)


def many(items: list[Any], budget_s: float | None = None) -> Item:
    return Item(items, rows=len(items), many=True, budget_s=budget_s)


def double(items: list[Any]) -> list[Any]:
    return [ItemFailed("negative") if x < 0 else 2 * x for x in items]


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("deaths", [0, 6])
def test_every_request_is_answered_once_in_batches_that_the_scheduler_decides(
    load: Load, instances: int, deaths: int
) -> None:
    ran: list[int] = []
    fatal = threading.Semaphore(deaths)

    def model(items: list[int]) -> list[Any]:
        if any(x % 50 == 49 for x in items) and fatal.acquire(blocking=False):
            raise SystemExit
        ran.append(len(items))
        threading.Event().wait(0.0005 * (items[0] % 3))
        return double(items)

    portal = load(model, instances, max_queue=10_000)
    counted: list[Once] = []
    found: Counter[str] = Counter()

    def right(values: list[Any], given: list[int]) -> None:
        for value, x in zip(values, given, strict=True):
            found["died"] += isinstance(value, WorkerDied)
            assert value == 2 * x or (x < 0 and isinstance(value, ItemFailed)) or isinstance(value, WorkerDied)

    def call(seed: int) -> None:
        chance = Random(seed)
        for _ in range(60):
            items = [chance.randrange(-5, 1000) for _ in range(chance.randint(1, 6))]
            kind = chance.choice(["predict", "late", "timeout", "cancel", "sink"])
            try:
                if kind == "predict":
                    right(portal.predict("m", items, return_exceptions=True, priority=seed % 2), items)
                elif kind == "late":
                    budget_s = chance.choice([1e-4, 2e-3, WAIT_S])
                    late = portal.submit_item_as("m", many(items, budget_s), every_item)
                    right(late.result(WAIT_S), items)
                elif kind == "timeout":
                    right(portal.predict("m", items, return_exceptions=True, timeout_s=1e-3), items)
                elif kind == "cancel":
                    future = portal.submit_item_as("m", many(items), every_item)
                    threading.Event().wait(chance.choice([0, 1e-3]))
                    future.cancel()
                    right(future.result(WAIT_S), items)
                else:
                    counted.append(Once())
                    portal.submit_item("m", many(items), counted[-1])
                found["right"] += 1
            except (DeadlineExceeded, CancelledError) as e:
                found[type(e).__name__] += 1

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(call, seed) for seed in range(8)]:
            done.result(60)
    portal.close()
    assert {len(once.results) for once in counted} == {1}
    assert found["right"] > 100
    assert found["CancelledError"] > 0
    assert found["died"] <= 4 * deaths
    [witness] = Witness.made
    assert max(witness.sizes) <= 4
    if not deaths:
        assert Counter(ran) == Counter(witness.sizes)
        assert found["died"] == 0


def test_the_next_batch_of_a_model_that_leaves_the_interpreter_does_not_wait_for_answers(load: Load) -> None:
    began: list[int] = []  # the first item of each batch
    early = threading.Event()

    def model(items: list[int]) -> list[int]:
        began.append(items[0])
        time.sleep(0.03)
        return items

    def answered(future: Future) -> None:
        if began[-1] > future.result():
            early.set()

    portal = load(model, max_queue=10_000)
    portal.predict("m", [-8] * 4)
    submitted = 0
    futures: deque[Future] = deque()
    deadline_s = time.monotonic() + 60
    while not early.is_set() and time.monotonic() < deadline_s:
        futures.extend(portal.submit("m", submitted + i) for i in range(4))
        submitted += 4
        futures[-1].add_done_callback(answered)
        if len(futures) > 16:
            assert [futures.popleft().result(WAIT_S) for _ in range(4)] == list(range(submitted - 20, submitted - 16))
    assert early.is_set()
    assert [future.result(WAIT_S) for future in futures] == list(range(submitted - len(futures), submitted))


def test_deadlines_and_timeouts_are_kept_while_the_model_runs(load: Load) -> None:
    model = Gate()
    portal = load(model, timeout_s=0.2)
    running = portal.submit("m", "running", budget_s=0.05)
    model.running()
    with pytest.raises(DeadlineExceeded, match="during the run"):
        running.result(WAIT_S)
    for tenths in range(20):  # of a ms, because timers of loops may be rounded
        late = portal.submit("m", "late", budget_s=0.003 + tenths / 1e4)
        assert type(late.exception(WAIT_S)) is DeadlineExceeded
    waits = portal.submit("m", "waits")
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.02 s"):
        portal.predict("m", ["left"], timeout_s=0.02)
    assert type(waits.exception(WAIT_S)) is QueueTimeout
    model.open.set()
    assert portal.predict("m", ["next"]) == ["next"]
    assert model.ran == [["running"], ["next"]]


def test_a_full_queue_refuses_at_once_and_a_caller_that_leaves_makes_room_while_the_model_runs(load: Load) -> None:
    model = Gate()
    portal = load(model, max_queue=8)
    first = portal.submit("m", 0)
    model.running()
    waiting = [portal.submit("m", i) for i in range(1, 9)]
    over = portal.submit("m", 9)
    assert isinstance(over.exception(WAIT_S), QueueFull)
    assert waiting[2].cancel()
    assert waiting[7].cancel()
    taken = [portal.submit("m", i) for i in (10, 11, 12)]
    assert isinstance(taken[2].exception(WAIT_S), QueueFull)
    assert not any(future.done() for future in taken[:2])
    model.open.set()
    done = [first, *(f for f in waiting if not f.cancelled()), *taken[:2]]
    assert [future.result(WAIT_S) for future in done] == [0, 1, 2, 4, 5, 6, 7, 10, 11]
    assert sorted(x for batch in model.ran for x in batch) == [0, 1, 2, 4, 5, 6, 7, 10, 11]


def test_a_request_that_is_held_runs_at_its_time_and_a_full_batch_at_once(load: Load) -> None:
    ran: list[int] = []
    portal = load(lambda items: [ran.append(len(items)) or x for x in items], policy="fixed", max_hold_s=0.05)
    assert portal.predict("m", [1]) == [1]
    patient = load(lambda items: items, policy="fixed", max_hold_s=1000.0, timeout_s=2000.0)
    futures = [patient.submit("m", i) for i in range(4)]
    assert [future.result(WAIT_S) for future in futures] == [0, 1, 2, 3]
    assert patient.predict("m", range(8)) == list(range(8))
    held = patient.submit("m", 1)
    assert held.cancel()
    assert patient.predict("m", range(4)) == list(range(4))


@pytest.mark.parametrize("waits_for", ["instance", "others"])
def test_cancelled_coroutines_leave_the_queue_and_others_are_answered(load: Load, waits_for: str) -> None:
    model = Gate()
    hold = {"policy": "fixed", "max_hold_s": 1000.0, "timeout_s": 2000.0} if waits_for == "others" else {}
    portal = load(model, max_batch_size=64, **hold)
    chance = Random(waits_for)

    async def call(item: int) -> Any:
        return await portal.submit("m", item)

    async def scenario() -> list[int]:
        kept = [asyncio.create_task(call(-1))]
        if waits_for == "instance":
            await asyncio.to_thread(model.running)
        for round_ in range(8):
            tasks = [asyncio.create_task(call(24 * round_ + i)) for i in range(24)]
            await asyncio.sleep(chance.choice([0, 0.001]))
            stay = max(0, 4 * round_ - 16)
            kept += tasks[:stay]
            for task in tasks[stay:]:
                task.cancel()
        await asyncio.sleep(0)
        model.open.set()
        kept += [asyncio.create_task(call(1000 + i)) for i in range(64 - len(kept))]
        return [await asyncio.wait_for(task, WAIT_S) for task in kept]

    answered = asyncio.run(scenario())
    assert answered == [-1, *range(120, 124), *range(144, 152), *range(168, 180), *range(1000, 1039)]
    assert sorted(x for batch in model.ran for x in batch) == answered


def test_a_portal_that_closes_answers_what_it_accepted(load: Load) -> None:
    model = Gate()
    portal = load(model)
    futures = [portal.submit("m", i) for i in range(20)]
    model.running()
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(portal.close)
        model.open.set()
        closing.result(WAIT_S)
    assert [future.result(0) for future in futures] == list(range(20))
    with pytest.raises(ModelNotReady):
        portal.submit("m", 1)


def test_a_portal_that_closes_at_once_leaves_no_caller_waiting(load: Load) -> None:
    model = Gate()
    portal = load(model, instances=2)
    with ThreadPoolExecutor(12) as pool:
        calls = [pool.submit(portal.predict, "m", [i]) for i in range(12)]
        model.running()
        model.running()
        portal.close(0.0)
        errors = {type(call.exception(WAIT_S)) for call in calls}
    assert errors <= {ModelNotReady, WorkerDied}
    model.open.set()


@pytest.mark.parametrize("broken", ["poll", "complete", "offer", "cancel"])
def test_a_scheduler_that_breaks_ends_every_request(
    load: Load, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Gate()
    portal = load(model, instances=2)
    first = portal.submit("m", 0)
    model.running()
    waiting = [portal.submit("m", i) for i in range(1, 20)]

    def bug(self: Scheduler, *arguments: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Witness, broken, bug)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(portal.predict, "m", [i]) for i in range(8)]
        waiting[0].cancel()
        model.open.set()
        assert not wait([first, *waiting, *calls], WAIT_S).not_done
    assert "a bug" in caplog.text
    assert broken == "cancel" or any(call.exception() for call in calls)


def test_an_item_that_ends_its_thread_fails_alone_and_the_next_thread_answers(load: Load) -> None:
    loaded: list[object] = []

    class Model:
        def load(self, device: str) -> None:
            loaded.append(self)

        def predict(self, items: list[Any]) -> list[Any]:
            if "exit" in items:
                raise SystemExit(1)
            return items

    portal = load(Model)
    found = portal.predict("m", [1, "exit", 3, 4, 5], return_exceptions=True)
    assert [type(value) for value in found] == [int, WorkerDied, int, int, int]
    assert portal.predict("m", [6]) == [6]
    assert len(loaded) > 1


def test_batches_of_a_model_on_a_device_overlap_and_a_lost_device_is_replaced(load: Load) -> None:
    pytest.importorskip("torch")
    portal = load(devices.model, max_batch_size=4)
    for _ in range(4):
        futures = [portal.submit("m", [row, row]) for row in range(60)]
        assert [future.result(30).tolist() for future in futures] == [[2 * row, 2 * row] for row in range(60)]
    assert devices.made[-1].overlap_s() > 0
    with pytest.raises(ItemFailed, match="raised ValueError"):
        portal.predict("m", [[devices.RAISES, 0]])
    with pytest.raises(WorkerDied):
        portal.predict("m", [[devices.LOSES, 0]])
    assert portal.predict("m", [[1, 2]])[0].tolist() == [2, 4]


def test_a_batch_that_hangs_is_given_up_and_its_late_response_dropped(load: Load) -> None:
    hangs, over = threading.Event(), threading.Event()

    def model(items: list[Any]) -> list[Any]:
        if "hang" in items:
            hangs.set()
            assert over.wait(WAIT_S)
            return ["late"] * len(items)
        return items

    portal = load(model, run_timeout_s=0.1)
    hanging = portal.submit("m", "hang")
    assert hangs.wait(WAIT_S)
    others = [portal.submit("m", i) for i in range(10)]
    assert [other.result(WAIT_S) for other in others] == list(range(10))
    assert isinstance(hanging.exception(WAIT_S), RunTimeout)
    once = Once()
    portal.submit_item("m", Item(1), once)
    over.set()
    assert portal.predict("m", list(range(20))) == list(range(20))
    assert [result.body for result in once.results] == [1]


def test_instances_run_side_by_side_and_come_and_go(load: Load) -> None:
    def model(items: list[Any]) -> list[Any]:
        if isinstance(items[0], threading.Barrier):
            items[0].wait(WAIT_S)
        return items

    portal = load(model, instances=2, max_batch_size=1, max_queue=1000)
    for instances in (2, 3, 2):
        portal.call(lambda backend, number=instances: backend.scale("m", number))
        for _ in range(10):
            barrier = threading.Barrier(instances)
            futures = [portal.submit("m", barrier) for _ in range(instances)]
            assert [future.result(WAIT_S) for future in futures] == [barrier] * instances
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(portal.predict, "m", [i, i]) for i in range(400)]
        portal.call(lambda backend: backend.scale("m", 1))
        assert [call.result(WAIT_S) for call in calls] == [[i, i] for i in range(400)]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_callback_that_raises_costs_nobody_a_response(load: Load, error: type[BaseException]) -> None:
    model = Gate()
    portal = load(model)

    def fails(_: object) -> None:
        raise error("in a callback")

    with ThreadPoolExecutor(8) as pool:
        first = portal.submit("m", 0)
        model.running()
        futures = [portal.submit("m", i) for i in range(8)]
        calls = [pool.submit(portal.predict, "m", [i]) for i in range(8)]
        for future in futures[1::2]:
            future.add_done_callback(fails)
        model.open.set()
        assert [future.result(WAIT_S) for future in futures] == list(range(8))
        assert [call.result(WAIT_S) for call in calls] == [[i] for i in range(8)]
    assert first.result(WAIT_S) == 0
    assert portal.predict("m", [1]) == [1]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("call", ["predict", "submit"])
def test_an_interrupt_at_any_instruction_of_a_call_costs_later_calls_nothing(load: Load, call: str, busy: bool) -> None:
    model = Gate()
    model.open.set()
    portal = load(model, max_queue=50)
    assert threading.current_thread() is threading.main_thread()
    for instruction in range(1, 2000):
        if busy:
            model.open.clear()
            held = portal.submit("m", "held")
            model.running()
        try:
            with interrupt(instruction, (direct, inbox, portal_module, waiters)) as raised:
                getattr(portal, call)("m", [-1], **({"timeout_s": 0.0} if busy and call == "predict" else {}))
        except KeyboardInterrupt:
            pass
        except DeadlineExceeded:
            assert busy
        if busy:
            assert type(portal.submit("m", "late", budget_s=1e-6).exception(WAIT_S)) is DeadlineExceeded
            model.open.set()
            assert held.result(WAIT_S) == "held"
        assert portal.predict("m", [instruction], timeout_s=WAIT_S) == [instruction]
        model.runs = threading.Semaphore(0)
        if not raised:
            break
    assert instruction > 20
    assert not raised
