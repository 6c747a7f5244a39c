"""Answers on their way while the handler still runs; the old place of `send_intermediate_predict_response`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class PredictResponse(NamedTuple):
    """`values` are the answers, or parts of them, by place in the batch; `more` says that others follow.

    `ids` are those of the requests by place, None where the handler named only places.
    """

    values: dict[int, Any]
    ids: Mapping[int, str] | None
    code: int
    message: str
    context: Any
    more: bool


def create_predict_response(
    ret: Any, req_id_map: Any, message: str, code: int, context: Any = None, ts_stream_next: bool = False
) -> PredictResponse:
    """What `context.cl_socket.sendall` takes: `ret[idx]` for each place `idx` in `req_id_map`, a dict or a list."""
    values = {idx: ret[idx] for idx in req_id_map}
    ids = dict(req_id_map) if isinstance(req_id_map, Mapping) else None
    return PredictResponse(values, ids, code, message, context, ts_stream_next)


def send_intermediate_predict_response(ret: Any, req_id_map: Any, message: str, code: int, context: Any = None) -> None:
    """Sends a part of their answers to the callers in `req_id_map`, usually `context.request_ids`, at once.

    What `handle` returns is the last part. Only the first process of a model of many says anything.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        context.cl_socket.sendall(create_predict_response(ret, req_id_map, message, code, context, True))
