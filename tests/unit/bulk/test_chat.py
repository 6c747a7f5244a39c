from __future__ import annotations

import base64
import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bulk.chat import ChatBackend, halved, prompt_for, read_message, schema_check
from penstock.bulk.decode import BlockPool, read_chunks
from penstock.bulk.pixels import jpeg_encoder, within
from penstock.bulk.servers import Asked, ServerFault, WrongAnswer
from penstock.bulk.types import Chunk, Pixels, ReadPlan, Video
from penstock.bulk.video import VideoError
from penstock.client.response import HttpResponse
from penstock.errors import BadRequest, ConfigError, DeadlineExceeded, PenstockError, QueueFull, Unauthorized
from penstock.images import decode_image
from support.bulk import server_info

TEXT = st.text(max_size=40)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


class NoBlock:
    def release(self) -> None:
        pass


def chunk(images: list[bytes], times_s: list[float], clip: tuple[float, float] | None = None, name: str = "a") -> Chunk:
    frames = list(range(len(images)))
    return Chunk(Video(name, name, 1, 1), 0, images, frames, times_s, [None] * len(images), NoBlock(), clip=clip)


def request(sent: Chunk, **asked: Any) -> dict[str, Any]:
    backend = ChatBackend(Asked(**asked))
    (body,) = backend.encode(sent, server_info(model="m", backend=backend), "job")[1]
    found: dict[str, Any] = json.loads(bytes(body))
    return found


def response(body: object, status: int = 200, **headers: str) -> HttpResponse:
    return HttpResponse(status, headers, body if isinstance(body, bytes) else json.dumps(body).encode())


def completion(content: object = "a dog", **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": "stop", **choice}]}


@given(TEXT, st.none() | TEXT, TEXT, st.lists(st.binary(max_size=20), min_size=1, max_size=4))
def test_a_request_has_the_images_in_order_whatever_the_texts_contain(
    prompt: str, system: str | None, name: str, files: list[bytes]
) -> None:
    sent = chunk([base64.b64encode(file) for file in files], [n / 4 for n in range(len(files))], (0.0, 1.0), name)
    found = request(sent, prompt=prompt, system=system)
    assert [m["role"] for m in found["messages"]] == ["system", "user"] if system else ["user"]
    content = found["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    assert [base64.b64decode(url.removeprefix("data:image/jpeg;base64,")) for url in urls] == files
    assert content[-1]["text"] == prompt_for(prompt, sent)
    assert len(content) == 1 + len(files) * (2 if len(files) > 1 else 1)


def test_templates_know_four_names_and_leave_other_braces() -> None:
    sent = chunk([b"", b""], [1.5, 2.0], (1.5, 2.5), "v.mp4")
    assert prompt_for("{video} {frame} {time}-{end} {} {other} {{time}}", sent) == (
        "v.mp4 0 1.50-2.50 {} {other} {1.50}"
    )
    assert prompt_for("{end}", chunk([b""], [3.0])) == "3.00"


def test_fields_of_a_request_can_be_added_replaced_and_removed() -> None:
    sent = chunk([b""], [0.0])
    assert {"max_tokens": 128, "temperature": 0, "model": "m"}.items() <= request(sent).items()
    found = request(sent, max_tokens=5, request={"max_completion_tokens": 9, "max_tokens": None, "top_p": 0.5})
    assert {"max_completion_tokens": 9, "top_p": 0.5}.items() <= found.items()
    assert "max_tokens" not in found


@given(JSON)
def test_any_answer_is_a_message_or_an_error_that_the_sender_knows(body: object) -> None:
    for found in (body, {"choices": body}, {"choices": [body]}, {"choices": [{"message": body}]}, {"error": body}):
        with contextlib.suppress(WrongAnswer, ServerFault, BadRequest, QueueFull, Unauthorized, DeadlineExceeded):
            assert isinstance(read_message(response(found), "http://x").problem, str)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"<html>", WrongAnswer),
        ({"choices": []}, WrongAnswer),
        (completion([{"type": "text"}]), WrongAnswer),
        ({"error": {"message": "m", "code": 429}}, QueueFull),
        ({"error": {"message": "m", "code": "context_length_exceeded"}}, ServerFault),
        ({"object": "error", "message": "m", "code": 400}, BadRequest),
        ({"error": "of no kind"}, ServerFault),
        ({"error": {"message": "expired", "code": 401}}, Unauthorized),
    ],
)
def test_an_answer_without_a_completion_is_the_error_that_it_describes(body: Any, error: type[PenstockError]) -> None:
    with pytest.raises(error):
        read_message(response(body), "http://x")


def test_retry_after_is_kept_and_a_missing_model_is_tried_again() -> None:
    with pytest.raises(QueueFull) as busy:
        read_message(response({}, 429, **{"retry-after": "7"}), "http://x")
    assert busy.value.retry_after_s == 7
    with pytest.raises(ServerFault):
        read_message(response({"detail": "Not Found"}, 404), "http://x")


@given(JSON)
def test_an_answer_of_the_schema_is_the_same_value_without_blanks(value: object) -> None:
    check = schema_check({})
    for text in (json.dumps(value, indent=2), f"```json\n{json.dumps(value)}\n```", f" {json.dumps(value)}\n"):
        found, problem = check(text)
        assert (json.loads(found), problem) == (value, "")
    assert schema_check({"not": {}})(json.dumps(value))[0] == ""


@pytest.mark.parametrize(
    "schema", [{"type": "objekt"}, {"properties": []}, {"minimum": "1"}, {"pattern": "["}], ids=lambda s: next(iter(s))
)
def test_a_schema_that_is_none_is_an_error_before_the_job(schema: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--schema is not a JSON schema"):
        ChatBackend(Asked(schema=schema))


def test_a_backend_survives_a_pickle() -> None:
    backend = ChatBackend(Asked(schema={"type": "object"}, prompt="p"))
    info = pickle.loads(pickle.dumps(server_info(backend=backend)))
    assert info.backend.asked == backend.asked


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 2_000_000))
def test_sizes_stay_within_the_pixels_in_their_proportions(height: int, width: int, most: int) -> None:
    h, w = within(most, height, width)
    assert 1 <= h <= height
    assert 1 <= w <= width
    assert h * w <= max(most, height, width)
    if height * width <= most:
        assert (h, w) == (height, width)
    elif h > 1 and w > 1:
        scale = (most / (height * width)) ** 0.5
        assert abs(h - height * scale) <= 1
        assert abs(w - width * scale) <= 1


@pytest.mark.parametrize("size", [(100, 60), (101, 61)])
def test_an_image_is_halved(size: tuple[int, int]) -> None:
    rgb = np.full((*size, 3), 90, np.uint8)
    small = decode_image(base64.b64decode(halved(base64.b64encode(jpeg_encoder()(rgb)))))
    assert small.shape[:2] == ((size[0] + 1) // 2, (size[1] + 1) // 2)
    assert abs(float(small.mean()) - 90) < 2


def test_an_address_is_absolute_and_only_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ReadPlan(pixels=Pixels("file"), chunk_size=1)
    pool = BlockPool(1000, 10)
    (only,) = read_chunks(Video("ü b.jpg", "", 1, 1), plan, pool)
    assert only.pixels == [(tmp_path / "ü b.jpg").as_uri().encode()]
    reading = read_chunks(Video("a.mp4", "", 1, 1), plan, pool)
    with pytest.raises(StopIteration) as end:
        next(reading)
    assert isinstance(end.value.value.error, VideoError)
