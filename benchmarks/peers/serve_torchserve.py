"""TorchServe with the workload in BENCH_WORKLOAD, as `/predictions/model`; all its files are in TMPDIR."""

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


def main() -> None:
    workload = json.loads(os.environ["BENCH_WORKLOAD"])
    folder, bin_ = Path(os.environ["TMPDIR"]), Path(sys.executable).parent
    store = folder / "store"
    store.mkdir()
    model = {
        "minWorkers": workload["instances"],
        "maxWorkers": workload["instances"],
        "batchSize": workload["max_batch"],
        "maxBatchDelay": workload["wait_ms"],
        "responseTimeout": 120,
        "clientTimeoutInMills": workload["timeout_ms"],
    }
    (folder / "model.yaml").write_text("".join(f"{k}: {v}\n" for k, v in model.items()))
    os.environ["PATH"] = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    logs = f"{folder}/logs"
    os.environ |= {"LOG_LOCATION": logs, "METRICS_LOCATION": logs, "BENCH_MODELS": f"{HERE.parent}"}
    archive = f"{bin_}/torch-model-archiver --model-name model --version 1 --archive-format no-archive".split()
    archive += ["--handler", f"{HERE}/torchserve_handler.py", "--config-file", f"{folder}/model.yaml"]
    subprocess.run([*archive, "--export-path", store], check=True)
    inference, management, metrics, grpc, grpc_management = workload["ports"]
    settings = {
        "inference_address": f"http://127.0.0.1:{inference}",
        "management_address": f"http://127.0.0.1:{management}",
        "metrics_address": f"http://127.0.0.1:{metrics}",
        "grpc_inference_port": grpc,
        "grpc_management_port": grpc_management,
        "disable_token_authorization": "true",
        "disable_system_metrics": "true",
        "job_queue_size": workload["queue"] or 1000,
        "max_request_size": 20_000_000,
        "max_response_size": 20_000_000,
        "vmargs": f"-Xmx2g -Djava.io.tmpdir={folder}",
    }
    (folder / "config.properties").write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
    (folder / "log4j2.xml").write_text(LOGGING)
    serve = [str(bin_ / "torchserve"), "--start", "--foreground", "--disable-token-auth", "--no-config-snapshots"]
    serve += ["--model-store", str(store), "--models", "model=model"]
    serve += ["--ts-config", str(folder / "config.properties"), "--log-config", str(folder / "log4j2.xml")]
    os.execv(serve[0], serve)


if __name__ == "__main__":
    main()
