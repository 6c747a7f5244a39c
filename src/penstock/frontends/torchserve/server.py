"""A listener of TorchServe's HTTP APIs."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence

from penstock.config.schema import LimitsConfig
from penstock.frontends.base import Backend
from penstock.frontends.http.server import HttpServer
from penstock.frontends.http.template import Template
from penstock.frontends.torchserve.base import Administration, Face, Group
from penstock.frontends.torchserve.dialect import TorchServeDialect


def make_listener(
    backend: Backend,
    administration: Administration,
    face: Face,
    limits: LimitsConfig,
    *,
    ssl: ssl.SSLContext | None = None,
    routes: Mapping[Group, Sequence[Template]] | None = None,
) -> HttpServer:
    """A listener, not started yet, with the routes of the groups of `face`: `routes` are those beside inference's."""
    return HttpServer(backend, limits, ssl=ssl, dialect=TorchServeDialect(administration, face, routes))
