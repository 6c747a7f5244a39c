import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.portal.waiters import SyncWaiter
from penstock.errors import ConfigError
from penstock.torchpipe import Status, boundary, is_registered, list_backends, pipe, register_backend
from penstock.torchpipe.boundary import Event, is_rows, to_array, to_tensor


def test_a_tensor_and_its_array_share_their_memory() -> None:
    tensor = torch.zeros(1, 2)
    array = to_array(tensor)
    array[0, 0] = 1
    assert tensor[0, 0] == 1
    back = to_tensor(array)
    back[0, 1] = 2
    assert tensor[0, 1] == 2


def test_gradients_and_bfloat16_are_dropped() -> None:
    assert to_array(torch.ones(1, requires_grad=True)).tolist() == [1]
    assert to_array(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32


def test_lists_of_tensors_are_converted_and_others_are_unchanged() -> None:
    assert [a.tolist() for a in to_array([torch.ones(1), torch.zeros(1)])] == [[1], [0]]
    assert [t.tolist() for t in to_tensor([np.ones(1), np.zeros(1)])] == [[1], [0]]
    for value in ([1, "a"], [], "text", None, {"a": 1}):
        assert to_array(value) is value
        assert to_tensor(value) is value


def test_read_only_and_reversed_arrays_are_copied() -> None:
    fixed = np.ones((1, 2))
    fixed.flags.writeable = False
    copied = to_tensor(fixed)
    copied += 1
    assert fixed.tolist() == [[1, 1]]
    assert to_tensor(np.arange(3)[::-1]).tolist() == [2, 1, 0]


def test_arrays_that_no_tensor_can_hold_stay_arrays() -> None:
    words = np.array(["a", "b"])
    assert to_tensor(words) is words


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.zeros((1, 3, 4, 4)), True),
        (np.zeros((1, 1000)), True),
        ([np.zeros((1, 2)), np.zeros((1, 3))], True),
        (np.zeros((4, 4, 3)), False),
        (np.zeros(4), False),
        ([], False),
        (3, False),
    ],
)
def test_rows_are_distinguished_from_images_by_their_first_axis(value: object, expected: bool) -> None:
    assert is_rows(value) is expected


# ---- a program's own backends


class Adds:
    """A class in TorchPipe's style: one item at a time, with its own number."""

    def init(self, config: dict[str, str]) -> None:
        self.add = int(config["add"])
        self.other = config["any_key_you_want"]

    def forward(self, items: list[dict[str, Any]]) -> None:
        (item,) = items
        item["result"] = item["data"] + self.add
        item["other"] = self.other


@pytest.mark.parametrize("backend", ["Python[adds]", "adds", "S[Identity,Python[adds],Identity]"])
def test_a_registered_class_is_found_by_its_name(make_pipe: Callable[..., pipe], backend: str) -> None:
    assert register_backend(Adds, "adds") is Adds
    adds = make_pipe({"backend": backend, "add": 1, "any_key_you_want": "x"})
    items: list[dict[str, Any]] = [{"data": 2}, {"data": 3}]
    adds(items)
    assert [(item["result"], item["other"]) for item in items] == [(3, "x"), (4, "x")]


def test_it_is_a_decorator_too() -> None:
    @register_backend("first_of_mine")
    class One(Adds):
        pass

    @register_backend
    class SecondOfMine(Adds):
        pass

    assert One.__name__ == "One"
    assert {"first_of_mine", "SecondOfMine", "DecodeMat"} <= set(list_backends("Backend"))
    assert is_registered("decodemat")
    assert not is_registered("none_of_mine")


def test_max_is_how_many_it_takes_at_once(make_pipe: Callable[..., pipe]) -> None:
    seen: list[int] = []

    class Batches:
        def forward(self, items: list[dict[str, Any]]) -> None:
            seen.append(len(items))
            for item in items:
                item["result"] = item["data"]

        def max(self) -> int:
            return 4

    register_backend(Batches, "batches")
    batches = make_pipe({"backend": "batches", "batching_timeout": 50, "max": 4})
    batches([{"data": i} for i in range(16)])
    assert sum(seen) == 16
    assert 1 < max(seen) <= 4


def test_tensors_reach_it_as_tensors_and_leave_it_as_arrays_for_the_next(make_pipe: Callable[..., pipe]) -> None:
    seen: list[Any] = []

    class Scores:
        def forward(self, items: list[dict[str, Any]]) -> None:
            for item in items:
                seen.append(item["data"])
                item["result"] = torch.softmax(item["data"].float(), -1)

    register_backend(Scores, "scores")
    scores = make_pipe({"a": {"backend": "Identity", "next": "b"}, "b": {"backend": "S[scores,ArgMax]"}})
    item = {"data": torch.tensor([[1, 5, 2]])}
    scores(item)
    assert isinstance(seen[0], torch.Tensor)
    assert int(item["result"]) == 1


def test_an_init_that_returns_false_is_a_configuration_error(make_pipe: Callable[..., pipe]) -> None:
    class Never:
        def init(self, config: dict[str, str]) -> bool:
            return False

        def forward(self, items: list[dict[str, Any]]) -> None: ...

    register_backend(Never, "never")
    with pytest.raises(RuntimeError, match="init returned False"):
        make_pipe({"backend": "never"})


def test_a_target_that_cannot_be_called_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a function"):
        register_backend(type("Nothing", (), {}), "nothing")


def test_continue_is_a_synonym_of_run() -> None:
    assert Status.Continue is Status.Run
    assert len(Status) == 6


# ---- events


def begun(num: int = 1) -> Event:
    event = Event(num)
    for _ in range(num):
        event.begin()
    return event


class WatchedWaiter(SyncWaiter):
    """A waiter that a weak reference may watch."""


def test_it_is_set_when_all_its_items_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waiters = []

    def new_waiter() -> SyncWaiter:
        waiter = WatchedWaiter()
        waiters.append(weakref.ref(waiter))
        return waiter

    monkeypatch.setattr(boundary, "new_waiter", new_waiter)
    event = begun(2)
    event.settle()
    assert not event.is_set()
    assert not event.Wait(1)
    assert [waiter() for waiter in waiters] == [None], "a thread that stopped waiting is forgotten"
    event.settle()
    assert event.is_set()
    assert event.Wait()


def test_all_threads_that_wait_are_woken() -> None:
    event, woken = begun(), []
    threads = [threading.Thread(target=lambda: woken.append(event.wait(30_000))) for _ in range(3)]
    for thread in threads:
        thread.start()
    event.settle()
    for thread in threads:
        thread.join(30)
    assert woken == [True] * 3


def test_callbacks_run_once_the_last_first_and_before_those_who_wait_are_woken() -> None:
    event, calls = begun(), []
    event.set_callback(lambda: calls.append(("one", event.is_set())))
    event.set_callback(lambda: calls.append(("two", event.is_set())))
    event.settle()
    assert calls == [("two", False), ("one", False)]
    event.set_callback(lambda: calls.append(("late", event.is_set())))
    assert calls[2:] == [("late", True)]


def test_a_final_callback_is_the_only_one() -> None:
    event, calls = begun(), []
    event.set_final_callback(lambda: calls.append(1))
    with pytest.raises(RuntimeError, match="set_callback adds another"):
        event.set_final_callback(lambda: calls.append(2))
    event.settle()
    assert calls == [1]


def test_the_first_error_is_reported_to_every_caller() -> None:
    event, texts = begun(3), []
    event.set_exception_callback(texts.append)
    event.settle(ValueError("first"))
    with pytest.raises(ValueError, match="first"):
        event.try_throw()
    event.settle(ValueError("second"))
    assert texts == []
    event.settle()
    assert texts == ["first"]
    event.set_exception_callback(texts.append)
    assert texts == ["first", "first"]
    with pytest.raises(ValueError, match="first"):
        event.wait(0)
    assert str(event.get_exception()) == "first"


def test_without_an_error_its_callback_is_not_called() -> None:
    event, texts = begun(), []
    event.set_exception_callback(texts.append)
    event.settle()
    event.set_exception_callback(texts.append)
    event.try_throw()
    assert texts == []
    assert event.get_exception() is None


def test_a_callback_that_raises_does_not_keep_threads_waiting(caplog: pytest.LogCaptureFixture) -> None:
    event, calls = begun(), []

    def broken() -> None:
        raise ValueError("broken")

    event.set_callback(lambda: calls.append(1))
    event.set_callback(broken)
    with caplog.at_level(logging.ERROR):
        event.settle()
    assert event.wait(0)
    assert calls == [1]
    assert "callback_failed" in caplog.text


def test_an_event_accepts_its_number_of_items() -> None:
    event = Event(2)
    event.begin()
    assert event.valid()
    event.begin()
    assert not event.valid()
    with pytest.raises(ValueError, match="used for 2 items"):
        event.begin()
    with pytest.raises(ValueError, match="for 0 items, expected 1 or more"):
        Event(0)


def test_it_reports_the_time_since_its_creation() -> None:
    assert 0 <= Event().time_passed() < 60_000
