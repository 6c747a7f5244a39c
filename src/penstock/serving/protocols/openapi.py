"""The OpenAPI document: every route, with one path for each loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.core.contracts import Backend, Codec
from penstock.errors import PenstockError
from penstock.plugins import resolve
from penstock.serving.protocols.route import Template
from penstock.types import TensorSpec

_ERROR = {"description": "An error: a code and a message", "content": {"application/json": {"schema": {}}}}


def openapi_body(backend: Backend, version: str, templates: Sequence[Template]) -> bytes:
    """An OpenAPI 3.1 document of the inference listener."""
    paths: dict[str, Any] = {t.path: {"get": _get(t.summary)} for t in templates if t.answer and "{" not in t.path}
    for name in sorted({status.name for status in backend.statuses() if status.state == "READY"}):
        inputs = _inputs(backend, name)
        for template in templates:
            if "{version}" in template.path or "{model}" not in template.path:
                continue
            path = template.path.replace("{model}", quote(name, safe=""))
            summary = f"{template.summary}: {name}"
            if not template.codec:
                paths[path] = {"get": _get(summary)}
            else:
                paths[path] = {"post": _post(summary, template.codec, inputs)}
    document = {"openapi": "3.1.0", "info": {"title": "Penstock", "version": version}, "paths": paths}
    return msgspec.json.encode(document)


def _inputs(backend: Backend, name: str) -> tuple[TensorSpec, ...]:
    try:
        return backend.metadata(name, None)[0].inputs
    except PenstockError:  # it was unloaded meanwhile
        return ()


def _get(summary: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}}
    return {"summary": summary, "responses": {"200": {"description": "The answer", "content": content}}}


def _post(summary: str, codec: str, inputs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    found: type[Codec] = resolve("codec", codec)
    content: dict[str, Any] = {kind: {"schema": {}} for kind in found.request_types}
    content["application/json"] = {"schema": found.request_schema(inputs)}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "The answer of the model"}, "default": _ERROR},
    }
