from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bulk.sender import Undelivered, undelivered
from penstock.bulk.servers import (
    PENSTOCK,
    RevisionChanged,
    ServerFault,
    UploadChunk,
    WrongAnswer,
    idempotency_key,
    read_captions,
)
from penstock.bulk.types import Chunk, Video
from penstock.client.endpoint import ConnectionLost
from penstock.client.response import HttpResponse
from penstock.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    ModelNotFound,
    ModelNotReady,
    PayloadTooLarge,
    PenstockError,
    QueueFull,
    Unauthorized,
)
from support.bulk import server_info
from support.captioner import answer_of

VIDEO = Video("/a/b.mp4", "b.mp4", 10, 20)


class NoBlock:
    def release(self) -> None:
        pass


def chunk(pixels: Any, frames: list[int], video: Video = VIDEO) -> Chunk:
    return Chunk(video, 0, pixels, frames, [0.0] * len(frames), [None] * len(frames), NoBlock())


def upload(sent: Chunk) -> UploadChunk:
    return UploadChunk(sent, 1, *PENSTOCK.encode(sent, server_info(), "f" * 16))


def test_pixels_are_sent_without_a_copy():
    block = np.zeros((2, 4, 6, 3), np.uint8)
    parcel = upload(chunk(block, [5, 9]))
    head, pixels, index = parcel.body
    block[:] = 7
    assert bytes(pixels) == b"\7" * 144
    assert bytes(index) == (5).to_bytes(8, "little") + (9).to_bytes(8, "little")
    assert parcel.body_bytes == len(head) + 144 + 16
    request = json.loads(bytes(head))
    assert [(i["name"], i["datatype"], i["shape"]) for i in request["inputs"]] == [
        ("frames", "UINT8", [2, 4, 6, 3]), ("frame_index", "INT64", [2]),
    ]  # fmt: skip
    assert [o["name"] for o in request["outputs"]] == ["caption", "frame_index"]
    assert dict(parcel.headers)["Inference-Header-Content-Length"] == str(len(head))


def test_jpeg_files_are_sent_as_bytes_with_their_lengths():
    head, files = upload(chunk([b"one", b"three"], [0, 1])).body
    assert files == b"\3\0\0\0one\5\0\0\0three" + bytes(8) + b"\1" + bytes(7)
    assert json.loads(bytes(head))["inputs"][0] | {"parameters": 0} == {
        "name": "jpeg", "datatype": "BYTES", "shape": [2], "parameters": 0,
    }  # fmt: skip


def test_an_idempotency_key_identifies_job_file_and_frames():
    frames = [3, 4]
    key = idempotency_key(chunk([b"", b""], frames), "0123456789abcdef")
    assert key == idempotency_key(chunk([b"x", b"y"], frames), "0123456789abcdef")
    others = [
        idempotency_key(chunk([], [4, 5]), "0123456789abcdef"),
        idempotency_key(chunk([], [3, 4, 5]), "0123456789abcdef"),
        idempotency_key(chunk([], frames), "11234567"),
        *[
            idempotency_key(chunk([], frames, msgspec.structs.replace(VIDEO, **{field: value})), "0123456789abcdef")
            for field, value in (("name", "c.mp4"), ("bytes", 11), ("mtime_ns", 21))
        ],
    ]
    assert len({key, *others}) == 1 + len(others)


def test_an_idempotency_key_is_a_valid_header_for_any_file_name():
    key = idempotency_key(
        chunk([], [3], msgspec.structs.replace(VIDEO, name="\udce4\r\nX: y 日本")), "0123456789abcdef"
    )
    assert key.isascii()
    assert key.isprintable()


def test_an_undelivered_error_keeps_its_message_when_copied():
    error = undelivered(BadRequest("no such thing", detail="more"), 3)
    assert (error.message, error.detail) == ("no such thing (3 attempts)", "more")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(other, Undelivered)
        assert other.message == error.message


JSON = {"content-type": "application/json; charset=utf-8"}
FRAMES = [3, 6, 9]


def read(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> list[str]:
    return read_captions(HttpResponse(status, headers or JSON, body), "captioner", "r1", FRAMES, "http://gpu1")


def changed(**change: Any) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(answer_of(FRAMES, "r1")), **change})


def outputs(captions: Any, frames: Any, shape: list[int] | None = None) -> bytes:
    return changed(
        outputs=[
            {"name": "caption", "shape": shape or [3], "datatype": "BYTES", "data": captions},
            {"name": "frame_index", "shape": [3], "datatype": "INT64", "data": frames},
        ]
    )


def test_captions_are_in_the_order_of_the_frames():
    assert read(answer_of(FRAMES, "r1")) == ["frame 3", "frame 6", "frame 9"]
    assert read(outputs(["\u00e9", "", "<\n"], FRAMES)) == ["é", "", "<\n"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (answer_of([3, 6], "r1"), "2 captions, expected 3"),
        (answer_of([3, 6, 9, 12], "r1"), "4 captions, expected 3"),
        (answer_of([9, 6, 3], "r1"), "frames 9, 6, 3, expected 3, 6, 9"),
        (answer_of([3, 3, 9], "r1"), "frames 3, 3, 9"),
        (answer_of(FRAMES, "r1", model="other"), "model 'other' answered"),
        (outputs(["a", "b", 3], FRAMES), "no Open Inference response"),
        (outputs(["a", "b", None], FRAMES), "no Open Inference response"),
        (outputs("abc", FRAMES), "no Open Inference response"),
        (outputs([["a", "b", "c"]], FRAMES), "no Open Inference response"),
        (outputs(["a", "b", "c"], [3.5, 6, 9]), "no Open Inference response"),
        (outputs(["a", "b", "c"], FRAMES, [2]), r"shape \[2\] and 3"),
        (changed(outputs=[]), "no output 'caption'"),
        (changed(outputs={}), "no Open Inference response"),
        (b"not JSON", "no Open Inference response"),
        (b"", "no Open Inference response"),
        (b'{"model_name": "captioner"', "no Open Inference response"),
        (b"\xff\xfe", "no Open Inference response"),
        (b"[" * 100_000, "no Open Inference response"),
        (b'["a caption", "for each", "frame"]', "no Open Inference response"),
    ],
)
def test_a_response_that_does_not_match_the_request_is_rejected(body: bytes, message: str):
    with pytest.raises(WrongAnswer, match=message):
        read(body)


@pytest.mark.parametrize("kind", ["text/html", "application/octet-stream", ""])
def test_a_response_of_another_content_type_is_rejected(kind: str):
    with pytest.raises(WrongAnswer, match="expected application/json"):
        read(answer_of(FRAMES, "r1"), headers={"content-type": kind})


@pytest.mark.parametrize("revision", ["r2", None])
def test_a_response_of_another_revision_is_rejected(revision: str | None):
    with pytest.raises(RevisionChanged, match="'r1'"):
        read(answer_of(FRAMES, revision))


def test_another_revision_is_reported_before_a_missing_row():
    with pytest.raises(RevisionChanged):
        read(answer_of([3], "r2"))


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, Unauthorized), (403, Forbidden), (404, ModelNotFound), (413, PayloadTooLarge), (400, BadRequest),
     (422, BadRequest), (408, DeadlineExceeded), (504, DeadlineExceeded), (429, QueueFull), (503, ModelNotReady),
     (500, ServerFault), (502, ConnectionLost), (501, ServerFault), (409, ServerFault),
     (302, WrongAnswer), (204, WrongAnswer)],
)  # fmt: skip
def test_each_status_raises_its_error(status: int, error: type[PenstockError]):
    with pytest.raises(error, match=str(status)) as caught:
        read(b'{"error": "what is\\nwrong"}', status)
    assert type(caught.value) is error
    assert "\n" not in caught.value.message


def test_a_servers_error_text_is_shortened_and_cleaned():
    with pytest.raises(BadRequest) as caught:
        read(b"\x1b[31m\xff" * 10_000, 400)
    assert len(caught.value.message) < 600
    assert "\x1b" not in caught.value.message


@given(st.binary() | st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(
    st.sampled_from(["model_name", "outputs", "name", "data", "shape", "parameters", "revision"]), x
)).map(msgspec.json.encode))  # fmt: skip
def test_any_response_body_gives_captions_or_a_known_error(body: bytes):
    with pytest.raises((WrongAnswer, RevisionChanged)):
        read(body)
