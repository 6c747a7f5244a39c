"""Ops that look at no pixels: they pass, move and drop fields."""

from __future__ import annotations

from typing import Any

from penstock.ops.base import Fields, ItemOp


class Identity(ItemOp):
    """The data as it is."""

    def __call__(self, data: Any, fields: Fields) -> Any:
        return data
