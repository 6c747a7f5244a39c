from __future__ import annotations

import pytest

from penstock.errors import BadOutput, ItemFailed, LoadFailed, QueueFull
from penstock.streamer.errors import tell, told

TRACEBACK = """Traceback (most recent call last):
  File "model.py", line 3, in predict
    raise pkg.Odd("first\\nsecond")
pkg.Odd: first
second
"""


def test_the_text_of_the_models_own_error_is_in_the_message_and_its_traceback_is_the_cause() -> None:
    error = told(ItemFailed("the model raised Odd", detail=TRACEBACK))
    assert isinstance(error, ItemFailed)
    assert str(error) == "the model raised pkg.Odd: first\nsecond"
    assert "line 3, in predict" in str(error.__cause__)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LoadFailed("loading 'm' raised Odd: x (m.py, line 1)", detail="Traceback\n  File\nOdd: x"), None),
        (
            BadOutput("the model returned a lock", detail="TypeError('no')"),
            "the model returned a lock: TypeError('no')",
        ),
        (QueueFull("the queue is full", retry_after_s=2.0), None),
    ],
)
def test_nothing_is_said_twice(error: LoadFailed, text: str | None) -> None:
    mine = told(error)
    assert type(mine) is type(error)
    assert mine is not error, "one error object is not raised in two threads"
    assert str(mine) == (text or str(error))
    assert mine.retry_after_s == error.retry_after_s


def test_errors_of_others_are_raised_as_they_are() -> None:
    error = KeyError("a")
    with pytest.raises(KeyError) as caught:
        tell(error)
    assert caught.value is error
