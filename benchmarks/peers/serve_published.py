"""The published pipeline's two servers around `published_handler.py`: TorchServe, or Flask in one process and thread.

BENCH_WORKLOAD has ports, workers, batch and delay_ms for TorchServe. Its configuration is the published one, except
for the addresses (loopback) and logging (errors only).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOGGING = """<?xml version="1.0"?>
<Configuration status="ERROR">
 <Appenders><Console name="console" target="SYSTEM_ERR"/></Appenders>
 <Loggers><Root level="error"><AppenderRef ref="console"/></Root></Loggers>
</Configuration>
"""


def serve_flask(port: int) -> None:
    import logging

    import flask
    from published_handler import captioner

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = flask.Flask(__name__)

    @app.post("/predictions/model")
    def caption() -> flask.Response:
        return flask.jsonify(captioner.captions([flask.request.get_data()])[0])

    app.run(port=port, threaded=False)


def serve_torchserve(workload: dict[str, object], ports: list[int]) -> None:
    folder, bin_ = Path(os.environ["TMPDIR"]), Path(sys.executable).parent
    store = folder / "store"
    store.mkdir()
    os.environ["PATH"] = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"LOG_LOCATION": f"{folder}/logs", "METRICS_LOCATION": f"{folder}/logs"}
    archive = f"{bin_}/torch-model-archiver --model-name model --version 1.0 --handler {HERE}/published_handler.py"
    subprocess.run([*archive.split(), "--export-path", store], check=True)
    of_model = {
        "defaultVersion": True,
        "marName": "model.mar",
        "minWorkers": workload["workers"],
        "maxWorkers": workload["workers"],
        "batchSize": workload["batch"],
        "maxBatchDelay": workload["delay_ms"],
        "responseTimeout": 120,
    }
    settings = {
        "inference_address": f"http://127.0.0.1:{ports[0]}",
        "management_address": f"http://127.0.0.1:{ports[1]}",
        "metrics_address": f"http://127.0.0.1:{ports[2]}",
        "grpc_inference_port": ports[3],
        "grpc_management_port": ports[4],
        "max_request_size": 500_000_000,
        "max_response_size": 500_000_000,
        "job_queue_size": 1000,
        "enable_metrics_api": "false",
        "disable_system_metrics": "true",
        "load_models": "model.mar",
        "models": json.dumps({"model": {"1.0": of_model}}),
        "vmargs": f"-Djava.io.tmpdir={folder}",
    }
    (folder / "config.properties").write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
    (folder / "log4j2.xml").write_text(LOGGING)
    serve = [str(bin_ / "torchserve"), "--start", "--foreground", "--disable-token-auth", "--no-config-snapshots"]
    serve += ["--model-store", str(store), "--ts-config", str(folder / "config.properties")]
    os.execv(serve[0], [*serve, "--log-config", str(folder / "log4j2.xml")])


def main() -> None:
    workload = json.loads(os.environ["BENCH_WORKLOAD"])
    if workload["flask"]:
        serve_flask(workload["ports"][0])
    else:
        serve_torchserve(workload, workload["ports"])


if __name__ == "__main__":
    main()
