"""Image recognition with Flask, without and with batching: `python app.py`.

    curl -F "file=@three.jpg" http://127.0.0.1:5005/predict
    curl -F "file=@three.jpg" http://127.0.0.1:5005/stream_predict

Each request runs in its own thread. `/predict` calls the model there; `/stream_predict` passes the image to the
streamer, which batches the images of all threads.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

from flask import Flask, Response, jsonify, request
from model import DENSENET, WEIGHTS, ImageModel
from werkzeug.exceptions import RequestEntityTooLarge

from penstock import BadRequest, DeadlineExceeded, ModelNotReady, PenstockError, QueueFull, ThreadedStreamer

MAX_FILE_BYTES = 16 * 2**20
STATUS: dict[type[Exception], int] = {
    BadRequest: 400,
    RequestEntityTooLarge: 413,
    QueueFull: 503,
    ModelNotReady: 503,
    DeadlineExceeded: 504,
}


def vision_app(**predict: Callable[[list[bytes]], list[Any]]) -> Flask:
    """An app with a route `POST /NAME` for each `NAME=predict`, which classifies the image in the field `file`."""
    app = Flask(__name__)
    app.config["MAX_CONTENT_LENGTH"] = MAX_FILE_BYTES
    for name, function in predict.items():
        app.add_url_rule(f"/{name}", name, _view(function), methods=["POST"])
    app.register_error_handler(PenstockError, _failed)
    app.register_error_handler(RequestEntityTooLarge, _failed)
    return app


def _view(predict: Callable[[list[bytes]], list[Any]]) -> Callable[[], Response]:
    def view() -> Response:
        if "file" not in request.files:
            found = ", ".join(sorted({*request.files, *request.form})) or "none"
            raise BadRequest(f"no file in a field 'file', fields found: {found}; send one with curl -F file=@three.jpg")
        [answer] = predict([request.files["file"].read()])
        if isinstance(answer, Exception):
            raise answer
        return jsonify(answer)

    return view


def _failed(error: Exception) -> tuple[Response, int]:
    for kind, status in STATUS.items():
        if isinstance(error, kind):
            return jsonify(error=str(error)), status
    logging.error("a request failed", exc_info=error)
    return jsonify(error="the model failed on this image"), 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default=str(WEIGHTS), help=f"a file written by train.py, or {DENSENET}")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5005)
    options = parser.parse_args()
    model = ImageModel(options.weights)
    with ThreadedStreamer(model.batch_prediction, batch_size=64, max_latency=0.1) as streamer:
        app = vision_app(predict=model.batch_prediction, stream_predict=streamer.predict)
        app.run(options.host, options.port, threaded=True)


if __name__ == "__main__":
    main()
