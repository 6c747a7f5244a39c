"""The page /docs: Swagger UI if the extra `swagger` is installed, otherwise a plain page with the same operations.

The files come from the package `flask-swagger-ui`, whose code is not imported; nothing is loaded from other hosts.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Final

from penstock.core.contracts import Backend
from penstock.serving.http.responses import RouteNotFound
from penstock.serving.protocols.route import Route, Template
from penstock.types import ItemResult

_PACKAGE: Final = "flask_swagger_ui"
_OWN: Final = Path(__file__).parent / "static"
_HTML: Final = "text/html; charset=utf-8"
_FILES: Final = {"docs.js": "text/javascript", "swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_HEADERS: Final = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
]


def _page(backend: Backend, route: Route) -> ItemResult:
    return ItemResult(_read("docs.html"), _HTML, headers=_HEADERS)


def _file(backend: Backend, route: Route) -> ItemResult:
    name = route.names["file"]
    if name not in _FILES:
        raise RouteNotFound("no route has this path")
    return ItemResult(_read(name), _FILES[name], headers=[*_HEADERS, ("cache-control", "max-age=3600")])


@cache
def _read(name: str) -> bytes:
    """A file of the page. Raises RouteNotFound for one of Swagger UI that is not installed."""
    for folder in (_OWN, _installed()):
        if folder is not None and (folder / name).is_file():
            return (folder / name).read_bytes()
    raise RouteNotFound("Swagger UI is not installed: install the extra 'swagger'")


def _installed() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    return Path(spec.origin).parent / "dist" if spec is not None and spec.origin else None


ROUTES: Final = (
    Template("/docs", "The routes as a web page", answer=_page, open=True),
    Template("/docs/{file}", "A file of this web page", answer=_file, open=True),
)
