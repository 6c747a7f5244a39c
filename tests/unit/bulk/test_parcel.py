from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import msgspec
import numpy as np

from penstock.bulk.parcel import Parcel, key_of
from penstock.bulk.sending import Undelivered, undelivered
from penstock.bulk.types import Chunk, Video
from penstock.errors import BadRequest

VIDEO = Video("/a/b.mp4", "b.mp4", 10, 20)


class NoBlock:
    def release(self) -> None:
        pass


def chunk(pixels: Any, frames: list[int], video: Video = VIDEO) -> Chunk:
    return Chunk(video, 0, pixels, frames, [0.0] * len(frames), [None] * len(frames), NoBlock())


def test_pixels_are_sent_from_where_they_lie():
    block = np.zeros((2, 4, 6, 3), np.uint8)
    parcel = Parcel(chunk(block, [5, 9]), 1, "f" * 16)
    head, pixels, index = parcel.body
    block[:] = 7
    assert bytes(pixels) == b"\7" * 144
    assert bytes(index) == (5).to_bytes(8, "little") + (9).to_bytes(8, "little")
    assert parcel.body_bytes == len(head) + 144 + 16
    told = json.loads(bytes(head))
    assert [(i["name"], i["datatype"], i["shape"]) for i in told["inputs"]] == [
        ("frames", "UINT8", [2, 4, 6, 3]), ("frame_index", "INT64", [2]),
    ]  # fmt: skip
    assert [o["name"] for o in told["outputs"]] == ["caption", "frame_index"]
    assert dict(parcel.headers)["Inference-Header-Content-Length"] == str(len(head))


def test_files_are_sent_as_bytes_with_their_lengths():
    head, files = Parcel(chunk([b"one", b"three"], [0, 1]), 1, "f").body
    assert files == b"\3\0\0\0one\5\0\0\0three" + bytes(8) + b"\1" + bytes(7)
    assert json.loads(bytes(head))["inputs"][0] | {"parameters": 0} == {
        "name": "jpeg", "datatype": "BYTES", "shape": [2], "parameters": 0,
    }  # fmt: skip


def test_a_key_is_the_same_for_the_same_frames_of_the_same_file_in_the_same_job_and_no_other():
    frames = [3, 4]
    key = key_of(chunk([b"", b""], frames), "0123456789abcdef")
    assert key == key_of(chunk([b"x", b"y"], frames), "0123456789abcdef")
    others = [
        key_of(chunk([], [4, 5]), "0123456789abcdef"),
        key_of(chunk([], [3, 4, 5]), "0123456789abcdef"),
        key_of(chunk([], frames), "11234567"),
        *[
            key_of(chunk([], frames, msgspec.structs.replace(VIDEO, **{field: value})), "0123456789abcdef")
            for field, value in (("name", "c.mp4"), ("bytes", 11), ("mtime_ns", 21))
        ],
    ]
    assert len({key, *others}) == 1 + len(others)


def test_a_key_of_any_name_can_stand_in_a_header():
    key = key_of(chunk([], [3], msgspec.structs.replace(VIDEO, name="\udce4\r\nX: y 日本")), "0123456789abcdef")
    assert key.isascii()
    assert key.isprintable()


def test_an_undelivered_chunk_tells_why_also_as_a_copy():
    error = undelivered(BadRequest("no such thing", detail="more"), 3)
    assert (error.message, error.attempts, error.detail) == ("no such thing (3 attempts)", 3, "more")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(other, Undelivered)
        assert other.message == error.message
