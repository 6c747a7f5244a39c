"""TensorFlow Serving's row format: {"instances": [...]} and {"predictions": [...]}."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

from penstock.torchserve.ts.torch_handler.request_envelope.base import BaseEnvelope


class JSONEnvelope(BaseEnvelope):
    """The handler sees the instances of all requests in one list; each request gets back as many as it had.

    {"b64": text}, as an instance or as a column of one, becomes bytes.
    """

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._lengths: list[int] = []

    def parse_input(self, data: Any) -> Any:
        requests = [_instances(row) for row in data]
        self._lengths = [len(rows) for rows in requests]
        return [row for rows in requests for row in rows]

    def format_output(self, data: Any) -> Any:
        answers, start = [], 0
        for length in self._lengths:
            answers.append(json.dumps({"predictions": data[start : start + length]}))
            start += length
        return answers


def _instances(request: Any) -> Any:
    rows = (request.get("data") or request.get("body") or request)["instances"]
    if rows and isinstance(rows[0], dict):
        rows = [_decoded(row) for row in rows]
    return rows


def _decoded(row: dict[str, Any]) -> Any:
    if list(row) == ["b64"]:
        return b64decode(row["b64"])
    return {k: b64decode(v["b64"]) if isinstance(v, dict) and list(v) == ["b64"] else v for k, v in row.items()}
