"""mosec with the workload in BENCH_WORKLOAD: a Rust front-end and worker processes. mosec itself reads `--port`.

It requests a listen backlog of 128, which `servers.py` raises.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import models
from mosec import Server, Worker

workload = json.loads(os.environ["BENCH_WORKLOAD"])
predict = getattr(models, workload["model"])


class Json(Worker):
    """mosec decodes JSON. Its own encoder indents, which is slower, so it is not used."""

    def forward(self, data: Any) -> Any:
        if workload["max_batch"] == 1:  # then it hands over one item, and not in a list
            return predict([data])[0]
        return predict(data)

    def serialize(self, data: Any) -> bytes:
        return json.dumps(data).encode()


class Raw(Json):
    """Bodies unchanged; a result other than bytes is sent as JSON."""

    def deserialize(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: Any) -> bytes:
        return bytes(data) if isinstance(data, (bytes, bytearray)) else json.dumps(data).encode()


if __name__ == "__main__":
    sys.argv += ["--log-level", "error", "--timeout", str(workload["timeout_ms"])]
    if workload["queue"] is not None:
        sys.argv += ["--capacity", str(workload["queue"])]
    server = Server()
    server.append_worker(
        Raw if workload["binary"] else Json,
        num=workload["instances"],
        max_batch_size=workload["max_batch"],
        max_wait_time=workload["wait_ms"],
    )
    server.run()
