"""The lines of a table of routes that a path fits, and a bounded memory for paths that come again and again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from penstock.serving.http.template import Route, Template

CACHED_PATHS: Final = 1024
CACHED_PATH_BYTES: Final = 256


class Table:
    """Templates in the order in which they are tried."""

    def __init__(self, templates: Iterable[Template]) -> None:
        self._rows = [(template, template.path.split("/")[1:]) for template in templates]

    def matches(self, segments: list[str]) -> Iterator[tuple[Template, dict[str, str]]]:
        """Every template that the decoded segments of a path fit, with what stands in the place of its names."""
        for template, wanted in self._rows:
            names = _fit(wanted, segments)
            if names is not None:
                yield template, names


def _fit(wanted: list[str], found: list[str]) -> dict[str, str] | None:
    names: dict[str, str] = {}
    if wanted[-1].endswith("...}"):
        if len(found) < len(wanted):
            return None
        names[wanted[-1][1:-4]] = "/".join(found[len(wanted) - 1 :])
        wanted, found = wanted[:-1], found[: len(wanted) - 1]
    elif len(wanted) != len(found):
        return None
    for want, have in zip(wanted, found, strict=True):
        if not want.startswith("{"):
            if want != have:
                return None
            continue
        name, _, verb = want[1:].partition("}")
        value = have.removesuffix(verb)
        if not value or not have.endswith(verb):
            return None
        names[name] = value
    return names


def remember(known: dict[bytes, Route], target: bytes, route: Route) -> None:
    """Keeps the route of a request target, unless it is long; forgets all when there are too many."""
    if len(target) <= CACHED_PATH_BYTES:
        if len(known) >= CACHED_PATHS:
            known.clear()
        known[target] = route
