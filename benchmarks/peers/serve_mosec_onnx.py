"""mosec with the ONNX file and the settings in BENCH_WORKLOAD: the worker that its users write."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec
import numpy as np
import onnxruntime
from mosec import Server, Worker

workload = json.loads(os.environ["BENCH_WORKLOAD"])


class Onnx(Worker):
    """A list of numbers is a row, and so is its answer. mosec decodes JSON; its encoder indents, so it is not used."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(workload["file"], options, providers=["CPUExecutionProvider"])

    def forward(self, data: list[Any]) -> list[Any]:
        return self._session.run(None, {"x": np.array(data, np.float32)})[0].tolist()

    def serialize(self, data: Any) -> bytes:
        return json.dumps(data).encode()


class WithMsgspec(Onnx):
    """The same with a faster codec, for those who know it."""

    def deserialize(self, data: bytes) -> Any:
        return msgspec.json.decode(data)

    def serialize(self, data: Any) -> bytes:
        return msgspec.json.encode(data)


if __name__ == "__main__":
    sys.argv += ["--log-level", "error", "--timeout", str(workload["timeout_ms"])]
    server = Server()
    worker = WithMsgspec if workload["msgspec"] else Onnx
    server.append_worker(worker, num=1, max_batch_size=workload["max_batch"], max_wait_time=workload["wait_ms"])
    server.run()
