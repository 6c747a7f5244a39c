"""The applications of `streamer.py`, run by the Python of the library that BENCH_SPEC names.

The mode `web` is a web server with a streamer behind one route, `calls` a program that makes the requested calls, and
`workers` the Redis workers.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[1] == "gevent":
    from gevent import monkey

    monkey.patch_all()

import collections
import itertools
import json
import logging
import os
import random
import resource
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from streamer_loadgen import loadgen as run_loadgen
from streamer_models import LIBRARY, MODELS, SPEC, Model, Predict

BATCH = 64
START_S = 60.0
LATENCY_S = 0.06  # most that the p99 of LoadGen's Server scenario may be
SENTENCE = "Happy birthday to [MASK]."


class Direct:
    """No streamer: the model itself."""

    def __init__(self) -> None:
        self.predict: Predict = MODELS[SPEC["model"]]()


def settings() -> dict[str, Any]:
    """Batch size and, unless it is the default, the longest wait."""
    found: dict[str, Any] = {"batch_size": BATCH}
    if SPEC.get("max_latency") is not None:
        found["max_latency"] = SPEC["max_latency"]
    return found


def streamer() -> Any:
    """A streamer of the requested kind, with every worker up."""
    kind, workers = SPEC["kind"], SPEC.get("workers", 1)
    if kind == "direct":
        return Direct()
    if kind == "threaded":
        return LIBRARY.ThreadedStreamer(MODELS[SPEC["model"]](), **settings())
    if kind == "process":
        made = LIBRARY.Streamer(Model, worker_num=workers, cuda_devices=SPEC.get("devices"), **settings())
    else:
        made = redis()
    end = time.monotonic() + START_S
    while len(list(Path(os.environ["TMPDIR"]).glob("ready-*"))) < workers:
        if time.monotonic() > end:
            raise TimeoutError(f"not all of {workers} workers are up after {START_S} s")
        time.sleep(0.05)
    return made


def broker() -> str:
    return f"localhost:{SPEC['redis_port']}"


def redis() -> Any:
    """A private broker, workers in another program, and a streamer here."""
    port = SPEC["redis_port"]
    subprocess.Popen(["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning"])
    end = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("localhost", port)).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    subprocess.Popen([sys.executable, __file__, "workers"])
    return LIBRARY.RedisStreamer(redis_broker=broker())


def web(server: str) -> None:
    """Flask with one route; `s` are texts, `file` are images."""
    from flask import Flask, Response, jsonify, request

    app = Flask(__name__)
    model = streamer()

    @app.post("/predict")
    def predict() -> Response:
        return jsonify(model.predict(request.form.getlist("s") or [f.read() for f in request.files.getlist("file")]))

    if server == "gevent":
        from gevent.pywsgi import WSGIServer

        WSGIServer(("127.0.0.1", SPEC["port"]), app, log=None, backlog=2048).serve_forever()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request is no work of ours
    app.run(port=SPEC["port"], threaded=True)


# ---- calls


def inputs(count: int) -> list[Any]:
    """The inputs of this run. No array occurs twice: pickling many at a time would send it once."""
    if SPEC["model"] in ("first number", "matmul"):
        import numpy

        return list(numpy.random.default_rng().random((count, SPEC.get("floats", 1024)), numpy.float32))
    return [SENTENCE] * count


def loop(model: Any, seconds: float) -> dict[str, float]:
    """Items/s of the model alone, in full batches."""
    batch, done = inputs(BATCH), 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += len(model.predict(batch))
    return {"rate": done / (time.perf_counter() - start)}


def futures(model: Any, seconds: float, ahead: int | None = None) -> dict[str, float]:
    """Items/s of calls of one item each. When `ahead` wait, by default 16 batches per worker, half are fetched."""
    ones, window = itertools.cycle([x] for x in inputs(BATCH)), ahead or 16 * BATCH * SPEC.get("workers", 1)
    waiting: collections.deque[Any] = collections.deque()
    done = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        while len(waiting) < window:
            waiting.append(model.submit(next(ones)))
        while len(waiting) > window // 2:
            done += len(waiting.popleft().result(20))
    while waiting:
        done += len(waiting.popleft().result(20))
    return {"rate": done / (time.perf_counter() - start)}


def callers(model: Any, threads: int, items: int, seconds: float) -> dict[str, Any]:
    """Items/s, and the latency of each call in s, of threads that make one call after the other.

    A call costs `cpu_us` of this program's CPU, and `switches` of its threads that wait for something.
    """
    latencies: list[float] = []
    failures: list[BaseException] = []
    cpu_s, switches = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    start = time.perf_counter()

    def call() -> None:
        batch = inputs(items)
        try:
            last = time.perf_counter()
            while last - start < seconds:
                assert len(model.predict(batch)) == items
                now = time.perf_counter()
                latencies.append(now - last)
                last = now
        except BaseException as e:
            failures.append(e)

    crew = [threading.Thread(target=call) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if failures:
        raise failures[0]
    rate, count = len(latencies) * items / (time.perf_counter() - start), len(latencies)
    cpu_us = (time.process_time() - cpu_s) / count * 1e6
    switches = (resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - switches) / count
    return {"rate": rate, "cpu_us": cpu_us, "switches": switches, "latencies": latencies}


def submits(model: Any, count: int) -> dict[str, float]:
    """Makes a number of calls; one in a hundred is abandoned at once, and has a deadline if the library supports it."""
    waiting: collections.deque[Any] = collections.deque()
    dice = random.Random(3)
    given_up = 0
    start = time.perf_counter()
    deadline = {"deadline": 0.001} if SPEC["library"] == "penstock" else {}
    for _ in range(count):
        hurried = dice.random() < 0.01
        future = model.submit([SENTENCE], **(deadline if hurried else {}))
        if hurried:
            try:
                future.result(0)
            except TimeoutError:
                given_up += 1
        else:
            waiting.append(future)
        if len(waiting) > 1024:
            waiting.popleft().result(20)
    for future in waiting:
        future.result(20)
    return {"rate": count / (time.perf_counter() - start), "given_up": given_up}


def loadgen(model: Any, scenario: str, qps: float, seconds: float) -> dict[str, Any]:
    """One run of MLPerf's load generator, with calls of one item each."""
    return run_loadgen(lambda index: model.submit([index]), scenario, qps, seconds, LATENCY_S, SPEC["loadgen"])


CALLS = {"loop": loop, "futures": futures, "callers": callers, "submits": submits, "loadgen": loadgen}


def calls() -> None:
    """Executes each line of BENCH_FD and answers with a line."""
    model = streamer()
    model.predict(inputs(1))
    with socket.socket(fileno=int(os.environ["BENCH_FD"])) as s, s.makefile("rw", buffering=1) as lines:
        lines.write("{}\n")
        for line in lines:
            what, arguments = json.loads(line)
            lines.write(json.dumps(CALLS[what](model, **arguments)) + "\n")
    os._exit(0)  # threads of service_streamer never end


def main() -> None:
    what = sys.argv[1]
    if what == "calls":
        calls()
    elif what == "workers":
        LIBRARY.run_redis_workers_forever(
            Model,
            worker_num=SPEC.get("workers", 1),
            cuda_devices=SPEC.get("devices"),
            redis_broker=broker(),
            **settings(),
        )
    else:
        web(what)


if __name__ == "__main__":
    main()
