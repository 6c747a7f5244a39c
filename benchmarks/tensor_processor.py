"""Processor time per row of a server's worker, less that of the model: row 7 of `tensors.py`."""

import functools
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime
from closed_loop import Sample
from tensor_clients import Run
from tensor_servers import TensorServer

MODEL_S = 0.05  # of repeated calls of the model with one number of rows
COLUMNS = {
    "batch": "rows/batch",
    "aside_us": "worker less model, us/row",
    "worker_us": "worker us/row",
    "model_us": "model us/row",
    "server_us": "server us/request",
}


@functools.cache
def _session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


@functools.cache
def model_s(file: Path, rows: int) -> float:
    """Seconds of processor time of one call of `mlp.onnx` with so many rows, by a program that does nothing else."""
    session, x = _session(file), np.ones((rows, 64), np.float32)
    session.run(None, {"x": x})
    calls, start = 0, time.thread_time()
    while (spent := time.thread_time() - start) < MODEL_S:
        for _ in range(50):
            session.run(None, {"x": x})
        calls += 50
    return spent / calls


def with_processor_time(run: Run, file: Path) -> Run:
    """The run, with COLUMNS added: from the processes' times and the server's statistics, before and after."""

    def measured(server: TensorServer) -> Sample:
        batches, (server_s, workers_s) = Counter(server.batches()), server.processor_s()
        sample = run(server)
        after_server_s, after_workers_s = server.processor_s()
        batches = Counter(server.batches()) - batches
        rows = sum(size * count for size, count in batches.items())
        model_us = sum(model_s(file, size) * count for size, count in batches.items()) / rows * 1e6
        worker_us = (after_workers_s - workers_s) / rows * 1e6
        return sample | {
            "batch": rows / batches.total(),
            "aside_us": worker_us - model_us,
            "worker_us": worker_us,
            "model_us": model_us,
            "server_us": (after_server_s - server_s) / rows * 1e6,
        }

    return measured
