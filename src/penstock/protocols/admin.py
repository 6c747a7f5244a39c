"""Answers of the management listener: pure rendering of the table of models."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.errors import ModelNotFound, nearest
from penstock.types import ModelStatus


def models_body(statuses: Sequence[ModelStatus]) -> bytes:
    """`{"models": [...]}`: every version of every model, by name."""
    return msgspec.json.encode({"models": sorted(statuses, key=lambda s: (s.name, s.version))})


def model_body(statuses: Sequence[ModelStatus], name: str) -> bytes:
    """`{"name", "versions": [...]}` of one model. Raises ModelNotFound."""
    versions = sorted((s for s in statuses if s.name == name), key=lambda s: s.version)
    if not versions:
        raise ModelNotFound(f"no model '{name[:100]}' is loaded{nearest(name[:100], {s.name for s in statuses})}")
    return msgspec.json.encode({"name": name, "versions": versions})
