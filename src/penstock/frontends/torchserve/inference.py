"""The routes of TorchServe's inference API that lead to a model, and `/ping`.

Source: `docs/inference_api.md` of TorchServe 0.12.0, and the KServe protocols V1 and V2.
"""

from __future__ import annotations

from typing import Final

from penstock.frontends.base import Backend
from penstock.frontends.http.template import Route, Template
from penstock.frontends.torchserve.base import Administration, Face, Group
from penstock.protocols.torchserve.bodies import json_body
from penstock.types import Headers, ItemResult

JSON: Final = "application/json"
GUARD: Final[Group] = "inference"
POST: Final = frozenset({"POST"})
# all that the parser knows, but OPTIONS, which asks for a description, and CONNECT, which has no path
NOT_OPTIONS: Final = frozenset(
    {
        "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "COPY", "LOCK", "MKCOL", "MOVE",
        "PROPFIND", "PROPPATCH", "SEARCH", "UNLOCK", "BIND", "REBIND", "UNBIND", "ACL", "REPORT",
        "MKACTIVITY", "CHECKOUT", "MERGE", "M-SEARCH", "NOTIFY", "SUBSCRIBE", "UNSUBSCRIBE", "PURGE",
        "MKCALENDAR", "LINK", "UNLINK", "SOURCE",
    }
)  # fmt: skip
PREDICT: Final[Headers] = [(b"explain", b"False")]
EXPLAIN: Final[Headers] = [(b"explain", b"True")]


def inference_routes(administration: Administration, face: Face) -> tuple[Template, ...]:
    """`/ping`, and every way to a prediction or an explanation but the legacy ones."""

    def ping(backend: Backend, route: Route) -> ItemResult:
        healthy = administration.healthy()
        body = json_body({"status": "Healthy" if healthy else "Unhealthy"})
        return ItemResult(body=body, content_type=JSON, status=200 if healthy else 500)

    def model(path: str, summary: str, headers: Headers, methods: frozenset[str] = NOT_OPTIONS) -> Template:
        return Template(path, summary, codec=face.codec, headers=headers, methods=methods, guard=GUARD)

    return (
        Template("/ping", "Whether every model has its workers", answer=ping, methods=NOT_OPTIONS, guard=GUARD),
        model("/predictions/{model}", "Predict", PREDICT),
        model("/predictions/{model}/{version}", "Predict", PREDICT),
        model("/predictions/{model}/{version}/{url_path...}", "Predict", PREDICT),
        model("/explanations/{model}", "Explain", EXPLAIN),
        model("/explanations/{model}/{version}", "Explain", EXPLAIN),
        model("/v1/models/{model}:predict", "Predict, KServe V1", PREDICT, POST),
        model("/v1/models/{model}:explain", "Explain, KServe V1", EXPLAIN, POST),
        model("/v2/models/{model}/infer", "Predict, KServe V2", PREDICT, POST),
        model("/v2/models/{model}/explain", "Explain, KServe V2", EXPLAIN, POST),
    )


def legacy_routes(face: Face) -> tuple[Template, ...]:
    """The oldest ways to a prediction, to be tried after all others: their first segment may be any name."""
    return tuple(
        Template(
            path,
            "Predict, deprecated",
            codec=face.codec,
            headers=PREDICT,
            query=True,
            methods=NOT_OPTIONS,
            guard=GUARD,
        )
        for path in ("/{model}/predict", "/{model}/{version}/predict")
    )
