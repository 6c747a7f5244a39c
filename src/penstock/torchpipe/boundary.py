"""What a TorchPipe program passes to a pipeline and gets from it: tensors, errors, backends, filters and events.

Also the module name `torchpipe`, and stand-ins for TorchPipe's names that have no counterpart here.

Nothing here imports torch. In a program without it there are no tensors, and results stay arrays.
"""

import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, NoReturn

import numpy as np

from penstock.core import os_threads
from penstock.core.arrays import plain_array
from penstock.core.portal.loop_thread import new_waiter
from penstock.core.portal.waiters import SyncWaiter
from penstock.errors import BadRequest, ItemFailed, PenstockError, describe
from penstock.pipeline import filters
from penstock.pipeline.ops import catalog
from penstock.pipeline.ops.python import adapt
from penstock.plugins import installed, make_importable

log = logging.getLogger("penstock.torchpipe")


def _torch() -> Any:
    """The module if the program has fully imported it, otherwise None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "from_numpy") else None


def to_array(value: Any) -> Any:
    """The array of a tensor, without a copy on the CPU; also in lists of lists. Other values stay unchanged."""
    torch = _torch()
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        return plain_array(value)
    tensors = type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) for v in value)
    return [to_array(v) for v in value] if tensors or _is_lists(value) else value


def to_tensor(value: Any) -> Any:
    """The tensor of an array, without a copy if it is writable; also in lists of lists. Others stay unchanged."""
    torch = _torch()
    if torch is None:
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            return value
        return torch.from_numpy(value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy())
    arrays = type(value) in (list, tuple) and value and all(isinstance(v, np.ndarray) for v in value)
    return [to_tensor(v) for v in value] if arrays or _is_lists(value) else value


def _is_lists(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(v) is list for v in value)


def is_rows(value: Any) -> bool:
    """Whether an array looks like one row of a tensor, `[1, ...]`, and not like an image, which is higher than 1."""
    if type(value) in (list, tuple):
        return bool(value) and all(is_rows(v) for v in value)
    return isinstance(value, np.ndarray) and value.ndim > 1 and value.shape[0] == 1


class NoData(BadRequest, IndexError):
    """An item without the field `data`."""


class NoSuchNode(BadRequest, IndexError):
    """An item for an unknown node."""


def as_runtime_error(error: PenstockError) -> PenstockError:
    """The error as an instance of both its own class and RuntimeError, as TorchPipe's programs catch it.

    Its detail becomes a note, which is visible if nothing catches the error. It is pickled as its own class.
    """
    if isinstance(error, RuntimeError):
        return error
    cls = type(error)
    both = _COMBINED.get(cls) or _COMBINED.setdefault(cls, _combined(cls))
    made = both(error.message, retry_after_s=error.retry_after_s, detail=error.detail)
    if error.detail:
        made.add_note(error.detail)
    return made


def _combined(cls: type[PenstockError]) -> type[PenstockError]:
    def reduce(self: PenstockError) -> Any:
        return partial(cls, retry_after_s=self.retry_after_s, detail=self.detail), (self.message,)

    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce__": reduce}
    return type(cls.__name__, (cls, RuntimeError), names)


_COMBINED: dict[type[PenstockError], type[PenstockError]] = {}


# ---- a program's own backends and filters


class Status(Enum):
    """The decision of a filter."""

    Run = 0
    Continue = 0
    Skip = 1
    SerialSkip = 2
    SubGraphSkip = 3
    Break = 4
    Error = 5


def register_backend(cls: Any, register_name: str | None = None) -> Any:
    """Registers a class as `Python[NAME]` and as `NAME`, and returns it. Raises ConfigError.

    Call `register_backend(cls, "NAME")`, or use it as a decorator with or without a name. If the program has imported
    torch, `forward` receives tensors and may return them; otherwise it receives arrays.
    """
    if isinstance(cls, str):
        return lambda decorated: register_backend(decorated, cls)
    name = register_name or cls.__name__
    plain = inspect.isclass(cls) and callable(getattr(cls, "forward", None))
    catalog.register(name, adapt(_with_tensors(cls) if plain else cls, name))
    return cls


def _with_tensors(cls: Any) -> type[Any]:
    """A wrapper class that takes and returns arrays."""

    class WithTensors:
        def __init__(self) -> None:
            self._inner = cls()
            if hasattr(self._inner, "max"):
                self.max = self._inner.max

        def init(self, config: dict[str, str]) -> Any:
            return self._inner.init(config) if hasattr(self._inner, "init") else None

        def forward(self, items: list[dict[str, Any]]) -> None:
            arrays = [{name: value for name, value in fields.items() if is_rows(value)} for fields in items]
            tensors = [{name: to_tensor(value) for name, value in found.items()} for found in arrays]
            for fields, found in zip(items, tensors, strict=True):
                fields.update(found)
            self._inner.forward(items)
            for fields, given, found in zip(items, arrays, tensors, strict=True):
                for name, value in fields.items():
                    unchanged = name in found and found[name] is value
                    fields[name] = given[name] if unchanged else to_array(value)

    WithTensors.__name__ = WithTensors.__qualname__ = cls.__name__
    WithTensors.__doc__ = cls.__doc__
    return WithTensors


def register_filter(cls: Any, register_name: str | None = None) -> Any:
    """Registers a filter's class, with the calls of `register_backend`, for `filter = "NAME"` of a node.

    Its `forward` receives the fields of an item and returns a Status. It may change the fields, for instance make the
    previous `result` the `data`, which only `swap` does by itself.
    """
    if isinstance(cls, str):
        return lambda decorated: register_filter(decorated, cls)
    name = register_name or cls.__name__
    filters.register(name, lambda config: _filter(cls, name, config))
    return cls


def _filter(cls: Any, name: str, config: dict[str, str]) -> filters.Filter:
    inner = cls()
    if hasattr(inner, "init"):
        inner.init(config, *[None] * (len(inspect.signature(inner.init).parameters) - 1))

    def decide(fields: dict[str, Any]) -> str:
        try:
            status = inner.forward(fields)
        except Exception as e:
            raise ItemFailed(f"the filter '{name}' raised {describe(e)}") from e
        if not isinstance(status, Status):
            raise ItemFailed(f"the filter '{name}' returned {status!r}, expected a Status such as Status.Run")
        return filters.OUTCOMES[status.value]

    return decide


def list_backends(kind: str = "Backend") -> list[str]:
    """The names of all ops, including this program's."""
    return catalog.names()


def is_registered(name: str) -> bool:
    """Whether there is an op of this name."""
    return name.lower() in {known.lower() for known in catalog.names()}


# ---- events

_answering: set[int] = set()  # threads that currently deliver results


@contextmanager
def answering() -> Iterator[None]:
    """Marks this thread as one that delivers results, and therefore must not wait for one."""
    _answering.add(os_threads.thread_id())
    try:
        yield
    finally:
        _answering.discard(os_threads.thread_id())


class Event:
    """Set when `num` items are done: those whose dicts contain it as `event`, in one call or in several.

    No caller waits for these items. It has the names of both TorchPipe branches.

    Callbacks run once, on the thread that delivers the results, before any waiting thread wakes. The last callback runs
    first. Callbacks may begin other items with an event, but must not wait for any. An event serves `num` items once.
    """

    def __init__(self, num: int = 1) -> None:
        if num < 1:
            raise ValueError(f"an event is for {num} items, expected 1 or more")
        self._num = num
        self._begun = 0
        self._left = num
        self._over = False  # the callbacks have run
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._on_error: Callable[[str], object] | None = None
        self._waiters: list[SyncWaiter] = []
        self._lock = os_threads.new_lock()
        self._created_s = time.monotonic()

    # ---- called by pipe

    def begin(self) -> None:
        """Counts one more item. Raises ValueError after `num` items."""
        with self._lock:
            if self._begun >= self._num:
                raise ValueError(f"the event was already used for {self._num} items, its maximum")
            self._begun += 1

    def settle(self, error: BaseException | None = None) -> None:
        """Counts one finished item. The last one runs the callbacks and wakes waiting threads."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
            callbacks, self._callbacks = self._callbacks[::-1], []
            on_error, text = self._on_error, str(self._error)
        for callback in callbacks:
            _call(callback)
        if self._error is not None and on_error is not None:
            _call(lambda: on_error(text))
        with self._lock:
            self._over = True
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.settle(None)

    # ---- called by programs

    def wait(self, timeout_ms: float | None = None) -> bool:
        """True when all items are done, False after `timeout_ms`. Raises the first error of an item."""
        self._sleep(None if timeout_ms is None else timeout_ms / 1000)
        self.try_throw()
        return self._over

    Wait = wait

    def _sleep(self, timeout_s: float | None) -> None:
        with self._lock:
            if self._over:
                return
            if os_threads.thread_id() in _answering:
                raise RuntimeError("a callback must not wait for an event: its thread delivers the results")
            waiter = new_waiter()
            self._waiters.append(waiter)
        if not waiter.wait(timeout_s):
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                    waiter.leave()

    def is_set(self) -> bool:
        """Whether all items are done."""
        return self._over

    def valid(self) -> bool:
        """Whether another item may begin with it."""
        return self._begun < self._num

    def time_passed(self) -> float:
        """Milliseconds since its creation."""
        return (time.monotonic() - self._created_s) * 1000

    def get_exception(self) -> BaseException | None:
        """The first error of an item, if any."""
        return self._error

    def try_throw(self) -> None:
        """Raises the first error of an item, if any."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def set_callback(self, callback: Callable[[], object]) -> None:
        """Adds a callback for the end of all items, failed or not. Calls it at once if they are done."""
        with self._lock:
            if self._left:
                self._callbacks.append(callback)
                return
        callback()

    def set_final_callback(self, callback: Callable[[], object]) -> None:
        """As `set_callback`. Raises RuntimeError if there already is a callback."""
        if self._callbacks:
            raise RuntimeError("the event already has a callback; set_callback adds another")
        self.set_callback(callback)

    def set_exception_callback(self, callback: Callable[[str], object]) -> None:
        """Sets the callback that receives the text of the first error when all items are done."""
        with self._lock:
            if self._left:
                self._on_error = callback
                return
        if self._error is not None:
            callback(str(self._error))


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        log.exception("callback_failed: waiting threads still wake")


# ---- names

NAME = "torchpipe"
OURS = "penstock.torchpipe"


def install() -> None:
    """Makes `import torchpipe` load this package, in this process. Call it before the first such import.

    Raises ImportError if another torchpipe is installed or imported.
    """
    if sys.modules.get(NAME) is sys.modules[OURS]:
        return
    if NAME in sys.modules or installed(NAME):
        raise ImportError(
            "another torchpipe is installed: uninstall it, or write `import penstock.torchpipe as torchpipe`"
        )
    make_importable(NAME, OURS)


class Unavailable:
    """A stand-in that can be imported, but raises NotImplementedError when called."""

    def __init__(self, name: str, instead: str) -> None:
        self.__name__ = self._name = name
        self._instead = instead

    def __call__(self, *arguments: Any, **keys: Any) -> NoReturn:
        raise NotImplementedError(f"torchpipe.{self._name} is not available: {self._instead}")

    def __repr__(self) -> str:
        return f"<torchpipe.{self._name}, which is not available: {self._instead}>"


_COMPILED = (
    "nothing is compiled. The Python way: class Mine: def forward(self, items): for item in items: item['result'] ="
    " item['data'] * 2; then register_backend(Mine, 'Mine'), or register_filter for a class of filters"
)
_STORE = "keep shared values in a dict of the program, under a lock"

INSTEAD = {
    "encrypt": "models are read unencrypted; keep them on an encrypted disk",
    "supported_opset": "the release notes of ONNX Runtime list the opsets it reads",
    "show": "`penstock pipeline show FILE -o graph.svg` draws the graph",
    "ThreadSafeKVStorage": _STORE,
    "ThreadSafeDict": _STORE,
    "Any": "values are plain Python values",
    "utils.cpp_extension.load": _COMPILED,
    "utils.cpp_extension.load_backend": _COMPILED,
    "utils.cpp_extension.load_filter": _COMPILED,
}


def unavailable(name: str) -> Any:
    """The stand-in for a name."""
    return Unavailable(name, INSTEAD[name])
