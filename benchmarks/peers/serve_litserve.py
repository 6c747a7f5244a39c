"""LitServe with the workload in BENCH_WORKLOAD: one API server process, and its faster queue to the workers.

FastAPI reads its annotations, so they must not be strings.
"""

import json
import os
from typing import Annotated, Any

import litserve
import models
from fastapi import Body, Response

workload = json.loads(os.environ["BENCH_WORKLOAD"])


class Json(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.model = getattr(models, workload["model"])

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return request

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, batch: Any) -> Any:
        if workload["max_batch"] == 1:  # then it hands over one item, and not in a list
            return self.model([batch])[0]
        return self.model(batch)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Any:
        return Response(output, media_type="application/octet-stream") if isinstance(output, bytes) else output


class Raw(Json):
    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]):  # type: ignore[no-untyped-def]
        return request


if __name__ == "__main__":
    kind = Raw if workload["binary"] else Json
    api = kind(max_batch_size=workload["max_batch"], batch_timeout=workload["wait_ms"] / 1e3)
    server = litserve.LitServer(
        api,
        accelerator="cpu",
        workers_per_device=workload["instances"],
        timeout=workload["timeout_ms"] / 1e3,
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=workload["ports"][0],
        num_api_servers=1,
        generate_client_file=False,
        log_level="error",
        access_log=False,
    )
