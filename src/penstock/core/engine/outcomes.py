"""How requests end: merged answers of split requests, errors of dropped ones, and the reasons that metrics count."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from penstock.core.batching.entry import Expire, Fail, Shed
from penstock.core.codecs import OBJECT, ModelCodecs
from penstock.errors import DeadlineExceeded, ItemFailed, PenstockError, WorkerDied
from penstock.types import Item, ItemResult, ModelMetadata

log = logging.getLogger("penstock.engine")


class PartMerger:
    """Merges the answers to the parts of split requests of one model version."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self._codecs = ModelCodecs(ModelMetadata(name, version))

    def merge(self, item: Item, parts: Mapping[int, ItemResult], streamed: bool) -> ItemResult:
        """One answer from `parts` (first row -> answer), in row order; an error if a part failed or they do not fit."""
        ordered = [result for _, result in sorted(parts.items())]
        bad = next((p for p in ordered if p.error is not None), None)
        if bad is not None or streamed:  # the streamed parts are already sent: only the end is left
            return bad or ordered[-1]
        try:
            if item.codec == OBJECT:
                return ItemResult(body=[value for part in ordered for value in part.body])
            return self._codecs.get(item.codec).join(ordered)
        except PenstockError as e:
            return ItemResult(error=e)
        except Exception as e:
            log.exception("join_failed model=%s", self.name)
            text = f"the parts of the answer could not be joined: {type(e).__name__}"
            return ItemResult(error=ItemFailed(text))


def error_of(event: Expire | Shed | Fail, timeout_s: float) -> PenstockError:
    """The error of a dropped or interrupted request; `timeout_s` is the longest wait that was allowed."""
    if isinstance(event, Fail):
        return WorkerDied("the worker that ran this request died, and it is not run again")
    if isinstance(event, Shed):
        return DeadlineExceeded("overload: the request could not be answered before its deadline")
    if event.reason == "timeout":
        return DeadlineExceeded(f"the request waited timeout_s={timeout_s:g} in the queue")
    return DeadlineExceeded("the deadline passed, or could not be met, before the request was run")


def reason_of(error: Exception) -> str:
    """The metric label of a rejection: the scheduler's reason if it has one, else the error's code."""
    if isinstance(error, DeadlineExceeded):
        return "expired"
    return error.code if isinstance(error, PenstockError) else PenstockError.code
