"""The objects of deploy/kserve, the containers that KServe makes of them, and a model in TorchServe's layout."""

import json
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import yaml

from support.containers import Container, read_kubernetes

FOLDER = Path(__file__).parents[2] / "deploy" / "kserve"
RUNTIME, *SERVICES = [
    document
    for name in ("runtime.yaml", "inferenceservice.yaml")
    for document in yaml.safe_load_all((FOLDER / name).read_text())
]
ENVELOPES = {"v1": "kserve", "v2": "kservev2", "grpc-v2": "kservev2"}  # the label serviceEnvelope
CONFIG = """
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_metrics_api=true
metrics_mode=prometheus
number_of_netty_threads=4
job_queue_size=10
enable_envvars_config=true
install_py_dep_per_model=true
model_store=/mnt/models/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"double":{"1.0":{"defaultVersion":true,\
"marName":"double.mar","minWorkers":1,"maxWorkers":5,"batchSize":5,"maxBatchDelay":200,"responseTimeout":60}}}}
"""
HANDLER = """
    import time

    def handle(data, context):
        time.sleep(0.01)
        if data and isinstance(data[0], dict):  # tensors of V2
            return [[[2 * cell for cell in row] for row in each["data"]] for each in data]
        return data and [2 * row for row in data]
"""


def service(protocol: str) -> dict[str, Any]:
    """The InferenceService of this protocol: an example, or one with another protocol."""
    found = {each["spec"]["predictor"]["model"]["protocolVersion"]: each for each in SERVICES}
    copy: dict[str, Any] = json.loads(json.dumps(found.get(protocol, SERVICES[0])))
    copy["spec"]["predictor"]["model"]["protocolVersion"] = protocol
    return copy


def rendered(image: Container, protocol: str) -> Container:
    """The container of the runtime for an InferenceService, whose label and ports KServe fills in."""
    predictor = service(protocol)["spec"]["predictor"]
    container = {
        **RUNTIME["spec"]["containers"][0],
        "ports": predictor["model"].get("ports", [{"containerPort": 8080}]),
    }
    container = json.loads(json.dumps(container).replace("{{.Labels.serviceEnvelope}}", ENVELOPES[protocol]))
    container["env"].append({"name": "PROTOCOL_VERSION", "value": protocol})
    return read_kubernetes(container, image, predictor["terminationGracePeriodSeconds"])


def write_tree(folder: Path) -> Path:
    """The folders `config` and `model-store` of the model "double"."""
    for name in ("config", "model-store"):
        (folder / name).mkdir(parents=True)
    (folder / "config" / "config.properties").write_text(CONFIG)
    write_archive(folder / "model-store" / "double.mar", HANDLER)
    return folder


def write_archive(file: Path, handler: str) -> None:
    """An archive with this handler, whose model has the name of the file."""
    model = {"modelName": file.stem, "modelVersion": "1.0", "handler": "handler.py"}
    with zipfile.ZipFile(file, "w") as mar:
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
        mar.writestr("handler.py", textwrap.dedent(handler))
