"""How many tensors per second does the gRPC listener accept, beside HTTP with binary tensors, and beside TorchServe?

A request is one raw FP32 tensor, the answer its sum, and 16 requests are in flight. First C programs send them: over
one connection `h2load` for gRPC, over 16 `wrk` for HTTP. Then tritonclient does, in 16 threads of one program: its gRPC
client over one channel, its HTTP client over 16 connections.
"""

import functools
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import numpy as np
from closed_loop import Sample, h2load, wrk
from processes import Processes
from torchserve_servers import Archive, Setting, TorchServe, make_archive

from penstock.serving.protocols.oip_messages import encode_arrays
from penstock.serving.protocols.oip_protobuf import open_inference
from penstock.torchserve.grpc import INFERENCE, PROTOS

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "600 KB": 600_000, "4 MiB": 2**22}
IN_FLIGHT = 16
PEER, UNLOGGED = "torchserve, grpc", "torchserve, unlogged, grpc"
METHOD = "inference.GRPCInferenceService/ModelInfer"
COLUMNS = {"rate": "requests/s"}
MODEL = """
def total(items):
    return [{"total": item["x"].sum(axis=1)} for item in items]
"""


def tensor(size: int) -> np.ndarray[Any, Any]:
    return np.ones((1, size // 4), np.float32)


class Ours(Processes):
    """`penstock serve` with both listeners, and with these keys."""

    def __init__(self, *more: str) -> None:
        super().__init__()
        Path(self._folder, "app.py").write_text(MODEL)
        urls = self._spawn_penstock("app.py:total", *(word for key in more for word in ("--set", key)))
        self.urls = {name: url.partition("://")[2] for name, url in urls.items()}
        self.stop()

    def grpc(self, size: int, seconds: int) -> Sample:
        request = open_inference().message("inference.ModelInferRequest")(model_name="total")
        request.inputs.add(name="x", datatype="FP32", shape=[1, size // 4])
        request.raw_input_contents.append(tensor(size).tobytes())
        with self.awake():
            return h2load(f"http://{self.urls['grpc']}/{METHOD}", request.SerializeToString(), seconds, IN_FLIGHT)

    def http(self, size: int, seconds: int) -> Sample:
        head, buffers = encode_arrays({"x": tensor(size)}, binary_outputs=True)
        url, body = f"http://{self.urls['inference']}/v2/models/total/infer", b"".join([head, *map(bytes, buffers)])
        length = {"Inference-Header-Content-Length": len(head)}
        with self.awake():
            return wrk(url, body, "application/octet-stream", IN_FLIGHT, seconds, length)

    def client(self, kind: str, size: int, seconds: int) -> Sample:
        """tritonclient's `kind` of client, "grpc" or "http"."""
        import tritonclient.grpc
        import tritonclient.http

        module = getattr(tritonclient, kind)
        address = self.urls["grpc" if kind == "grpc" else "inference"]
        shared = tritonclient.grpc.InferenceServerClient(address)  # HTTP's client is for one thread
        array = tensor(size)

        def connect() -> Callable[[], None]:
            client = shared if kind == "grpc" else tritonclient.http.InferenceServerClient(address)

            def infer() -> None:
                found = module.InferInput("x", array.shape, "FP32")
                found.set_data_from_numpy(array)
                assert client.infer("total", [found]).as_numpy("total")[0] == size // 4

            return infer

        with self.awake():
            return threads(connect, seconds)


class Theirs(TorchServe):
    """TorchServe, which gets the same bytes as an input of its own gRPC call."""

    def _properties(self, ports: list[int]) -> str:
        self._grpc_port = ports[3]
        return super()._properties(ports)

    def grpc(self, size: int, seconds: int) -> Sample:
        request = PROTOS.message(f"{INFERENCE}.PredictionsRequest")(model_name="tensor_sum")
        request.input["data"] = tensor(size).tobytes()
        url = f"http://127.0.0.1:{self._grpc_port}/{INFERENCE}.InferenceAPIsService/Predictions"
        with self.awake():
            return h2load(url, request.SerializeToString(), seconds, IN_FLIGHT)


def threads(connect: Callable[[], Callable[[], None]], seconds: float) -> Sample:
    """Calls per second of so many threads, each with the function that `connect` returns."""
    counts = [0] * IN_FLIGHT
    calls = [connect() for _ in counts]
    end = time.perf_counter() + seconds

    def run(k: int) -> None:
        while time.perf_counter() < end:
            calls[k]()
            counts[k] += 1

    running = [threading.Thread(target=run, args=(k,)) for k in range(IN_FLIGHT)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return {"rate": sum(counts) / seconds}


def main() -> None:
    options = harness.options(__doc__, seconds=3, peers=("torchserve",))
    method = f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, (least..most) behind."
    report = harness.Report(__file__, __doc__, options, COLUMNS, (), method, "")
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = stack.enter_context(Ours())
        peers: Sequence[str] = (PEER, UNLOGGED) if options.peers else ()
        body = tensor(4096).tobytes()
        archive = Archive(make_archive(store, "tensor_sum", "tensor_sum"), body, b"1024.0") if peers else None
        names = {PEER: "torchserve", UNLOGGED: "torchserve, unlogged"}
        theirs = {peer: stack.enter_context(Theirs(names[peer], archive, Setting(8, 1, 1))) for peer in peers}
        for name, size in SIZES.items():
            calls = {"grpc": functools.partial(ours.grpc, size, options.seconds)}
            calls["http"] = functools.partial(ours.http, size, options.seconds)
            calls |= {peer: functools.partial(server.grpc, size, options.seconds) for peer, server in theirs.items()}
            runs = harness.interleave(options.rounds, calls)
            report.add({"tensor": name, "client": "C"}, runs, "grpc")
            report.target(f"{name}: grpc / http", report.ratios(runs, "grpc", "http", "rate"), least=0.7)
            for peer in theirs:
                report.target(f"{name}: grpc / {peer}", report.ratios(runs, "grpc", peer, "rate"), least=1.5)
            calls = {kind: functools.partial(ours.client, kind, size, options.seconds) for kind in ("grpc", "http")}
            runs = harness.interleave(options.rounds, calls)
            report.add({"tensor": name, "client": "tritonclient"}, runs, "grpc")
            ratio = report.ratios(runs, "grpc", "http", "rate")
            report.target(f"{name}: grpc / http, tritonclient", ratio, least=0.7)
    report.save()


if __name__ == "__main__":
    main()
