"""The bodies alone, without the dicts around them."""

from __future__ import annotations

from typing import Any

from penstock.torchserve.ts.torch_handler.request_envelope.base import BaseEnvelope, body_of


class BodyEnvelope(BaseEnvelope):
    """The handler sees a list of bodies; its answers stay as they are."""

    def parse_input(self, data: Any) -> Any:
        return [body_of(row) for row in data]

    def format_output(self, data: Any) -> Any:
        return data
