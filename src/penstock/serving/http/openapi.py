"""The OpenAPI document of the inference API: its routes for every loaded model; and the page /docs that shows it."""

import importlib.util
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from penstock._version import __version__
from penstock.core.contracts import Backend, Codec
from penstock.errors import PenstockError
from penstock.plugins import resolve
from penstock.serving.http.responses import REASONS, RouteNotFound
from penstock.serving.protocols import oip_routes, openai
from penstock.serving.protocols.bodies import JSON
from penstock.serving.protocols.route import PAGE_HEADERS, Route, Template, error_body
from penstock.types import ItemResult, ModelMetadata

_REF: Final = "#/components/schemas/{name}"
_TEXT: Final = {"type": "string"}
_ANY_ROUTE: Final = (400, 403, 408, 417, 431, 501)  # the head of a request is wrong
_MODEL: Final = (404, 503)  # the model is unknown or not ready
_INFER: Final = (409, 410, 413, 415, 422, 429, 500, 503, 504)
_ERRORS: Final[dict[Any, tuple[str, dict[str, Any]]]] = {  # format of errors -> its name and the schema of "error"
    error_body: ("NativeError", {"type": "object", "properties": {"code": _TEXT, "message": _TEXT}}),
    oip_routes.error_body: ("ProtocolError", _TEXT),
    openai.error_body: ("OpenAIError", openai.schema_of(openai.Error)),
}
_HEADERS: Final = {
    "x-deadline-ms": ("milliseconds until the answer is of no use", {"type": "number", "exclusiveMinimum": 0}),
    "x-priority": ("priority class; 0 is the most urgent", {"type": "integer", "minimum": 0}),
    "x-request-id": ("returned in the response", {"type": "string", "maxLength": 128}),
    "idempotency-key": ("a request with the same key does not run again", {"type": "string", "maxLength": 255}),
}


def openapi_route(templates: Sequence[Template], guarded: Callable[[], bool]) -> Template:
    """GET /openapi.json: the document of these routes. `guarded`: whether they require a token."""

    def answer(backend: Backend, route: Route) -> ItemResult:
        return ItemResult(msgspec.json.encode(openapi_document(backend, templates, guarded())), JSON)

    return Template("/openapi.json", "This document", answer=answer, response=dict[str, Any])


def openapi_document(backend: Backend, templates: Sequence[Template], guarded: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document, with a path of each route for each loaded model."""
    models = [m for name in sorted({s.name for s in backend.statuses()}) if (m := _metadata(backend, name)) is not None]
    answers = [t.response for t in templates if t.response is not None]
    schemas, components = msgspec.json.schema_components(answers, ref_template=_REF)
    writer = _Writer(dict(zip(answers, schemas, strict=True)), guarded)
    paths: dict[str, Any] = {}
    for template in templates:
        if "{version}" in template.path or (template.task and all(model.task != template.task for model in models)):
            continue
        for model in models if "{model}" in template.path else [None]:
            path = template.path if model is None else template.path.replace("{model}", quote(model.name, safe=""))
            paths[path] = writer.operations(template, model)
    for model in models:
        components |= model.schemas.components
    components |= {name: _error_schema(schema) for name, schema in _ERRORS.values()}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "servers": [{"url": "."}],  # beside this document, whatever prefix a proxy adds
        "paths": paths,
        "components": {"schemas": components, "parameters": _parameters(), "responses": writer.responses},
    }
    if guarded:
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"bearer": []}]
    return found


class _Writer:
    """Writes the operations of routes. `responses` collects the components that they refer to."""

    def __init__(self, schemas: dict[Any, Any], guarded: bool) -> None:
        self.responses: dict[str, Any] = {}
        self._schemas = schemas
        self._guarded = guarded

    def operations(self, template: Template, model: ModelMetadata | None) -> dict[str, Any]:
        """The operation of each method of a route."""
        shared = self._operation(template, model)
        about = "" if model is None else model.name
        found = {}
        for method in sorted(template.allowed() - {"HEAD"}):
            words = re.findall(r"\w+", template.path.replace("{model}", about))
            found[method.lower()] = {"operationId": "_".join([method.lower(), *words]), **shared}
        return found

    def _operation(self, template: Template, model: ModelMetadata | None) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "summary": template.summary,
            "tags": [model.name if model is not None else template.task or "server"],
        }
        statuses = {*_ANY_ROUTE, *(() if model is None and not template.task else _MODEL)}
        if template.codec:
            codec: type[Codec] = resolve("codec", template.codec)
            known = model or ModelMetadata("", "")
            statuses |= {*_INFER}
            operation["parameters"] = [{"$ref": f"#/components/parameters/{name}"} for name in _HEADERS]
            operation["requestBody"] = {"required": True, "content": _content(codec.request_content(known))}
            answers = {
                "200": {"description": "The answer of the model", "content": _content(codec.response_content(known))}
            }
        else:
            content = _content({JSON: self._schemas.get(template.response, {})})
            answers = {
                str(status): {"description": REASONS[status], "content": content} for status in template.statuses
            }
        if template.open:
            operation["security"] = []
        elif self._guarded:
            statuses.add(401)
        errors = {str(s): self._error(template, s) for s in sorted(statuses) if str(s) not in answers}
        return {**operation, "responses": {**answers, **errors}}

    def _error(self, template: Template, status: int) -> dict[str, Any]:
        schema, _ = _ERRORS[template.error_body]
        name = f"{schema}{status}"
        headers = {429: "retry-after", 503: "retry-after", 401: "www-authenticate"}
        response: dict[str, Any] = {
            "description": REASONS[status],
            "content": _content({JSON: {"$ref": _REF.format(name=schema)}}),
        }
        if status in headers:
            response["headers"] = {headers[status]: {"schema": _TEXT}}
        self.responses[name] = response
        return {"$ref": f"#/components/responses/{name}"}


def _metadata(backend: Backend, name: str) -> ModelMetadata | None:
    try:
        return backend.metadata(name, None)[0] if backend.model_ready(name, None) else None
    except PenstockError:  # the model has been unloaded
        return None


def _content(schemas: dict[str, Any]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind, schema in schemas.items()}


def _error_schema(error: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def _parameters() -> dict[str, Any]:
    return {
        name: {"name": name, "in": "header", "description": text, "schema": schema}
        for name, (text, schema) in _HEADERS.items()
    }


# The page is Swagger UI if the extra `swagger` is installed, otherwise a plain page with the same operations. The files
# come from the package `flask-swagger-ui`, whose code is not imported; nothing is loaded from other hosts.
_PACKAGE: Final = "flask_swagger_ui"
_OWN: Final = Path(__file__).parent / "static"
_HTML: Final = "text/html; charset=utf-8"
_FILES: Final = {"docs.js": "text/javascript", "swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}


def _page(backend: Backend, route: Route) -> ItemResult:
    return ItemResult(_read("docs.html"), _HTML, headers=PAGE_HEADERS)


def _file(backend: Backend, route: Route) -> ItemResult:
    name = route.names["file"]
    if name not in _FILES:
        raise RouteNotFound("no route has this path")
    return ItemResult(_read(name), _FILES[name], headers=[*PAGE_HEADERS, ("cache-control", "max-age=3600")])


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


DOCS_ROUTES: Final = (
    Template("/docs", "The routes as a web page", answer=_page, open=True),
    Template("/docs/{file}", "A file of this web page", answer=_file, open=True),
)
