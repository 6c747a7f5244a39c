"""How much does system shared memory save a client on the same machine?

A request is an FP32 tensor of 600 KB, the answer its sum. `wrk` sends it over 16 connections: as a binary tensor in the
body, or as the name of a registered region of shared memory.
"""

import functools
import json
import urllib.request
import uuid
from pathlib import Path

import harness
from closed_loop import Sample, wrk
from grpc_tensors import COLUMNS, IN_FLIGHT, Ours, tensor

SIZE = 600_000


class Sharing(Ours):
    """The server, with a registered region that holds the tensor."""

    def __init__(self) -> None:
        super().__init__("server.shared_memory=true")
        self._key = uuid.uuid4().hex
        self._object = Path("/dev/shm", self._key)
        self._object.write_bytes(tensor(SIZE).tobytes())
        place = json.dumps({"key": self._key, "offset": 0, "byte_size": SIZE}).encode()
        url = f"http://{self.urls['inference']}/v2/systemsharedmemory/region/r/register"
        with self.awake(), urllib.request.urlopen(urllib.request.Request(url, place)) as response:
            response.read()

    def close(self) -> None:
        self._object.unlink(missing_ok=True)
        super().close()

    def shared(self, seconds: int) -> Sample:
        place = {"shared_memory_region": "r", "shared_memory_byte_size": SIZE}
        x = {"name": "x", "shape": [1, SIZE // 4], "datatype": "FP32", "parameters": place}
        url = f"http://{self.urls['inference']}/v2/models/total/infer"
        with self.awake():
            return wrk(url, json.dumps({"inputs": [x]}).encode(), "application/json", IN_FLIGHT, seconds)


def main() -> None:
    options = harness.options(__doc__, seconds=3)
    method = f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, (least..most) behind."
    report = harness.Report(__file__, __doc__, options, {**COLUMNS, "p50_ms": "p50 ms"}, (), method, "")
    with Sharing() as server:
        calls = {"shared memory": functools.partial(server.shared, options.seconds)}
        calls["binary"] = functools.partial(server.http, SIZE, options.seconds)
        runs = harness.interleave(options.rounds, calls)
    report.add({"connections": IN_FLIGHT}, runs, "shared memory")
    report.target("shared memory / binary", report.ratios(runs, "shared memory", "binary", "rate"), least=3.0)
    report.save()


if __name__ == "__main__":
    main()
