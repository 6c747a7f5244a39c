"""Joiner: the answer to a request that was run in parts, from theirs."""

from __future__ import annotations

import logging

from penstock.core.codecs import ModelCodecs
from penstock.core.engine.call import Call
from penstock.errors import ItemFailed, PenstockError
from penstock.types import ItemResult, ModelMetadata

log = logging.getLogger("penstock.engine")


class Joiner:
    """Joins the answers of one model version; a codec is made when it is needed first."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version = name, version
        self._codecs = ModelCodecs(ModelMetadata(name, version))

    def join(self, call: Call) -> ItemResult:
        """The answers to the parts in row order, as one; an error if a part failed, or if they cannot be joined."""
        parts = [result for _, result in sorted((call.parts or {}).items())]
        bad = next((p for p in parts if p.error is not None), None)
        if bad is not None or call.streamed:  # what streamed is out already: there is only the end to tell
            return bad or parts[-1]
        try:
            if call.item.codec == "object":
                return ItemResult(body=[value for part in parts for value in part.body])
            return self._codecs.get(call.item.codec).join(parts)
        except PenstockError as e:
            return ItemResult(error=e)
        except Exception as e:
            log.exception("join_failed model=%s", self.name)
            text = f"the parts of the answer could not be joined: {type(e).__name__}"
            return ItemResult(error=ItemFailed(text))
