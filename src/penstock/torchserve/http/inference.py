"""The routes of TorchServe's inference API that lead to a model, and `/ping`.

Source: `docs/inference_api.md` of TorchServe 0.12.0, and the KServe protocols V1 and V2.
"""

from __future__ import annotations

from typing import Final

from penstock.core.contracts import Backend
from penstock.serving.http.template import Route, Template
from penstock.torchserve.http.base import Administration, Face, Group
from penstock.torchserve.protocol.bodies import json_body
from penstock.types import Headers, ItemResult

JSON: Final = "application/json"
GUARD: Final[Group] = "inference"
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

    return (
        Template("/ping", "Whether every model has its workers", answer=ping, guard=GUARD),
        Template("/ping/{rest...}", "The same", answer=ping, guard=GUARD),
        *(
            _model(face, f"/{verb}/{{model}}{tail}", summary, [*headers, (b"url_path", b"")])
            for verb, summary, headers in (("predictions", "Predict", PREDICT), ("explanations", "Explain", EXPLAIN))
            for tail in ("", "/{version}", "/{version}/{url_path...}")
        ),
        _model(face, "/v1/models/{model}:predict", "Predict, KServe V1", PREDICT),
        _model(face, "/v1/models/{model}:explain", "Explain, KServe V1", EXPLAIN),
        _model(face, "/v2/models/{model}/infer", "Predict, KServe V2", PREDICT),
        _model(face, "/v2/models/{model}/explain", "Explain, KServe V2", EXPLAIN),
    )


def legacy_routes(face: Face) -> tuple[Template, ...]:
    """The oldest ways to a prediction, to be tried after all others: their first segment may be any name."""
    return tuple(
        _model(face, path, "Predict, deprecated", [], query=True)
        for path in ("/{model}/predict", "/{model}/{version}/predict")
    )


def _model(face: Face, path: str, summary: str, headers: Headers, query: bool = False) -> Template:
    """A way to a model, for every method: TorchServe looks at none of them here."""
    return Template(path, summary, codec=face.codec, headers=headers, query=query, methods=NOT_OPTIONS, guard=GUARD)
