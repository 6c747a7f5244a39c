"""Every codec keeps the contract; a new codec needs an entry here."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from penstock.serving.protocols.kserve import KServeCodec, KServeExplainCodec
from penstock.serving.protocols.native import NativeCodec
from penstock.serving.protocols.oip import OipJsonCodec
from penstock.serving.protocols.oip_binary import (
    CodedBinaryCodec,
    CodedJsonCodec,
    CodedNpyCodec,
    OipBinaryCodec,
    OipNpyCodec,
    write_npy_head,
)
from penstock.serving.protocols.oip_grpc import OipGrpcCodec
from penstock.serving.protocols.oip_messages import encode_request
from penstock.serving.protocols.oip_protobuf import open_inference
from penstock.serving.protocols.openai_embeddings import EmbeddingsCodec
from penstock.serving.protocols.openai_text import ChatCodec, CompletionsCodec
from penstock.testing.codecs import check_codec
from penstock.torchpipe.thrift_protocol import ThriftCodec
from penstock.torchserve.protocol.codec import HandlerResponse, InputsCodec, RawCodec, TorchServeCodec
from penstock.types import Embedding, Item, ModelMetadata, Parts, Response, TensorSpec, TextPart

FORM = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\nhi\r\n--B--\r\n'
TENSOR = {"name": "x", "shape": [2, 2], "datatype": "FP32", "data": [[1, 2], [3, 4.5]]}
TENSORS = json.dumps({"id": "7", "inputs": [TENSOR]}).encode()

KNOWN = ModelMetadata("m", "1", inputs=(TensorSpec("x", "FP32", (-1, 2)), TensorSpec("s", "BYTES", (-1,), True)))
HEAD, BUFFERS = encode_request([("x", "FP32", (2, 2), bytes(16)), ("s", "BYTES", (2,), [b"a", b""])])
LENGTH = [(b"Inference-Header-Content-Length", b"%d" % len(HEAD))]
REQUEST = open_inference().message("inference.ModelInferRequest")(model_name="m", id="7")
REQUEST.inputs.add(name="x", datatype="FP32", shape=[2, 2]).contents.fp32_contents.extend([1, 2, 3, 4.5])
MESSAGE = REQUEST.SerializeToString()
WRITES, EMBEDS = ModelMetadata("m", "1", task="text-generation"), ModelMetadata("m", "1", task="embedding")
CODED = [(b"Accept-Encoding", b"deflate")]
VALUES = [
    np.zeros((2, 3), np.float16),
    {"y": [1, 2], "z": np.array([b"a", "b"], object)},
    [True, False],
    Response(b""),
]

HANDLED = [
    Item(b'{"a": [1, NaN]}', "torchserve", "application/json", headers=[(b"X-A", b"1"), (b":query", b"a=1")]),
    Item("h\xe9llo".encode(), "torchserve", "text/plain"),
    Item(b"a=1&b=%C3%A9", "torchserve", "application/x-www-form-urlencoded"),
    Item(FORM, "torchserve", "multipart/form-data; boundary=B"),
    Item(b"\x89PNG\r\n", "torchserve", "image/png"),
]
ANSWERS = [HandlerResponse(b"x"), HandlerResponse(bytearray(b"x"), "text/csv", 404, "Gone", [("X-A", "1")])]

CODECS = {
    "native": (
        lambda: NativeCodec("m", "1"),
        [
            Item(b'{"a": [1, 2.5, null, "\xc3\xa9"]}', "native", "application/json"),
            Item("h\xe9llo".encode(), "native", "text/plain; charset=utf-8"),
            Item(b"a=1&b=%C3%A9", "native", "application/x-www-form-urlencoded"),
            Item(FORM, "native", "multipart/form-data; boundary=B"),
            Item(b"\x89PNG\r\n", "native", "image/png"),
        ],
        [b"bytes", "text", {"a": [1, None]}, np.arange(3), np.float32(1.5), Response("own"), []],
    ),
    "oip_json": (
        lambda: OipJsonCodec("m", "1", KNOWN),
        [Item(TENSORS, "oip_json", "application/json")],
        VALUES,
    ),
    "oip_binary": (
        lambda: OipBinaryCodec("m", "1", KNOWN),
        [Item(b"".join([HEAD, *BUFFERS]), "oip_binary", headers=LENGTH)],
        VALUES,
    ),
    "oip_grpc": (lambda: OipGrpcCodec("m", "1", KNOWN), [Item(MESSAGE, "oip_grpc")], VALUES[:3]),
    "oip_npy": (
        lambda: OipNpyCodec("m", "1", KNOWN),
        [Item(write_npy_head("FP32", (2, 2)) + bytes(16), "oip_npy", "application/x-npy")],
        VALUES,
    ),
    "oip_json_coded": (
        lambda: CodedJsonCodec("m", "1", KNOWN),
        [Item(TENSORS, "oip_json_coded", "application/json", headers=CODED)],
        VALUES,
    ),
    "oip_binary_coded": (
        lambda: CodedBinaryCodec("m", "1", KNOWN),
        [Item(b"".join([HEAD, *BUFFERS]), "oip_binary_coded", headers=[*LENGTH, *CODED])],
        VALUES,
    ),
    "oip_npy_coded": (
        lambda: CodedNpyCodec("m", "1", KNOWN),
        [
            Item(
                write_npy_head("FP32", (2, 2)) + bytes(16),
                "oip_npy_coded",
                "application/x-npy",
                headers=CODED,
            )
        ],
        VALUES,
    ),
    "thrift": (
        lambda: ThriftCodec("m", "1"),
        [Item(b"\xff\xd8\xff", "thrift")],
        [np.zeros((1, 3), np.float32), {"label": "cat", "score": 0.5}],
    ),
    "kserve": (
        lambda: KServeCodec("m", "1"),
        [
            Item(b'{"instances": [{"a": {"b64": "aGk="}}, 2]}', "kserve"),
            Item(b'{"inputs": {"a": [1], "b": [2]}}', "kserve"),
        ],
        [[b"\xff", {"a": [1, None]}], [np.float32(1.5)], []],
    ),
    "kserve_explain": (
        lambda: KServeExplainCodec("m", "1", KNOWN),
        [Item(b'{"instances": [{"x": [1, 2]}]}', "kserve_explain"), Item(b'{"inputs": {"x": [[1, 2]]}}', "kserve")],
        [np.zeros((1, 2)), {"y": [1, 2], "z": np.array([b"a", b"\xff"], object)}],
    ),
    "openai_completions": (
        lambda: CompletionsCodec("m", "1", WRITES),
        [Item(b'{"model": "m", "prompt": ["a", "b"], "n": 1, "stop": "x", "echo": true}', "openai_completions")],
        [["c", TextPart("d", "length", 1, 2)], [Parts(["e", TextPart("f")]), Parts()]],
    ),
    "openai_chat": (
        lambda: ChatCodec("m", "1", WRITES),
        [Item(b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]}', "openai_chat")],
        ["c", TextPart("d", "length", 1, 2)],
    ),
    "openai_embeddings": (
        lambda: EmbeddingsCodec("m", "1", EMBEDS),
        [Item(b'{"model": "m", "input": ["a", "b"], "encoding_format": "base64"}', "openai_embeddings")],
        [[[1, 2.5], np.ones(2)], [Embedding(np.ones(3, np.float16), 7)]],
    ),
    "torchserve": (lambda: TorchServeCodec("m", "1"), HANDLED, ANSWERS),
    "torchserve_raw": (lambda: RawCodec("m", "1"), HANDLED, ANSWERS),
    "torchserve_inputs": (
        lambda: InputsCodec("m", "1"),
        [Item(msgspec.msgpack.encode({"data": b"\xff", "text": b"hi"}), "torchserve_inputs")],
        ANSWERS,
    ),
}


@pytest.mark.parametrize("name", CODECS)
def test_the_codec_keeps_the_contract(name):
    check_codec(*CODECS[name], holds_nan=name.startswith("oip_"))
