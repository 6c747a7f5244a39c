"""The Flask app of the examples: one route per predict function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from failures import error_response
from flask import Flask, Response, jsonify, request

from penstock import BadRequest, PenstockError

Predict = Callable[[list[str]], Sequence[Any]]


def infilling_app(**predict: Predict) -> Flask:
    """An app with a route `/NAME` for each `NAME=predict`; its JSON lists the words for the texts in the fields `s`."""
    app = Flask(__name__)
    for name, function in predict.items():
        app.add_url_rule(f"/{name}", name, _view(function), methods=["GET", "POST"])
    app.register_error_handler(PenstockError, _failed)
    return app


def _view(predict: Predict) -> Callable[[], Response]:
    def view() -> Response:
        texts = (request.args if request.method == "GET" else request.form).getlist("s")
        if not texts:
            raise BadRequest("no field s was found; send s=TEXT, the text with a [MASK]")
        words = predict(texts)
        for word in words:
            if isinstance(word, Exception):
                raise word
        return jsonify(list(words))

    return view


def _failed(error: PenstockError) -> tuple[Response, int]:
    status, text = error_response(error)
    return jsonify(error=text), status
