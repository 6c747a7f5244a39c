"""How `tensors.py` sends a case: `wrk` over HTTP, `perf_analyzer` and `h2load` over gRPC, also in shared memory.

Every function returns a run for `TensorServer.measure`, except `check_http` and `check_grpc`.
"""

import contextlib
import csv
import dataclasses
import json
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from closed_loop import Sample, h2load, wrk
from servers import python_of
from tensor_models import MODELS, Case
from tensor_servers import TensorServer

from penstock.serving.protocols.oip_messages import decode_answer, encode_arrays
from penstock.serving.protocols.oip_protobuf import open_inference

Run = Callable[[TensorServer], Sample]
WINDOWS = 3  # perf_analyzer reports nothing for fewer
HANGS_S = 60  # after the end of its windows perf_analyzer waits for all answers
ANY_SPREAD = "100000"  # per cent: a run is never repeated because its windows differ


@dataclasses.dataclass(frozen=True)
class Post:
    """A request over HTTP."""

    path: str
    body: bytes
    content_type: str
    headers: Mapping[str, object] = dataclasses.field(default_factory=dict)


def binary(case: Case) -> Post:
    """Open Inference with binary tensors, in the response too."""
    head, buffers = encode_arrays({case.name: case.x}, binary_outputs=True)
    body = b"".join([head, *map(bytes, buffers)])
    length = {"Inference-Header-Content-Length": len(head)}
    return Post(f"v2/models/{case.model}/infer", body, "application/octet-stream", length)


def open_inference_json(case: Case) -> Post:
    """Open Inference with all numbers in JSON."""
    numbers = [float(f"{x:.3f}") for x in case.x.ravel()]
    x = {"name": case.name, "datatype": "FP32", "shape": list(case.x.shape), "data": numbers}
    body = json.dumps({"inputs": [x]}, separators=(",", ":")).encode()
    return Post(f"v2/models/{case.model}/infer", body, "application/json")


def native_json(case: Case) -> Post:
    """A list of the numbers of one row; so is the answer."""
    numbers = [float(f"{x:.3f}") for x in case.x[0].ravel()]
    return Post(f"predictions/{case.model}", json.dumps(numbers, separators=(",", ":")).encode(), "application/json")


def send(server: TensorServer, request: Post) -> tuple[bytes, int | None]:
    """The body of the response, and the bytes of JSON at its beginning if it is binary."""
    headers = {"content-type": request.content_type, **{k: str(v) for k, v in request.headers.items()}}
    asked = urllib.request.Request(f"http://{server.http}/{request.path}", request.body, headers)
    with urllib.request.urlopen(asked, timeout=30) as response:
        length = response.headers.get("Inference-Header-Content-Length")
        return response.read(), None if length is None else int(length)


def check_http(server: TensorServer, case: Case, request: Post) -> None:
    """Raises ValueError unless the request gets the right answer."""
    with server.awake():
        body, length = send(server, request)
    if request.path.startswith("predictions"):
        return case.check(json.loads(body))
    (found,) = decode_answer(body, length).outputs.values()
    case.check(found)


def check_grpc(server: TensorServer, case: Case) -> None:
    """The same for gRPC."""
    import tritonclient.grpc

    given = tritonclient.grpc.InferInput(case.name, case.x.shape, "FP32")
    given.set_data_from_numpy(case.x)
    with server.awake(), contextlib.closing(tritonclient.grpc.InferenceServerClient(server.grpc)) as client:
        result = client.infer(case.model, [given])
        case.check(result.as_numpy(result.get_response().outputs[0].name))


def closed_loop(request: Post, connections: int, seconds: int) -> Run:
    """`wrk` with this request."""

    def run(server: TensorServer) -> Sample:
        url = f"http://{server.http}/{request.path}"
        return wrk(url, request.body, request.content_type, connections, seconds, request.headers)

    return run


def shared_memory(case: Case, connections: int, seconds: int) -> Run:
    """`wrk` with a request whose input and output lie in regions of system shared memory; the output is checked."""

    def run(server: TensorServer) -> Sample:
        output = MODELS[case.model].output[0]
        with _region(server, case.x.tobytes()) as given, _region(server, bytes(case.y.nbytes)) as found:
            x = {
                "name": case.name,
                "shape": case.x.shape,
                "datatype": "FP32",
                "parameters": _place(given, case.x.nbytes),
            }
            y = {"name": output, "parameters": _place(found, case.y.nbytes)}
            body = json.dumps({"inputs": [x], "outputs": [y]}).encode()
            request = Post(f"v2/models/{case.model}/infer", body, "application/json")
            send(server, request)
            case.check(np.frombuffer(Path("/dev/shm", found).read_bytes(), np.float32))
            return closed_loop(request, connections, seconds)(server)

    return run


def _place(region: str, size: int) -> dict[str, Any]:
    return {"shared_memory_region": region, "shared_memory_byte_size": size}


@contextlib.contextmanager
def _region(server: TensorServer, data: bytes) -> Iterator[str]:
    """The name of a new region, registered, with this content."""
    name = f"penstock-benchmark-{uuid.uuid4().hex}"
    file = Path("/dev/shm", name)
    file.write_bytes(data)
    place = json.dumps({"key": f"/{name}", "offset": 0, "byte_size": len(data)}).encode()
    try:
        send(server, Post(f"v2/systemsharedmemory/region/{name}/register", place, "application/json"))
        yield name
        _unregister(server, name)
    finally:
        file.unlink()


def _unregister(server: TensorServer, region: str) -> None:
    """Requests that `wrk` left unanswered may use the region for a moment."""
    for left in reversed(range(50)):
        try:
            send(server, Post(f"v2/systemsharedmemory/region/{region}/unregister", b"", "application/json"))
        except urllib.error.HTTPError as e:
            if not left:
                raise RuntimeError(f"{server.name} keeps the region: {e.read()!r}") from e
            time.sleep(0.1)
        else:
            return


def perf_analyzer(case: Case, concurrency: int, seconds: int, *, protocol: str = "grpc", shared: bool = False) -> Run:
    """Triton's load generator, with random numbers of the case's shape; three windows of a third of the time each."""
    rows, *shape = case.x.shape
    command = [str(Path(python_of("triton")).parent / "perf_analyzer"), "-a", "-m", case.model, "-b", str(rows)]
    command += ["-i", protocol, "--shape", f"{case.name}:{','.join(map(str, shape))}"]
    command += ["--concurrency-range", str(concurrency), "--shared-memory", "system" if shared else "none"]
    command += ["-p", str(max(1, seconds * 1000 // WINDOWS)), "-r", str(WINDOWS), "-s", ANY_SPREAD]

    def run(server: TensorServer) -> Sample:
        address = server.grpc if protocol == "grpc" else server.http
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder, "table.csv")
            whole = [*command, "-u", address, "-f", str(table)]
            done = subprocess.run(whole, capture_output=True, text=True, timeout=seconds + HANGS_S)
            if done.returncode != 0 or not table.exists():
                raise OSError(
                    f"perf_analyzer: exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-500:]}"
                )
            with table.open() as file:
                (row,) = csv.DictReader(file)
        latency = {f"p{p}_ms": float(row[f"p{p} latency"]) / 1e3 for p in (50, 99)}
        return {"rate": float(row["Inferences/Second"]) / rows, "errors": 0, **latency}

    return run


def multiplexed(case: Case, streams: int, seconds: int) -> Run:
    """`h2load` with so many gRPC calls at once over one connection; it takes less of the processor, and has no p99."""
    request = open_inference().message("inference.ModelInferRequest")(model_name=case.model)
    request.inputs.add(name=case.name, datatype="FP32", shape=case.x.shape)
    request.raw_input_contents.append(case.x.tobytes())
    message = request.SerializeToString()

    def run(server: TensorServer) -> Sample:
        return h2load(f"http://{server.grpc}/inference.GRPCInferenceService/ModelInfer", message, seconds, streams)

    return run
