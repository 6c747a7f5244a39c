"""A loop without a server: `python pipeline_bare.py NET BATCH THREADS SECONDS`; prints its rate as a line of JSON.

Each thread decodes and resizes as many images as the batch has rows, and discards them. It then runs the session on a
prepared batch. The session thus gets the cores that decoding leaves over, and nothing is handed over.
"""

import json
import sys
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import onnxruntime

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "resnet50_pipeline"


def main() -> None:
    net, batch, threads, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    cv2.setNumThreads(1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(EXAMPLE / f"{net}.onnx"), options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    side = given.shape[2]
    images = [np.frombuffer(f.read_bytes(), np.uint8) for f in sorted((EXAMPLE / "images").glob("*.jpg"))]
    tensor = np.random.default_rng(0).standard_normal((batch, 3, side, side), np.float32)
    done = [0] * threads
    session.run(None, {given.name: tensor})
    end = time.perf_counter() + seconds

    def loop(thread: int) -> None:
        n = thread
        while time.perf_counter() < end:
            for _ in range(batch):
                n = (n + threads) % len(images)
                cv2.resize(cv2.imdecode(images[n], cv2.IMREAD_COLOR), (side, side))
            session.run(None, {given.name: tensor})
            done[thread] += batch

    workers = [threading.Thread(target=loop, args=(n,)) for n in range(threads)]
    begun, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    elapsed, used = time.perf_counter() - begun, time.process_time() - cpu
    figures = {"qps": sum(done) / elapsed, "cpu_ms_a_request": 1e3 * used / sum(done), "cpu": 100 * used / elapsed}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
