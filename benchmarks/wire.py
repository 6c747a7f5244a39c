"""What does it cost to write and read a request of 64 frames of 224 x 224, in each form?

CPU time of this process per call. JSON has one frame.
"""

import json
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from metrics_cost import cost

from penstock.core.contracts import Codec
from penstock.serving.protocols.oip import OipJsonCodec
from penstock.serving.protocols.oip_binary import OipBinaryCodec, OipNpyCodec, write_npy_head
from penstock.serving.protocols.oip_messages import HEADER_LENGTH, decode_answer, encode_request
from penstock.types import Item, ModelMetadata, TensorSpec

ROWS = 64
MOST_US = 50.0  # of the worker's time for the head of a binary request
METADATA = ModelMetadata(
    "captioner",
    "1",
    inputs=(
        TensorSpec("frames", "UINT8", (-1, -1, -1, 3), True),
        TensorSpec("jpeg", "BYTES", (-1,), True),
        TensorSpec("frame_index", "INT64", (-1,), True),
    ),
    parameters={"revision": "1"},
)
FRAMES = np.zeros((ROWS, 224, 224, 3), np.uint8)
INDEX = np.arange(ROWS)
JPEGS = [bytes(14_000)] * ROWS
CAPTIONS = ["number 0 4 2 : a large red cross at the top left on gray"] * ROWS
OTHER_HEADERS = [(f"X-Header-{n}".encode(), b"value") for n in range(6)]


def frames() -> tuple[bytes, list[Any]]:
    return encode_request(
        [("frames", "UINT8", FRAMES.shape, FRAMES.data), ("frame_index", "INT64", (ROWS,), INDEX.data)]
    )


def jpegs() -> tuple[bytes, list[Any]]:
    return encode_request([("jpeg", "BYTES", (ROWS,), JPEGS), ("frame_index", "INT64", (ROWS,), INDEX.data)])


def item(head: bytes, buffers: list[Any]) -> Item:
    """The request as a worker receives it: a view of shared memory."""
    headers = [*OTHER_HEADERS, (HEADER_LENGTH.encode(), b"%d" % len(head))]
    return Item(memoryview(b"".join([head, *buffers])).toreadonly(), "oip_binary", headers=headers)


def calls() -> dict[str, tuple[Callable[[], object], int]]:
    """The measured calls, and their number in a run."""
    codec: Codec = OipBinaryCodec("captioner", "1", METADATA)
    binary, compressed = item(*frames()), item(*jpegs())
    file = Item(memoryview(write_npy_head("UINT8", FRAMES.shape) + FRAMES.tobytes()))
    tensor = {
        "name": "frames",
        "shape": [1, *FRAMES.shape[1:]],
        "datatype": "UINT8",
        "data": FRAMES[0].ravel().tolist(),
    }
    text = Item(json.dumps({"inputs": [tensor]}).encode())
    value, context = codec.decode(binary)
    outputs = {"caption": CAPTIONS, "frame_index": value["frame_index"]}
    answer = codec.encode(outputs, binary, context).body
    npy, plain = OipNpyCodec("captioner", "1", METADATA), OipJsonCodec("captioner", "1", METADATA)
    return {
        "worker: read a binary request": (lambda: codec.decode(binary), 200),
        "worker: read one of JPEGs": (lambda: codec.decode(compressed), 20),
        "worker: read an array file": (lambda: npy.decode(file), 200),
        "worker: read one frame of JSON": (lambda: plain.decode(text), 1),
        "worker: write the captions": (lambda: codec.encode(outputs, binary, context), 50),
        "front process: peek at the rows": (
            lambda: OipBinaryCodec.peek(binary, binary.payload),
            200,
        ),
        "client: write a binary request": (frames, 200),
        "client: write one of JPEGs": (jpegs, 50),
        "client: read the captions": (lambda: decode_answer(answer, None), 50),
    }


def repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def main() -> None:
    options = harness.options(__doc__, seconds=1)
    report = harness.Report(__file__, __doc__, options, {"cpu_us": "CPU us"}, libraries=("numpy",))
    contenders = {
        name: lambda call=call, times=times: cost(repeated(call, times), times, options.seconds)
        for name, (call, times) in calls().items()
    }
    runs = harness.interleave(options.rounds, contenders)
    report.add({"frames": ROWS}, runs)
    name, samples = next(iter(runs.items()))
    report.target(f"{name}: CPU us", [s["cpu_us"] for s in samples], most=MOST_US)
    report.save()


if __name__ == "__main__":
    main()
