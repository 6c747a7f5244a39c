"""The same work as the usual service: `python naive.py --port 5005`. Flask with one lock.

Each request has a thread, which decodes its page, waits for the lock of the models, and reads its words one by one.
"""

from __future__ import annotations

import argparse
import threading

from flask import Flask, Response, jsonify, request
from ocr import drawn, words_of
from plain import Reader, decoded


def naive_app() -> Flask:
    """The service: POST /predict with a page as the body."""
    app = Flask(__name__)
    reader, lock = Reader(), threading.Lock()

    @app.post("/predict")
    def predict() -> Response | tuple[Response, int]:
        try:
            page = decoded(request.get_data())
        except ValueError as error:
            return jsonify(error=str(error)), 400
        with lock:
            found = reader.found(page)
        if request.args.get("format") == "png":
            return Response(drawn(page, *found[:2]), mimetype="image/png")
        return jsonify(words_of(*found))

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=5005)
    naive_app().run(port=parser.parse_args().port, threaded=True)


if __name__ == "__main__":
    main()
