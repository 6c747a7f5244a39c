"""Which request a metric tells of."""

from __future__ import annotations

from typing import Any


def request_id_of(request_ids: Any, idx: int | None) -> Any:
    """The id of the batch's request `idx`; of no request in particular those of all, with commas between them."""
    if isinstance(request_ids, dict):
        if idx is not None and idx in request_ids:
            return request_ids[idx]
        return ",".join(request_ids.values())
    return request_ids
