"""Batches of a model in three phases (`runtimes/device.py` has the reason), and the thread of the last phase."""

from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

from penstock.core import os_threads
from penstock.core.columns import Empty
from penstock.errors import ENDS

LAUNCHED: Final = 2
"""Batches of a model that have begun and are not answered: one runs on the device, and one waits behind it. More would
only wait longer, and for rows that arrive later."""


class Phases(Protocol):
    """`predict` of a model in three phases, each for any thread. They raise what `predict` raises."""

    empty: Empty  # memory from which the device copies by itself

    def stage(self, values: list[Any]) -> Any:
        """Starts to copy a batch to the device; None if it cannot be launched at once."""
        ...

    def launch(self, staged: Any) -> Any:
        """Starts to run it behind that copy, and behind all batches that were launched before."""
        ...

    def fetch(self, launched: Any) -> tuple[list[Any], float]:
        """Waits for its results; with the seconds that it alone took on the device."""
        ...


class Launched:
    """A batch on the device; or the error of its launch."""

    batch: Any = None
    error: BaseException | None = None
    seconds = 0.0  # on the device, once its results are there

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def __call__(self, _: list[Any]) -> list[Any]:
        """The results, once. Raises what `predict` raises."""
        if self.error is not None:
            raise self.error
        batch, self.batch = self.batch, None
        found, self.seconds = self._phases.fetch(batch)
        return found


def launch(phases: Phases, staged: Any, values: list[Any]) -> Launched | None:
    """The batch of these values, which is `staged` if that is not None; None if it cannot be launched at once.

    Raises exceptions in `ENDS`.
    """
    launched = Launched(phases)
    try:
        if staged is None:
            staged = phases.stage(values)
        if staged is None:
            return None
        launched.batch = phases.launch(staged)
    except ENDS:
        raise
    except BaseException as e:
        launched.error = e
    return launched


W = TypeVar("W")


class Finisher(Generic[W]):
    """A thread that finishes the batches of a model in order, while the model's own thread begins the next ones."""

    def __init__(self, finish: Callable[[list[W]], None], name: str) -> None:
        """`finish` receives a list, so that it can let go of its only element. It does not raise."""
        self._finish = finish
        self._begun: Any = os_threads.new_queue()
        self._room: Any = os_threads.new_queue()
        for _ in range(LAUNCHED):
            self._room.put(None)
        # the thread of the model is asked to leave, and closes this one
        os_threads.start_thread(self._run, name=name, leave=lambda: None)

    def run(self, begin: Callable[[], W]) -> None:
        """Begins a batch once there is room for it, and has it finished. Raises what `begin` raises, after all batches
        before are finished: the loss of a device may show in a batch behind the guilty one."""
        self._room.get()
        try:
            self._begun.put([begin()])
        except BaseException:
            self.wait()
            self._room.put(None)
            raise

    def wait(self) -> None:
        """Within `begin`: waits until all batches before are finished."""
        self._take(LAUNCHED - 1)

    def close(self) -> None:
        """Ends the thread after the last batch."""
        self._take(LAUNCHED)
        self._begun.put(None)

    def _take(self, count: int) -> None:
        for _ in range(count):
            self._room.get()
        for _ in range(count):
            self._room.put(None)

    def _run(self) -> None:
        while (box := self._begun.get()) is not None:
            self._finish(box)
            self._room.put(None)
