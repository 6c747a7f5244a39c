"""gzip and deflate of HTTP bodies."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest, PayloadTooLarge, UnsupportedType
from penstock.serving.protocols.codings import (
    MAX_RATIO,
    accepted_coding,
    compress,
    content_coding,
    decompress,
    decompressed_head,
)
from penstock.types import ItemResult


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


FORMS = {"gzip": gzip.compress, "deflate": zlib.compress, "deflate, raw": raw_deflate}


@pytest.mark.parametrize("form", FORMS)
@given(st.binary(max_size=300))
def test_a_body_arrives_as_it_was(form, body):
    packed, coding = FORMS[form](body), form.partition(",")[0]
    for data in (packed, memoryview(packed).toreadonly()):
        assert decompress(data, coding, len(body)) == body
        assert decompressed_head(data, coding, 7) == body[:7]


@pytest.mark.parametrize("form", FORMS)
def test_a_bomb_is_refused_without_its_memory(form):
    most = 2**20
    bomb = FORMS[form](bytes(200 * most))
    assert 200 * most <= MAX_RATIO * len(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge, match=rf"larger than {most} bytes \(limits.max_body_bytes\)"):
            decompress(bomb, form.partition(",")[0], most)
        assert tracemalloc.get_traced_memory()[1] < 4 * most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", FORMS)
def test_a_truncated_stream_is_refused_at_every_byte(form):
    packed, coding = FORMS[form](b"some text, some more text"), form.partition(",")[0]
    for size in range(len(packed)):
        with pytest.raises(BadRequest, match=f"{coding} stream"):
            decompress(packed[:size], coding, 100)


def test_a_damaged_stream_and_bytes_after_it_are_refused():
    packed = gzip.compress(b"some text")
    with pytest.raises(BadRequest, match=r"not a valid gzip stream: .*incorrect data check"):
        decompress(packed[:-8] + bytes(8), "gzip", 100)
    with pytest.raises(BadRequest, match="not a valid deflate stream"):
        decompress(b"plain text", "deflate", 100)
    with pytest.raises(BadRequest, match=r"1 bytes follow the gzip stream; send exactly one"):
        decompress(packed + b"x", "gzip", 100)
    assert decompressed_head(b"plain text", "gzip", 5) == b""


def test_the_names_of_codings():
    assert [content_coding(name) for name in (b"", b"Identity", b"GZIP", b"x-gzip", b"deflate")] == [
        *("", "", "gzip", "gzip", "deflate")
    ]
    for name in (b"br", b"gzip, deflate", b"\xff" * 100):
        with pytest.raises(UnsupportedType, match=r"found Content-Encoding '.{2,40}', expected gzip, deflate or"):
            content_coding(name)


def test_only_a_coding_that_is_named_alone_is_used_for_a_response():
    assert accepted_coding(b"gzip") == "gzip"
    assert accepted_coding(b"Deflate") == "deflate"
    for every_library in (b"", b"identity", b"gzip, deflate", b"gzip, deflate, br, zstd", b"*", b"gzip;q=0"):
        assert accepted_coding(every_library) == ""


def test_a_response_is_compressed_only_if_that_makes_it_shorter():
    long = ItemResult(bytes(1000), "text/plain", headers=[("X-A", "1")])
    found = compress(long, "gzip")
    assert gzip.decompress(found.body) == long.body
    assert found.headers == [("X-A", "1"), ("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding")]
    assert zlib.decompress(compress(long, "deflate").body) == long.body
    for other in (ItemResult(b"short"), ItemResult(bytes(1000), headers=[("content-encoding", "br")])):
        assert compress(other, "gzip") is other
