"""gzip and deflate of HTTP bodies."""

from __future__ import annotations

import gzip
import zlib

import pytest

from penstock.errors import UnsupportedType
from penstock.serving.protocols.bodies import accepted_coding, compress, content_coding
from penstock.types import ItemResult


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
