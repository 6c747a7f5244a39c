"""Parts of results that a model sends while its call still runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import Cancelled

if TYPE_CHECKING:
    from penstock.core.worker.batch import BatchRun


class Early:
    """Takes the parts of one call. `alive` are the units whose result is to come, `sent` whether there was a part."""

    def __init__(self, run: BatchRun, units: list[int]) -> None:
        self._run = run
        self._units = units
        self._left = False  # all who waited have
        self.alive = set(units)
        self.sent = False

    def __call__(self, results: list[Any]) -> None:
        """Sends them; None where there is nothing for a unit."""
        if self._left:
            return
        try:
            self.sent = self._run.emit_step(self._units, results, self.alive) or self.sent
        except Cancelled:
            self._left = True  # the call itself goes on: it may not be one that can be broken off
