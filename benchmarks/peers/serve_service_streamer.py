"""service_streamer with the workload in BENCH_WORKLOAD: Flask on gevent's server, and worker processes.

TCP_NODELAY is set: gevent writes head and body separately, which otherwise costs 40 ms per answer.
"""

from __future__ import annotations

if __name__ == "__main__":
    from gevent import monkey

    monkey.patch_all()

import json
import os
import socket
from typing import Any

import models
from service_streamer import ManagedModel, Streamer

workload = json.loads(os.environ["BENCH_WORKLOAD"])


class Model(ManagedModel):
    def init_model(self, *args: Any, **kwargs: Any) -> None:
        self.model = getattr(models, workload["model"])

    def predict(self, batch: list[Any]) -> list[Any]:
        return self.model(batch)


def main() -> None:
    from flask import Flask, Response, request
    from gevent.pywsgi import WSGIServer

    class NoDelay(WSGIServer):
        def handle(self, client: socket.socket, address: Any) -> None:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            super().handle(client, address)

    streamer = Streamer(
        Model,
        batch_size=workload["max_batch"],
        max_latency=workload["wait_ms"] / 1e3 or 0.1,  # its default; a batch of one does not wait, but it polls
        worker_num=workload["instances"],
    )
    app = Flask(__name__)

    @app.post("/predict")
    def predict() -> Response:
        body = request.get_data()
        (result,) = streamer.predict([body if workload["binary"] else json.loads(body)])
        if isinstance(result, bytes):
            return Response(result, content_type="application/octet-stream")
        return Response(json.dumps(result), content_type="application/json")

    NoDelay(("127.0.0.1", workload["ports"][0]), app, log=None, backlog=2048).serve_forever()


if __name__ == "__main__":
    main()
