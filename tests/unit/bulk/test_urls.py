"""Videos at URLs are the same as the files, and a server that fails in any way is an error that names it."""

from __future__ import annotations

import http.server
import io
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock.bulk import urls
from penstock.bulk.frames import FrameReader
from penstock.bulk.urls import READ_BYTES, RemoteFile, check_allowed, url_name
from penstock.bulk.video import VideoError, expand, probe
from penstock.errors import ConfigError
from support.videos import make_clip

Answer = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `data` by ranges; the first entries of `script` answer the first requests instead."""

    protocol_version = "HTTP/1.1"
    data = b""
    script: ClassVar[list[Answer]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.script:
            self.script.pop(0)(self)
        else:
            self.send_part()

    def send_part(self, off: int = 0, extra: int = 0) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"])
        assert found is not None
        start, last = int(found[1]), min(int(found[2]), len(self.data) - 1)
        self.reply(206, self.data[start : last + 1], f"bytes {start + off}-{last}/{len(self.data) + extra}")

    def reply(self, status: int, body: bytes = b"", content_range: str = "", **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if content_range:
            self.send_header("content-range", content_range)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def drop(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a clip of 40 frames, `clip.mp4` in `tmp_path`."""
    monkeypatch.setattr(urls, "FIRST_S", 0.001)
    make_clip(tmp_path / "clip.mp4", 40)
    Handler.data, Handler.script, Handler.asked = (tmp_path / "clip.mp4").read_bytes(), [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/clip.mp4"
        server.shutdown()


def frames(path: str) -> list[tuple[int, float, bytes]]:
    return [(f.number, f.time_s, bytes(f.picture.planes[0])) for f in FrameReader(path, 1).frames()]


def test_a_video_at_a_url_has_the_frames_of_the_file(site: str, tmp_path: Path) -> None:
    assert frames(f"{site}?v=1") == frames(str(tmp_path / "clip.mp4"))
    assert set(Handler.asked) == {"/clip.mp4?v=1"}
    assert probe(site) == probe(str(tmp_path / "clip.mp4"))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-50, 5000), st.integers(-1, 3000))))
def test_reads_and_seeks_are_those_of_a_file(steps: list[tuple[int, int, int]]) -> None:
    data = bytes(range(256)) * 16

    class Remote(RemoteFile):
        def _read_range(self, start: int, size: int, redirects: int = 0) -> bytes:
            self.size = len(data)
            return data[start : start + min(size, 700)] if redirects else data[start : start + size]

    with Remote("http://a/b", OSError) as file:  # type: ignore[arg-type]
        place = 0
        for whence, offset, size in steps:
            place = max(0, offset + (0, place, len(data))[whence])
            assert file.seek(place) == place == file.tell()
            found = file.read(size)
            assert found == (data[place:] if size < 0 else data[place : place + size])
            place += len(found)


def test_a_server_that_fails_for_a_while_is_asked_again(site: str, tmp_path: Path) -> None:
    Handler.script = [Handler.drop, lambda h: h.reply(503), Handler.drop, lambda h: h.reply(500)]
    assert frames(site) == frames(str(tmp_path / "clip.mp4"))


def test_redirects_stay_on_the_server(site: str, tmp_path: Path) -> None:
    Handler.script = [lambda h: h.reply(302, location="/other.mp4")]
    assert frames(site) == frames(str(tmp_path / "clip.mp4"))
    assert "/other.mp4" in Handler.asked


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda h: h.reply(404), "answered 404"),
        (lambda h: h.reply(403), "answered 403"),
        (lambda h: h.reply(200, h.data), "whole files only"),
        (lambda h: h.reply(200, bytes(3 * READ_BYTES)), "whole files only"),
        (lambda h: h.send_part(off=1), "answered 206"),
        (lambda h: h.reply(206, b"x", "bytes 0-0/99999"), "1 bytes of a range"),
        (lambda h: h.reply(302, location="http://other.example/x"), "redirects to another one: http://other.example/x"),
        (lambda h: h.reply(302, location="file:///etc/passwd"), "redirects to another one"),
        (lambda h: h.reply(302), "redirects to another one"),
        (lambda h: h.reply(206, b"", "bytes 0--1/0"), "answered 206"),
    ],
)
def test_a_wrong_answer_fails_the_video(site: str, answer: Answer, words: str) -> None:
    Handler.script = [answer] * 9
    with pytest.raises(VideoError, match=words) as raised:
        frames(site)
    assert raised.value.stage == "read"
    assert site in raised.value.message


def test_an_image_at_a_url_is_no_image(site: str) -> None:
    Image.new("RGB", (8, 8)).save(file := io.BytesIO(), "png")
    Handler.data = file.getvalue()
    with pytest.raises(VideoError, match="is not a video, but png_pipe"):
        probe(site.replace("clip.mp4", "a.png"))


def test_a_url_that_cannot_be_asked_fails_the_video(site: str) -> None:
    for url, words in ((site + "ä", "cannot carry"), (site.replace("http:", "https:"), "cannot connect")):
        with pytest.raises(VideoError, match=words) as raised:
            frames(url)
        assert raised.value.stage == "read"


def test_a_server_that_goes_away_or_a_file_that_changes_fails_the_video_and_is_no_damage(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "READ_BYTES", 2048)
    count = -(-len(Handler.data) // 2048)
    for answer, words in ((Handler.drop, "5 attempts"), (lambda h: h.send_part(extra=1), "changed while it was read")):
        for good in range(1, count):
            Handler.script = [*[Handler.send_part] * good, *[answer] * 9]
            with pytest.raises(VideoError, match=words) as raised:
                frames(site)
            assert raised.value.stage == "read"


def test_only_allowed_urls_are_videos_and_their_names_have_no_secrets() -> None:
    allowed = ["https://b.example/videos/", "http://a.example:8080"]
    videos, notes = expand(
        ["https://b.example/videos/1.mp4?X-Amz-Signature=s&id=1", "http://a.example:8080/x?sig=s&se=2"],
        allowed_urls=allowed,
    )
    assert [video.name for video in videos] == ["https://b.example/videos/1.mp4?id=1", "http://a.example:8080/x"]
    assert "Signature=s" in videos[0].path
    assert not notes.skipped
    several = [f"https://b.example/videos/{query}" for query in ("?a", "?b", "?b=", "?c=%20", "?c=+", "?\udcff")]
    videos, notes = expand(several, allowed_urls=allowed)
    assert len({video.name.encode() for video in videos}) == len(several), "each its own file, with a valid name"
    assert not notes.duplicates
    for url in (
        "https://b.example/other/1.mp4",
        "http://b.example/videos/1.mp4",
        "https://b.example:444/videos/1.mp4",
        "https://b.example.evil/videos/1.mp4",
        "https://b.example/videos/../secret.mp4",
        "https://b.example/videos/%2e%2e/secret.mp4",
        "https://user@b.example/videos/1.mp4",
    ):
        with pytest.raises(ConfigError):
            check_allowed(url, allowed)
    with pytest.raises(ConfigError, match=r"--allow-url https://b\.example/"):
        expand(["https://b.example/1.mp4"])


@given(st.text("abc&=?#%", max_size=30))
def test_a_name_of_any_query_is_a_url_again(query: str) -> None:
    assert url_name(url_name(f"http://a/b?{query}")) == url_name(f"http://a/b?{query}")
