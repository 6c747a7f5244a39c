import pytest

from penstock.config.schema import ModelConfig
from penstock.core.transports.slot import WorkerSlot
from penstock.core.worker.spec import WorkerSpec
from penstock.errors import LoadFailed, RunTimeout, WorkerDied
from penstock.types import Batch, BatchPart, Item, ItemResult, ModelMetadata, Ready
from support.clock import VirtualClock


class Timer:
    """One call of the loop, which can be cancelled."""

    def __init__(self, callback):
        self.callback = callback

    def __call__(self):
        if self.callback is not None:
            self.callback()

    def cancel(self):
        self.callback = None


class Loop:
    """The part of an event loop that a slot uses, on a virtual clock."""

    def __init__(self, clock):
        self.time = self.clock = clock

    def call_at(self, when, callback, *arguments):
        timer = Timer(lambda: callback(*arguments))
        self.clock.call_at(when, timer)
        return timer

    def call_later(self, seconds, callback, *arguments):
        return self.call_at(self.clock.now + seconds, callback, *arguments)


class Place(WorkerSlot):
    """A slot whose worker does what the test says; also its own listener."""

    fails = True
    hangs = False
    load_s = 0.0

    def __init__(self, clock):
        super().__init__(WorkerSpec("m", "1", ModelConfig(target="m:m"), "m:m"), 0, "cpu")
        self.loop = Loop(clock)
        self.listener = self
        self.idle = type("Event", (), {"set": lambda _: None, "clear": lambda _: None})()
        self.launches = []
        self.waits = []
        self.errors = []
        self.used = []

    def begin(self):
        """Starts the first worker; `start` would need a running loop."""
        self._launch()

    def launch(self):
        self.launches.append(self.loop.time())
        if self.hangs:
            return
        if self.fails is RuntimeError:
            raise RuntimeError("can't start new thread")
        if self.fails:
            raise LoadFailed("no")
        ready = Ready(ModelMetadata("m", "1"))
        if self.load_s:
            self.loop.call_later(self.load_s, self.is_up, ready)
        else:
            self.is_up(ready)

    def submit(self, batch):
        return []

    def kill(self, why):
        self.down(why)

    def slot_up(self, slot, ready):
        pass

    def slot_used(self, slot, requests):
        self.used.append(requests)

    def slot_down(self, slot, error, retry_in_s):
        self.waits.append(retry_in_s)
        self.errors.append(error)


@pytest.fixture
def place():
    return Place(VirtualClock())


def test_a_worker_that_does_not_come_up_is_tried_ever_more_slowly_up_to_30_s(place):
    place.begin()
    place.loop.clock.advance(200)
    doubled = [0.1 * 2**n for n in range(9)]
    assert place.waits[:12] == pytest.approx([*doubled, 30, 30, 30])
    assert place.launches[1:4] == pytest.approx([0.1, 0.3, 0.7])


def answer(place, number=1):
    place.send(Batch(number, 0, [Item(1)]), lambda part: None)
    place.answered(BatchPart(number, [ItemResult()]))


def test_a_worker_that_comes_up_but_never_answers_is_tried_ever_more_slowly(place):
    place.fails = False
    place.begin()
    for _ in range(3):
        place.down(WorkerDied("it died before it answered"))
        place.loop.clock.advance(1)
    assert place.waits == pytest.approx([0.1, 0.2, 0.4])


@pytest.mark.parametrize("load_s", [0.0, 0.15, 0.3, 1.2])
def test_after_an_answered_batch_deaths_cost_no_pause_and_too_many_of_them_at_most_the_time_of_a_load(place, load_s):
    place.fails = False
    place.load_s = load_s
    place.begin()
    place.loop.clock.advance(load_s)
    answer(place)
    for _ in range(30):  # restart.deaths
        place.down(WorkerDied("poison"))
        place.loop.clock.advance(load_s)
        assert place.up
    assert place.waits == [0] * 30
    longest_s = min(load_s, 1.0)  # for which requests wait
    for _ in range(6):
        place.down(WorkerDied("poison"))
        place.loop.clock.advance(longest_s + load_s + 0.01)
        answer(place)  # is no reason to forget the deaths
    assert place.waits[30:] == pytest.approx([min(pause, longest_s) for pause in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0)])
    place.loop.clock.advance(60)
    place.down(WorkerDied("poison"))
    assert place.waits[-1] == 0


def test_a_first_request_that_kills_its_worker_costs_at_most_the_time_of_a_load(place):
    place.fails = False
    place.load_s = 0.3
    place.begin()
    for number in range(5):
        place.loop.clock.advance(1)
        place.send(Batch(number, 0, [Item(1)]), lambda part: None)
        place.down(WorkerDied("poison"))
    assert place.waits == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])
    place.fails = True
    place.loop.clock.advance(3)
    assert place.waits[5:8] == pytest.approx([0.3, 0.6, 1.2])  # it no longer loads


def test_a_load_that_fails_after_a_death_is_tried_again_ever_more_slowly(place):
    place.fails = False
    place.begin()
    answer(place)
    place.fails = True
    place.down(WorkerDied("killed"))
    place.loop.clock.advance(1)
    assert place.waits == pytest.approx([0, 0.1, 0.2, 0.4, 0.8])


def test_a_batch_that_is_ahead_has_its_time_from_when_it_begins(place):
    place.fails = False
    place.begin()
    heard = []
    for number in (1, 2):
        place.send(Batch(number, 0, [Item(1)]), heard.append)
    place.loop.clock.advance(59)
    place.answered(BatchPart(1, [ItemResult()]))
    place.loop.clock.advance(59)
    assert not place.waits
    place.loop.clock.advance(1.01)
    assert [(part.batch_id, type(part.error)) for part in heard] == [(2, type(None)), (2, RunTimeout)]
    answer, death = heard
    assert not answer.final
    assert answer.results[0].error is death.error  # it is known which item hangs: it does not run again
    assert "run_timeout_s=60" in death.error.message


def test_a_batch_may_have_less_time_than_run_timeout_s(place):
    place.fails = False
    place.begin()
    answer(place)
    heard = []
    place.loop.clock.advance(1)
    place.send(Batch(2, 0, [Item(1), Item(2)], limit_s=6.0), heard.append)
    place.loop.clock.advance(5.9)
    assert not heard
    place.loop.clock.advance(0.2)
    assert [type(part.error) for part in heard] == [RunTimeout]
    assert "run_timeout_s=60" in heard[0].error.message
    answer(place, 3)  # others have all of it
    place.send(Batch(4, 0, [Item(1)], limit_s=600.0), heard.append)
    place.loop.clock.advance(60.1)
    assert len(heard) == 3


def test_a_hanging_load_times_out_and_is_retried(place):
    place.hangs = True
    place.begin()
    place.loop.clock.advance(599.9)
    assert not place.errors
    place.loop.clock.advance(0.11)
    assert type(place.errors[0]) is LoadFailed
    assert "load_timeout_s=600" in place.errors[0].message
    place.loop.clock.advance(0.2)
    assert place.launches[1:] == pytest.approx([600.1])


def test_a_load_that_ends_in_time_leaves_no_timer_behind(place):
    place.hangs = True
    place.begin()
    place.loop.clock.advance(599)
    place.is_up(Ready(ModelMetadata("m", "1")))
    place.loop.clock.advance(5)
    assert place.up
    assert not place.errors


def test_a_worker_that_cannot_be_started_for_any_reason_is_tried_anew(place):
    place.fails = RuntimeError
    place.begin()
    assert type(place.errors[0]) is LoadFailed
    assert "can't start new thread" in place.errors[0].message
    place.fails = False
    place.loop.clock.advance(0.2)
    assert place.up


# ---- batches side by side


@pytest.fixture
def concurrent(place):
    place.fails, place.hangs = False, True
    place.begin()
    place.is_up(Ready(ModelMetadata("m", "1"), concurrency=8))
    return place


def send(place, number, items=1):
    heard = []
    place.send(Batch(number, 0, [Item(1)] * items), heard.append)
    return heard


def part(number, *places, final=True):
    return BatchPart(number, [ItemResult()] * len(places), at=list(places), final=final)


def test_batches_side_by_side_are_answered_in_any_order_and_in_parts(concurrent):
    for number in (1, 2, 3):
        send(concurrent, number, items=2)
    assert concurrent.answered(part(2, 1, 0)).batch.id == 2
    assert concurrent.answered(part(1, 1, final=False)).batch.id == 1
    concurrent.answered(part(3, 0, 1))
    concurrent.answered(part(1, 0))
    assert not concurrent.sent


@pytest.mark.parametrize(
    "nonsense",
    [
        part(2, 0),
        part(1, 0),
        part(1, 0, 2, final=False),
        part(1, 0, 0, 1),
        part(1, 0, 1, final=False),
        part(1, -1, final=False),
        BatchPart(1, [ItemResult()] * 2, at=[0]),
        BatchPart(1, [ItemResult()] * 2),
    ],
    ids=["no such batch", "too few", "no such place", "twice", "not final", "negative", "not aligned", "no places"],
)
def test_answers_that_do_not_fit_are_nonsense(concurrent, nonsense):
    send(concurrent, 1, items=2)
    with pytest.raises(ValueError, match="do not fit"):
        concurrent.answered(nonsense)


def test_a_place_is_answered_once(concurrent):
    send(concurrent, 1, items=2)
    concurrent.answered(part(1, 0, final=False))
    with pytest.raises(ValueError, match="do not fit"):
        concurrent.answered(part(1, 0, 1))


def test_a_death_affects_all_concurrent_batches(concurrent):
    heard = [send(concurrent, number) for number in (1, 2, 3)]
    concurrent.answered(part(2, 0))
    concurrent.down(WorkerDied("signal 9"))
    assert [[(p.started, type(p.error)) for p in parts] for parts in heard] == [
        [(True, WorkerDied)],
        [],
        [(True, WorkerDied)],
    ]


def test_a_worker_silent_for_run_timeout_s_is_killed_with_its_batches(concurrent):
    first = send(concurrent, 1)
    concurrent.loop.clock.advance(50)
    second = send(concurrent, 2)
    concurrent.loop.clock.advance(9.9)
    assert not first
    concurrent.loop.clock.advance(0.2)
    assert [type(parts[0].error) for parts in (first, second)] == [RunTimeout, RunTimeout]


def test_a_hanging_concurrent_batch_kills_its_worker_after_twice_run_timeout_s(concurrent):
    hung = send(concurrent, 1)
    for number in range(2, 13):
        send(concurrent, number)
        concurrent.loop.clock.advance(10)
        concurrent.answered(part(number, 0))
    assert not hung
    concurrent.loop.clock.advance(10.1)
    assert "run_timeout_s=60" in hung[0].results[0].error.message  # it hung alone


def test_idle_time_does_not_count_as_silence(concurrent):
    for number in (1, 2, 3):
        send(concurrent, number)
        concurrent.loop.clock.advance(59)
        concurrent.answered(part(number, 0))
        concurrent.loop.clock.advance(100)
    assert concurrent.up
    assert not concurrent.errors


def test_a_batch_after_idle_time_gets_its_full_timeout(concurrent):
    send(concurrent, 1)
    concurrent.loop.clock.advance(10)
    concurrent.answered(part(1, 0))
    concurrent.loop.clock.advance(45)
    send(concurrent, 2)
    concurrent.loop.clock.advance(50)
    assert not concurrent.errors
    assert concurrent.up


def test_a_worker_that_comes_up_narrow_is_narrow(concurrent):
    concurrent.fails = concurrent.hangs = False
    concurrent.down(WorkerDied("signal 9"))
    concurrent.loop.clock.advance(1)
    send(concurrent, 1)
    send(concurrent, 2)
    with pytest.raises(ValueError, match="do not fit"):
        concurrent.answered(BatchPart(2, [ItemResult()]))


def test_the_use_of_a_worker_is_reported_once_a_second_and_begins_anew_with_the_next_worker(place):
    place.fails = False
    place.begin()
    for number in range(1, 10):
        answer(place, number)
        place.loop.clock.advance(0.25)
    assert place.used == [1, 5, 9]
    place.down(WorkerDied("killed"))
    place.loop.clock.advance(1)
    answer(place, 30)
    assert place.used[-1] == 1
