"""KServe's first protocol: {"instances": [...]} and {"predictions" or "explanations": [...]}."""

from __future__ import annotations

import json
from typing import Any

from penstock.torchserve.ts.torch_handler.request_envelope.base import BaseEnvelope, body_of, wants_explanation


class KServeEnvelope(BaseEnvelope):
    """The handler sees the instances of the batch's first request, and all its answers are that request's."""

    def parse_input(self, data: Any) -> Any:
        body = body_of(data[0])
        if isinstance(body, (bytes, bytearray)):
            body = json.loads(body)
        return body.get("instances")

    def format_output(self, data: Any) -> Any:
        return [{"explanations" if wants_explanation(self.context) else "predictions": data}]
