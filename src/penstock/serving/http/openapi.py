"""The OpenAPI page: every route as it is now, with one path for each model that is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from penstock.core.contracts import Backend
from penstock.errors import PenstockError
from penstock.serving.http.template import Template
from penstock.serving.protocols.oip_npy import NPY
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
    if codec == "oip_json":
        content: dict[str, Any] = {"application/json": {"schema": _tensors(inputs)}}
        content |= {kind: {"schema": {}} for kind in ("application/octet-stream", NPY)}
    else:
        content = {kind: {"schema": {}} for kind in ("application/json", "text/plain", "application/octet-stream")}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "The answer of the model"}, "default": _ERROR},
    }


def _tensors(inputs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    tensor: dict[str, Any] = {
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer"}},
            "datatype": {"type": "string"},
            "data": {"type": "array"},
        },
    }
    if inputs:
        tensor["properties"]["name"]["enum"] = [spec.name for spec in inputs]
    return {"type": "object", "required": ["inputs"], "properties": {"inputs": {"type": "array", "items": tensor}}}
