"""Open Inference responses in gzip or deflate."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.core.codecs import traits_of
from penstock.plugins import resolve
from penstock.serving.protocols.oip_binary import NPY, write_npy_head
from penstock.serving.protocols.oip_messages import encode_request
from penstock.serving.protocols.oip_routes import read_terms
from penstock.types import Item, ModelMetadata, SequenceRequest

UNPACK = {"gzip": gzip.decompress, "deflate": zlib.decompress}
ASKED = {"timeout": 2_000_000, "sequence_id": 7, "sequence_start": True}


def plain(codec: str, rows: int = 3, parameters: dict[str, Any] | None = ASKED) -> Item:
    if codec == "oip_npy":
        return Item(
            write_npy_head("FP32", (rows, 2)) + bytes(8 * rows), codec, NPY, headers=[(b"Accept", NPY.encode())]
        )
    if codec == "oip_binary":
        head, buffers = encode_request([("x", "FP32", (rows, 2), bytes(8 * rows))], parameters=parameters)
        length = (b"Inference-Header-Content-Length", b"%d" % len(head))
        return Item(b"".join([head, *buffers]), codec, headers=[length])
    data = [[0.0, 0.5]] * rows
    inputs = [{"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": data}]
    return Item(json.dumps({"inputs": inputs, "parameters": parameters}).encode(), codec, headers=[])


def coded(item: Item, accept: str = "gzip") -> Item:
    """The same request for a response in a coding."""
    headers = [*(item.headers or ()), (b"Accept-Encoding", accept.encode())]
    return replace(item, codec=f"{item.codec}_coded", headers=headers)


def make(item: Item, **more: Any) -> Any:
    return resolve("codec", item.codec)("m", "1", **more)


@pytest.mark.parametrize("codec", ["oip_json", "oip_binary", "oip_npy"])
def test_a_request_for_a_coded_response_is_read_like_any_other(codec):
    item = replace(plain(codec), sequence=SequenceRequest("7"))
    asked = coded(item)
    expected, found = make(item).decode(item)[0], make(asked).decode(asked)[0]
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    ours, theirs = traits_of(asked.codec), traits_of(codec)
    assert ours.reads_headers
    assert ours.divisible is theirs.divisible
    assert ours.peek is not None
    assert theirs.peek is not None
    assert ours.peek(asked, asked.payload) == theirs.peek(item, item.payload) is not None
    assert ours.peek_sequence(asked, asked.payload) == theirs.peek_sequence(item, item.payload)
    assert read_terms(asked) == read_terms(item)
    assert (read_terms(asked) is None) is (codec == "oip_npy")


def test_the_models_own_parameters_arrive():
    packed = coded(plain("oip_json", parameters={"colour": "red"}))
    make(packed, metadata=ModelMetadata("m", "1", takes_parameters=True)).decode(packed)
    assert packed.parameters == {"colour": "red"}


@pytest.mark.parametrize("accept", ["gzip", "deflate"])
@pytest.mark.parametrize("codec", ["oip_json", "oip_binary", "oip_npy"])
def test_the_response_has_the_coding_that_the_client_demands(codec, accept):
    value = np.zeros((3, 500), np.float32)
    item = plain(codec, parameters={"binary_data_output": codec == "oip_binary"})
    expected = make(item).encode(value, item, make(item).decode(item)[1])
    request = coded(item, accept)
    codecs = make(request)
    found = codecs.encode(value, request, codecs.decode(request)[1])
    assert UNPACK[accept](found.body) == expected.body
    headers = [("Content-Encoding", accept), ("Vary", "Accept-Encoding")]
    assert found == replace(expected, body=found.body, headers=[*(expected.headers or ()), *headers])


def test_parts_and_streams_have_no_coding():
    item = plain("oip_json", parameters=None)
    value = np.zeros((3, 500), np.float32)

    def answers(request: Item) -> Any:
        codec = make(request)
        context = codec.decode(request)[1]
        return [codec.encode_part(value, request, context, True), codec.encode(value, request, context)]

    found = answers(coded(item))
    split = replace(coded(item), start=0, stop=3)
    events = coded(replace(item, headers=[(b"Accept", b"text/event-stream")]))
    for result in (*found, answers(split)[1], answers(events)[1]):
        assert result.headers is None
        assert json.loads(result.body)["outputs"]
