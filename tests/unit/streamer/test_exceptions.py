from __future__ import annotations

import pickle
import sys
from types import ModuleType

import pytest

from penstock.config.schema import BatchingConfig
from penstock.core.wire.objects import OwnException, RemoteException
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.errors import (
    BadOutput,
    BadRequest,
    ItemFailed,
    LoadFailed,
    PenstockError,
    QueueFull,
)
from penstock.streamer.base import error_for_caller, raise_for_caller
from penstock.types import ModelMetadata

TRACEBACK = """Traceback (most recent call last):
  File "model.py", line 3, in predict
    raise pkg.Odd("first\\nsecond")
pkg.Odd: first
second
"""


def test_the_message_has_the_text_of_the_models_error_and_the_cause_its_traceback() -> None:
    error = error_for_caller(ItemFailed("the model raised Odd", detail=TRACEBACK))
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
def test_a_message_repeats_no_text(error: LoadFailed, text: str | None) -> None:
    copy = error_for_caller(error)
    assert type(copy) is type(error)
    assert copy is not error, "two threads must not raise the same object"
    assert str(copy) == (text or str(error))
    assert copy.retry_after_s == error.retry_after_s


def test_errors_of_other_libraries_are_raised_unchanged() -> None:
    error = KeyError("a")
    with pytest.raises(KeyError) as caught:
        raise_for_caller(error)
    assert caught.value is error


# ---- the model's own exceptions


class OddError(Exception):
    """Its constructor takes other arguments than `args` holds, as many exceptions' do."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Refused(BadRequest):
    """A user's error with a class of Penstock."""

    def __init__(self, why: str) -> None:
        super().__init__(f"refused: {why}")


class Unpicklable(Exception):
    def __reduce__(self) -> object:
        raise TypeError("no pickle")


def raised(error: Exception) -> PenstockError:
    """The item's error after a model raised `error`."""
    try:
        raise error
    except Exception as e:
        runner = BatchRunner(PythonModel(lambda items: items), ModelMetadata("m", "1"), BatchingConfig())
        return runner.error_of(e)


def sent(error: PenstockError) -> PenstockError:
    """The error in another process that trusts the worker."""
    found = pickle.loads(pickle.dumps(error))
    assert isinstance(found, PenstockError)
    return found


@pytest.mark.parametrize("across", [lambda error: error, sent], ids=["thread", "process"])
def test_the_models_exception_keeps_its_type_attributes_causes_and_traceback(across: object) -> None:
    error = OddError(3, "no")
    error.__cause__ = KeyError("a")
    failed = across(raised(error))  # type: ignore[operator]
    copy = error_for_caller(failed)
    assert type(copy) is OddError
    assert (copy.code, str(copy)) == (3, "3: no")
    assert copy is not error_for_caller(failed), "two threads must not raise the same object"
    assert repr(copy.__cause__) == "KeyError('a')"
    assert "OddError: 3: no" in str(copy.__cause__.__cause__)
    assert error.__traceback__ is None, "frames keep payloads alive"
    error.__cause__ = error
    assert type(error_for_caller(across(raised(error)))) is OddError  # type: ignore[operator]
    with pytest.raises(OddError):
        raise_for_caller(failed)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "gone", "a.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        KeyError("a"),
        OddError(1, "b"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_python_keep_their_text_and_fields(error: Exception) -> None:
    copy = error_for_caller(sent(raised(error)))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert getattr(copy, "filename", None) == getattr(error, "filename", None)


def test_an_error_class_derived_from_penstocks_keeps_its_type() -> None:
    refused = Refused("why")
    refused.__cause__ = KeyError("a")
    failed = sent(raised(refused))
    assert type(failed) is BadRequest, "a process without the user's class can read it"
    copy = error_for_caller(failed)
    assert type(copy) is Refused
    assert repr(copy.__cause__) == "KeyError('a')"
    assert str(copy) == "refused: why"


def test_an_exception_that_cannot_be_sent_keeps_its_type_or_becomes_item_failed() -> None:
    large = error_for_caller(sent(raised(OddError(3, "x" * 10**6))))
    assert type(large) is OddError
    assert len(str(large)) == 1000
    assert type(error_for_caller(raised(Unpicklable("here")))) is Unpicklable
    local = type("Local", (Exception,), {})
    assert type(error_for_caller(raised(local("in process")))) is local
    copy = error_for_caller(sent(raised(local("elsewhere"))))
    assert type(copy) is ItemFailed
    assert "Local: elsewhere" in str(copy)
    assert type(error_for_caller(raised(StopIteration()))) is ItemFailed


def test_a_plain_exception_imports_nothing_and_runs_no_code_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("trusted")

    class Careful(Exception):
        def __init__(self, *args: object) -> None:
            raise AssertionError("it was called")

    class Eager(Exception):
        def __new__(cls, *args: object) -> Eager:
            raise AssertionError("it was called")

    def lazy(name: str) -> object:
        raise AssertionError("it was imported")

    for kind in (Careful, Eager):
        kind.__module__, kind.__qualname__ = "trusted", kind.__name__
        setattr(module, kind.__name__, kind)
    module.__getattr__ = lazy  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "trusted", module)

    def received(path: str, *args: str) -> Exception:
        failed = ItemFailed("the model raised X")
        failed.original = RemoteException(*path.split(":"), list(args))  # type: ignore[call-arg]
        return error_for_caller(failed)

    assert type(received("trusted:Careful", "a")) is Careful
    assert str(received("trusted:Careful", "a")) == "a"
    assert str(received("builtins:KeyError", "a").__cause__) == "the model raised X"
    for other in (
        "trusted:Eager", "trusted:Absent", "trusted:__getattr__", "antigravity:X", "builtins:SystemExit",
        "builtins:int", "builtins:StopIteration", "penstock.errors:WorkerDied", "sys:modules",
    ):  # fmt: skip
        assert type(received(other, "a")) is ItemFailed, other
    assert "antigravity" not in sys.modules


def test_a_plain_exception_has_bounded_arguments_of_plain_types() -> None:
    assert OwnException(ValueError(1, 2.5, None, True, "x" * 2000, b"b", 2**70, object)).plain().args == [
        1, 2.5, None, True, "x" * 1000, "b'b'", str(2**70), str(object),
    ]  # fmt: skip
