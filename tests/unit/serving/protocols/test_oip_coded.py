"""Open Inference requests and responses in gzip or deflate."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.core.codecs import traits_of
from penstock.errors import BadRequest, PayloadTooLarge, PenstockError
from penstock.plugins import resolve
from penstock.serving.protocols.oip_binary import encode_request
from penstock.serving.protocols.oip_json import CODED_HEAD_BYTES, read_terms
from penstock.serving.protocols.oip_npy import NPY, write_head
from penstock.types import Headers, Item, ModelMetadata, SequenceRequest

PACK = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACK = {"gzip": gzip.decompress, "deflate": zlib.decompress}
ASKED = {"timeout": 2_000_000, "sequence_id": 7, "sequence_start": True}


def plain(codec: str, rows: int = 3, parameters: dict[str, Any] | None = ASKED) -> Item:
    if codec == "oip_npy":
        return Item(write_head("FP32", (rows, 2)) + bytes(8 * rows), codec, NPY, headers=[(b"Accept", NPY.encode())])
    if codec == "oip_binary":
        head, buffers = encode_request([("x", "FP32", (rows, 2), bytes(8 * rows))], parameters=parameters)
        length = (b"Inference-Header-Content-Length", b"%d" % len(head))
        return Item(b"".join([head, *buffers]), codec, headers=[length])
    data = [[0.0, 0.5]] * rows
    inputs = [{"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": data}]
    return Item(json.dumps({"inputs": inputs, "parameters": parameters}).encode(), codec, headers=[])


def coded(item: Item, coding: str = "gzip", accept: str = "") -> Item:
    """The same request in a coding, if one is given."""
    more: Headers = [(b"Accept-Encoding", accept.encode())] if accept else []
    body = item.payload
    if coding:
        more.append((b"Content-Encoding", coding.encode()))
        body = PACK[coding](body)
    return replace(item, payload=body, codec=f"{item.codec}_coded", headers=[*(item.headers or ()), *more])


def make(item: Item, **more: Any) -> Any:
    return resolve("codec", item.codec)("m", "1", **more)


@pytest.mark.parametrize("coding", ["", "gzip", "deflate"])
@pytest.mark.parametrize("codec", ["oip_json", "oip_binary", "oip_npy"])
def test_an_encoded_request_is_read_like_a_plain_one(codec, coding):
    item = replace(plain(codec), sequence=SequenceRequest("7"))
    packed = coded(item, coding)
    expected, found = make(item).decode(item)[0], make(packed).decode(packed)[0]
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    ours, theirs = traits_of(packed.codec), traits_of(codec)
    assert ours.reads_headers
    assert ours.divisible is theirs.divisible
    assert ours.peek is not None
    assert theirs.peek is not None
    assert ours.peek(packed, packed.payload) == theirs.peek(item, item.payload) is not None
    assert ours.peek_sequence(packed, packed.payload) == theirs.peek_sequence(item, item.payload)
    assert read_terms(packed) == read_terms(item)
    assert (read_terms(packed) is None) is (codec == "oip_npy")


@pytest.mark.parametrize("codec", ["oip_json", "oip_binary", "oip_npy"])
@pytest.mark.parametrize("body", [b"", b"plain text", gzip.compress(b"{}", mtime=0)[:-3], gzip.compress(b"{", mtime=0)])
def test_a_damaged_body_is_the_workers_to_report(codec, body):
    packed = replace(coded(plain(codec)), payload=body)
    traits = traits_of(packed.codec)
    assert traits.peek is not None
    assert traits.peek(packed, body) is None
    assert read_terms(packed) is None
    with pytest.raises(BadRequest):
        make(packed).decode(packed)


@pytest.mark.parametrize("codec", ["oip_json", "oip_binary"])
def test_parameters_beyond_what_the_server_process_decompresses_are_refused(codec):
    padding = {"pad": "x" * CODED_HEAD_BYTES}
    packed = coded(plain(codec, parameters={**padding, "timeout": 2_000_000}))
    assert read_terms(packed) is None
    assert traits_of(packed.codec).peek_sequence(packed, packed.payload) is None
    with pytest.raises(BadRequest, match="too large to read it in time: send the header x-deadline-ms"):
        make(packed, metadata=ModelMetadata("m", "1", takes_parameters=True)).decode(packed)


def test_the_models_own_parameters_arrive():
    packed = coded(plain("oip_json", parameters={"colour": "red"}))
    make(packed, metadata=ModelMetadata("m", "1", takes_parameters=True)).decode(packed)
    assert packed.parameters == {"colour": "red"}


def test_a_body_may_not_be_longer_than_the_limit_once_it_is_decompressed():
    packed = coded(plain("oip_json", rows=1000, parameters=None))
    size = len(gzip.decompress(packed.payload))
    assert make(packed, max_body_bytes=size).decode(packed)
    with pytest.raises(PayloadTooLarge):
        make(packed, max_body_bytes=size - 1).decode(packed)


@pytest.mark.parametrize("accept", ["gzip", "deflate"])
@pytest.mark.parametrize("codec", ["oip_json", "oip_binary", "oip_npy"])
def test_the_response_has_the_coding_that_the_client_demands(codec, accept):
    value = np.zeros((3, 500), np.float32)
    item = plain(codec, parameters={"binary_data_output": codec == "oip_binary"})
    expected = make(item).encode(value, item, make(item).decode(item)[1])
    for request in (coded(item, "", accept), coded(item, "gzip", accept)):
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

    found = answers(coded(item, "gzip", "gzip"))
    split = replace(coded(item, "gzip", "gzip"), start=0, stop=3)
    events = coded(replace(item, headers=[(b"Accept", b"text/event-stream")]), "gzip", "gzip")
    for result in (*found, answers(split)[1], answers(events)[1]):
        assert result.headers is None
        assert json.loads(result.body)["outputs"]


def test_an_unknown_coding_is_refused_by_the_worker_too():
    packed = replace(coded(plain("oip_json")), headers=[(b"Content-Encoding", b"br")])
    with pytest.raises(PenstockError, match="expected gzip, deflate or identity"):
        make(packed).decode(packed)
