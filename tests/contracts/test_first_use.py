"""Threads that read the same messages for the first time at once: msgspec 0.22 ended the process there."""

import subprocess
import sys

import pytest

THREADS = """
import sys, threading
import msgspec
{imports}

sys.setswitchinterval(1e-6)
together, read = threading.Barrier(8), []

def first():
    together.wait()
    read.append({read})

threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(read) == 8
"""
READERS = {
    "batches of workers": (
        "from penstock.core.wire.messages import FromWorker, PartMessage\n"
        "from penstock.types import BatchPart, ItemResult\n"
        "data = msgspec.msgpack.encode(PartMessage(BatchPart(1, [ItemResult(b'x')]), [], []))",
        "msgspec.msgpack.Decoder(FromWorker).decode(data)",
    ),
    "requests for workers": (
        "from penstock.core.wire.messages import RunBatch, ToWorker\n"
        "from penstock.types import Item\n"
        "data = msgspec.msgpack.encode(RunBatch(1, [Item(b'x')], []))",
        "msgspec.msgpack.Decoder(ToWorker).decode(data)",
    ),
    "a shared streamer": (
        "from penstock.core.wire.messages import FreeReplies\n"
        "from penstock.streamer.shared.protocol import ToBatcher\n"
        "data = msgspec.msgpack.encode(FreeReplies([1]))",
        "msgspec.msgpack.Decoder(ToBatcher).decode(data)",
    ),
    "Open Inference requests": (
        "from penstock.serving.protocols.bodies import decode_json\n"
        "from penstock.serving.protocols.oip_messages import OipRequest\n"
        """data = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}'""",
        "decode_json(data, OipRequest)",
    ),
    "embeddings": (
        "from penstock.serving.protocols.bodies import decode_json\n"
        "from penstock.serving.protocols.openai_embeddings import EmbeddingsBody\n"
        """data = b'{"input": "x", "model": "m"}'""",
        "decode_json(data, EmbeddingsBody)",
    ),
}


@pytest.mark.parametrize("what", READERS)
def test_threads_may_be_the_first_to_read_at_once(what):
    imports, read = READERS[what]
    code = THREADS.format(imports=imports, read=read)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
