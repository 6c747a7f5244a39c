"""service_streamer inside a program: TRANSPORT (thread or process) THREADS SIZE SECONDS WARM_SECONDS.

SIZE is the batch size. Prints one line of JSON: when the calls started and ended, and the latency of each call, in
seconds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import models
from service_streamer import ManagedModel, Streamer, ThreadedStreamer


class Model(ManagedModel):
    def init_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def predict(self, batch: list[Any]) -> list[Any]:
        return models.echo(batch)


def crowd(streamer: Any, threads: int, seconds: float) -> tuple[float, float, list[float]]:
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    def loop() -> None:
        last = time.perf_counter()
        while last < end:
            streamer.predict([1])
            now = time.perf_counter()
            latencies.append(now - last)
            last = now

    crew = [threading.Thread(target=loop) for _ in range(threads)]
    start = time.perf_counter()
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    return start, time.perf_counter(), latencies


def main() -> None:
    transport, threads, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    seconds, warm = map(float, sys.argv[4:])
    wait = 0.001 if size > 1 else 0.1  # its default; a batch of one does not wait, but it polls
    if transport == "thread":
        streamer = ThreadedStreamer(models.echo, batch_size=size, max_latency=wait)
    else:
        streamer = Streamer(Model, batch_size=size, max_latency=wait, worker_num=1)
    streamer.predict([1])
    crowd(streamer, threads, warm)
    print(json.dumps(crowd(streamer, threads, seconds)), flush=True)
    if transport == "process":
        streamer.destroy_workers()
    os._exit(0)  # its own threads never end


if __name__ == "__main__":
    main()
