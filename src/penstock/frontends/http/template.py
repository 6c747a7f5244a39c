"""What a line of the table of routes says, and what a path makes of it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from penstock.errors import PenstockError
from penstock.frontends.base import Backend
from penstock.protocols import native
from penstock.types import ItemResult


class Template(Struct, frozen=True):
    """A line of the table. With `codec` it is an inference route (POST), else `answer` is called (GET, HEAD)."""

    path: str
    summary: str
    codec: str = ""
    answer: Callable[[Backend, Route], ItemResult] | None = None
    open: bool = False  # needs no token
    error_body: Callable[[PenstockError], bytes] = native.error_body


class Route(Struct, frozen=True):
    """A template with the names that the path gave."""

    template: Template
    model: str = ""
    version: str | None = None
