"""RefusalLog: a line a minute for each model that refuses requests: their number, the reason, and what to change."""

import asyncio
import logging
from collections import Counter
from typing import Final

from penstock.core.contracts import Observer

log = logging.getLogger("penstock.serving")

INTERVAL_S: Final = 60.0
HINTS: Final = {
    "queue_full": "add instances, or raise batching.max_queue (which makes requests wait longer)",
    "expired": "add instances, or give requests later deadlines",
    "timeout": "add instances, or raise batching.timeout_s",
    "overload": "add instances, or raise batching.slo_s",
    "quarantined": "their payload killed two workers: look at the lines slot_down",
    "worker_died": "look at the lines slot_down",
}


class RefusalLog(Observer):
    """Logs the first refusal at once, and further ones together, once a minute. Runs on the event loop."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()  # by model, version and reason
        self._timer: asyncio.TimerHandle | None = None

    def on_reject(self, model: str, version: str, reason: str) -> None:
        if reason not in HINTS:
            return
        self._counts[model, version, reason] += 1
        if self._timer is None:
            self._report()

    def _report(self) -> None:
        self._timer = None
        if not self._counts:
            return
        for (model, version, reason), count in self._counts.items():
            log.warning(
                "event=requests_refused model=%s version=%s reason=%s count=%d hint=%r",
                *(model, version, reason, count, HINTS[reason]),
            )
        self._counts.clear()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._report)

    def close(self) -> None:
        """Reports what has come since the last line."""
        if self._timer is not None:
            self._timer.cancel()
            self._report()
            if self._timer is not None:
                self._timer.cancel()
