"""A listener of TorchServe's HTTP APIs."""

from __future__ import annotations

import ssl

from penstock.config.schema import LimitsConfig
from penstock.core.contracts import Backend
from penstock.serving.http.server import HttpServer
from penstock.torchserve.http.base import Administration, Face
from penstock.torchserve.http.descriptions import listener_templates
from penstock.torchserve.http.dialect import TorchServeDialect
from penstock.torchserve.http.inference import inference_routes, legacy_routes
from penstock.torchserve.http.metrics import Scrape


def make_listener(
    backend: Backend,
    administration: Administration,
    face: Face,
    limits: LimitsConfig,
    *,
    ssl: ssl.SSLContext | None = None,
    scrape: Scrape | None = None,
) -> HttpServer:
    """A listener with the routes of the groups of `face`, to be started; `/metrics` shows what `scrape` gives."""
    inference, legacy = inference_routes(administration, face), legacy_routes(face)
    templates = listener_templates(administration, face, inference, scrape, legacy)
    return HttpServer(backend, limits, ssl=ssl, dialect=TorchServeDialect(administration, face, templates))
