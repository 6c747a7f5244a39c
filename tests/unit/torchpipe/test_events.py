from __future__ import annotations

import logging
import threading

import pytest

from penstock.torchpipe.events import Event


def begun(num: int = 1) -> Event:
    event = Event(num)
    for _ in range(num):
        event.begin()
    return event


def test_it_is_set_when_all_its_items_are_done() -> None:
    event = begun(2)
    event.settle()
    assert not event.is_set()
    assert not event.Wait(1)
    assert not event._waiters, "who has left is forgotten"
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
