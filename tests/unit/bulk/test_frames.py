"""The frames of video files."""

from __future__ import annotations

import hashlib
import io
import os
import random
import socket
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import av
import numpy as np
import PIL.Image
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bulk import frames as frames_module
from penstock.bulk import packets as packets_module
from penstock.bulk import video as video_module
from penstock.bulk.decode import ImageReader
from penstock.bulk.frames import DecodedFrame, FrameReader
from penstock.bulk.types import Gap, Pixels, Position
from penstock.bulk.video import OpenVideo, VideoError, probe
from support.videos import make_clip, make_sound, number_of

COUNT = 60
GOP = {"g": "12", "bf": "3"}
KINDS: dict[str, dict[str, Any]] = {
    "b-frames.mp4": {"options": GOP},
    "open-gop.mp4": {"options": {**GOP, "x264-params": "open-gop=1:scenecut=0"}},
    "b-frames.mkv": {"options": GOP},
    "b-frames.ts": {"options": GOP},
    "b-frames.avi": {"options": GOP},
    "mpeg4.avi": {"codec": "mpeg4", "options": {"g": "12", "bf": "2"}},
    "mpeg4.mp4": {"codec": "mpeg4", "options": {"g": "12", "bf": "2"}},
    "mpeg2.mpg": {"codec": "mpeg2video", "options": {"g": "12", "bf": "2"}},
    "vp9.webm": {"codec": "libvpx-vp9", "options": {"g": "12", "deadline": "realtime", "cpu-used": "8"}},
    "mjpeg.avi": {"codec": "mjpeg", "pix_fmt": "yuvj420p"},
    "raw.h264": {"options": GOP},
}
SEEKABLE = ["b-frames.mp4", "b-frames.mkv", "vp9.webm", "mjpeg.avi"]


class Shown(NamedTuple):
    frame: int
    time_s: float
    pts: int | None
    number: int
    pixels: str


def read(path: Path, start: Position | None = None, threads: int = 1) -> tuple[list[Shown], VideoError | None]:
    """Every frame with the number it shows and a digest of its pixels, and the final error."""
    return frames_of(FrameReader(str(path), threads, start))


def frames_of(reader: FrameReader) -> tuple[list[Shown], VideoError | None]:
    shown = []
    try:
        for seen in reader.frames():
            rgb = seen.picture.to_ndarray(format="rgb24", threads=1)
            digest = hashlib.sha256(rgb.tobytes()).hexdigest()
            shown.append(Shown(seen.number, seen.time_s, seen.pts, number_of(rgb), digest))
    except VideoError as error:
        return shown, error
    return shown, None


def at(shown: Shown) -> Position:
    return Position(shown.frame, shown.pts, 0)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Shown]]]:
    """name of KINDS -> the clip and its frames, each made once."""
    folder = tmp_path_factory.mktemp("clips")
    made: dict[str, tuple[Path, list[Shown]]] = {}

    def get(name: str) -> tuple[Path, list[Shown]]:
        if name not in made:
            path = make_clip(folder / name, COUNT, **KINDS[name])
            made[name] = (path, read(path)[0])
        return made[name]

    return get


@pytest.mark.parametrize("name", KINDS)
def test_frames_are_in_presentation_order_and_timed_from_the_first(clips: Any, name: str) -> None:
    _, shown = clips(name)
    assert [one.frame for one in shown] == list(range(COUNT))
    assert [one.number for one in shown] == list(range(COUNT))
    assert [one.time_s for one in shown] == pytest.approx([frame / 25 for frame in range(COUNT)], abs=0.001)


@pytest.mark.parametrize("name", KINDS)
def test_several_threads_read_what_one_reads(clips: Any, name: str) -> None:
    path, shown = clips(name)
    assert read(path, threads=4) == (shown, None)


@pytest.mark.parametrize("name", KINDS)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(place=st.integers(0, COUNT - 1))
def test_resuming_reads_what_an_uninterrupted_pass_reads(clips: Any, name: str, place: int) -> None:
    path, shown = clips(name)
    assert read(path, at(shown[place])) == (shown[place:], None)


@pytest.mark.parametrize("name", SEEKABLE)
def test_resuming_does_not_read_from_the_beginning(clips: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shown = clips(name)
    monkeypatch.setattr(frames_module._SinglePass, "all_frames", None)
    for place in (0, 11, 12, 13, 40, COUNT - 1):
        assert read(path, at(shown[place]))[0] == shown[place:]


@pytest.mark.parametrize("pts", [1, 10**9, -5, None])
def test_a_position_that_no_seek_finds_is_reached_from_the_beginning(clips: Any, pts: int | None) -> None:
    path, shown = clips("b-frames.mp4")
    assert read(path, Position(30, pts, 0)) == (shown[30:], None)


def test_a_container_with_wrong_seeks_is_read_from_the_beginning(tmp_path: Path) -> None:
    shown, error = read(make_clip(tmp_path / "a.mxf", 30, codec="ffv1"))
    assert (error, len(shown)) == (None, 30)
    for place in (9, 18):
        assert read(tmp_path / "a.mxf", at(shown[place])) == (shown[place:], None)


def test_one_frame_is_a_video(tmp_path: Path) -> None:
    shown, error = read(make_clip(tmp_path / "one.mp4", 1))
    assert ([one[:2] for one in shown], error) == ([(0, 0.0)], None)


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "ts"])
def test_a_variable_frame_rate_shows_in_the_times(tmp_path: Path, suffix: str) -> None:
    shown, error = read(make_clip(tmp_path / f"vfr.{suffix}", [0, 1, 5, 6, 20], options={"bf": "2"}))
    assert error is None
    assert [one.number for one in shown] == [0, 1, 2, 3, 4]
    assert [one.time_s for one in shown] == pytest.approx([0, 0.04, 0.2, 0.24, 0.8], abs=0.001)


def test_frames_before_time_zero_are_shown_if_the_container_says_so(tmp_path: Path) -> None:
    options = {"bf": "2"}
    shown, error = read(make_clip(tmp_path / "a.mkv", 8, first_pts=-5, options=options))
    assert error is None
    assert [(one.frame, one.number) for one in shown] == [(n, n) for n in range(8)]
    assert shown[0].time_s == 0.0
    # an MP4's edit list begins at 0 and hides earlier frames
    path = make_clip(tmp_path / "a.mp4", 8, first_pts=-5, options=options)
    shown, error = read(path)
    assert error is None
    assert [(one.frame, one.number) for one in shown] == [(0, 5), (1, 6), (2, 7)]
    assert read(path, at(shown[1]))[0] == shown[1:]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ten-bit.mp4", {"pix_fmt": "yuv420p10le"}),
        ("odd.mp4", {"size": (161, 97), "pix_fmt": "yuv444p"}),
        ("odd.mkv", {"size": (161, 97), "codec": "ffv1"}),
        ("rgb.mkv", {"codec": "ffv1", "pix_fmt": "bgr0"}),
        ("grey.mkv", {"codec": "ffv1", "pix_fmt": "gray"}),
        ("full-range.avi", {"codec": "mjpeg", "pix_fmt": "yuvj444p"}),
        ("with-sound.mp4", {"audio": True}),
        ("two-videos.mp4", {"streams": 2}),
        ("http:x.mp4", {}),
        ("-y.mp4", {}),
        ("ümlaut\nline ☃.mp4", {}),
    ],
)
def test_unusual_files_are_read(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    shown, error = read(make_clip(tmp_path / name, 5, **options))
    assert error is None
    assert [one.number for one in shown] == [0, 1, 2, 3, 4]


def test_a_relative_name_with_a_leading_dash_is_not_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_clip(tmp_path / "-i.mp4", 3)
    monkeypatch.chdir(tmp_path)
    assert len(read(Path("-i.mp4"))[0]) == 3


def test_the_number_of_frames_in_the_header_is_not_trusted(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.avi", 12, codec="mpeg4")
    data = bytearray(path.read_bytes())
    for place in (data.index(b"avih") + 8 + 16, data.index(b"strh") + 8 + 32):  # dwTotalFrames, dwLength
        assert int.from_bytes(data[place : place + 4], "little") == 12
        data[place : place + 4] = (900).to_bytes(4, "little")
    path.write_bytes(data)
    assert probe(str(path)).frames == 900
    shown, error = read(path)
    assert (len(shown), error) == (12, None)


def test_a_recording_cut_out_of_a_longer_one_begins_at_its_first_keyframe(tmp_path: Path) -> None:
    whole = make_clip(tmp_path / "a.ts", COUNT, options={"g": "20", "bf": "2"}).read_bytes()
    path = tmp_path / "cut.ts"
    path.write_bytes(whole[len(whole) // 188 // 3 * 188 :])
    shown, error = read(path)
    assert error is None
    assert [(one.frame, one.number) for one in shown] == [(n, n + 20) for n in range(40)]
    assert read(path, threads=4) == (shown, None)


class Stream(NamedTuple):
    """The part of a stream that the clock reads."""

    time_base: Fraction = Fraction(1, 90000)
    average_rate: Fraction = Fraction(25)


def test_missing_or_backward_times_continue_at_the_frame_rate() -> None:
    clock = frames_module._Clock(Stream(), seekable=True)
    clock.start(7200)
    times = [clock.next(pts) for pts in (7200, 10800, None, 18000, 3600, 7200, 7200)]
    assert [time_s for time_s, _ in times] == pytest.approx([0.0, 0.04, 0.08, 0.12, 0.16, 0.2, 0.24])
    assert [pts for _, pts in times] == [7200, 10800, None, None, None, None, None]


# ---- damage


@pytest.mark.parametrize("suffix", ["mkv", "nut"])
def test_a_packet_that_never_produces_a_frame_does_not_fill_memory(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    shown = packets_module._ReorderBuffer.add

    def counted(self: Any, picture: Any) -> Any:
        yield from shown(self, picture)
        held.append(len(self._frames))

    monkeypatch.setattr(packets_module._ReorderBuffer, "add", counted)
    source = make_clip(tmp_path / f"source.{suffix}", 150, size=(64, 48), codec="mpeg4", options={"g": "12"})
    path = tmp_path / f"odd.{suffix}"
    with av.open(str(source)) as given, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(given.streams.video[0])
        for number, packet in enumerate(p for p in given.demux(video=0) if p.dts is not None):
            packet.stream = stream
            out.mux(packet)
            if number == 30:
                odd = av.Packet(bytes.fromhex("000001b6504f"))  # an empty VOP
                odd.stream, odd.time_base, odd.dts = stream, packet.time_base, packet.dts + 1
                odd.pts = odd.dts + round(20 / packet.time_base)
                out.mux(odd)
    found, error = read(path)
    assert ([s.number for s in found], error) == (list(range(150)), None)
    assert max(held) <= 40


def test_a_codec_that_never_reorders_waits_for_no_hidden_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    shown = packets_module._ReorderBuffer.add

    def counted(self: Any, picture: Any) -> Any:
        yield from shown(self, picture)
        held.append(len(self._frames))

    monkeypatch.setattr(packets_module._ReorderBuffer, "add", counted)
    path = tmp_path / "odd.webm"
    with (
        av.open(str(make_clip(tmp_path / "a.webm", 60, size=(64, 48), codec="libvpx"))) as given,
        av.open(str(path), "w") as out,
    ):
        stream = out.add_stream_from_template(given.streams.video[0])
        for number, packet in enumerate(p for p in given.demux(video=0) if p.size):
            packet.stream = stream
            out.mux(packet)
            if number % 10 == 5:
                hidden = av.Packet(bytes([bytes(packet)[0] & ~16]) + bytes(packet)[1:])  # show_frame of VP8
                hidden.stream, hidden.time_base = stream, packet.time_base
                hidden.pts = hidden.dts = packet.pts + 10
                out.mux(hidden)
    found, error = read(path)
    assert ([s.frame for s in found], error) == (list(range(60)), None)
    assert max(held) == 0


def packets(path: Path) -> list[tuple[int, int, int]]:
    """Offset, size and pts of each packet, in file order."""
    with av.open(str(path)) as container:
        return [(p.pos, p.size, p.pts) for p in container.demux(video=0) if p.size]


def damaged(path: Path, place: int, size: int, seed: int = 1) -> Path:
    data = bytearray(path.read_bytes())
    data[place : place + size] = random.Random(seed).randbytes(len(data[place : place + size]))
    broken = path.with_name(f"broken-{path.name}")
    broken.write_bytes(data)
    return broken


@pytest.mark.parametrize(
    "name", ["b-frames.mp4", "open-gop.mp4", "b-frames.avi", "mpeg4.avi", "mpeg4.mp4", "mjpeg.avi"]
)
@pytest.mark.parametrize("which", [20, 24, 31])
def test_a_corrupt_group_in_the_middle_ends_the_video_after_the_frames_before_it(
    clips: Any, name: str, which: int
) -> None:
    path, shown = clips(name)
    place, size, _ = packets(path)[which]
    broken = damaged(path, place, size + 200)
    before, error = read(broken)
    assert error is not None
    assert (error.stage, error.frame) == ("decode", len(before))
    assert before == shown[: len(before)]
    # the frames shown before the first corrupt packet's frame, except those decoded after it
    assert which - 6 <= len(before) <= which + 3


@pytest.mark.parametrize("name", ["b-frames.mp4", "b-frames.mkv", "open-gop.mp4", "b-frames.avi", "mpeg4.avi"])
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(which=st.integers(5, COUNT - 1), seed=st.integers(0, 99), data=st.data())
def test_the_place_of_damage_depends_on_neither_threads_nor_a_resume(
    clips: Any, name: str, which: int, seed: int, data: st.DataObject
) -> None:
    path, _ = clips(name)
    place, size, _ = packets(path)[which]
    broken = damaged(path, place + min(size - 1, 12), max(1, size - 12), seed)
    before, error = read(broken)
    again, same = read(broken, threads=4)
    assert (again, str(same)) == (before, str(error))
    if before:
        start = data.draw(st.integers(0, len(before) - 1))
        rest, same = read(broken, at(before[start]))
        assert (rest, str(same)) == (before[start:], str(error))


def test_several_threads_notice_every_guessed_frame(clips: Any) -> None:
    path, _ = clips("b-frames.mkv")
    for which, (place, size, _) in list(enumerate(packets(path)))[5:40:4]:
        broken = damaged(path, place + min(size - 1, 12), max(1, size - 12), seed=8)
        before, error = read(broken)
        for _ in range(6):
            again, same = read(broken, threads=4)
            assert (which, len(again), str(same)) == (which, len(before), str(error))


@pytest.mark.parametrize("name", ["b-frames.ts", "raw.h264"])
def test_several_threads_keep_what_one_keeps_without_a_keyframe(clips: Any, name: str) -> None:
    path, _ = clips(name)
    place, size, _ = packets(path)[12]
    broken = damaged(path, place + 6, size - 6)
    assert read_around(broken, threads=4) == read_around(broken)


def test_a_damaged_first_frame_is_reported(clips: Any) -> None:
    path, _ = clips("b-frames.mp4")
    place, size, _ = packets(path)[0]
    shown, error = read(damaged(path, place, size))
    assert shown == []
    assert error is not None
    assert error.frame == 0
    assert "is damaged at its first frame" in error.message


def test_an_mp4_without_its_end_keeps_its_complete_frames(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4", 30, options={"g": "10"}, container_options={"movflags": "faststart"})
    whole, _ = read(path)
    os.truncate(path, path.stat().st_size * 2 // 3)
    shown, error = read(path)
    assert error is not None
    assert shown == whole[: len(shown)]
    assert 8 <= len(shown) == error.frame < 25
    again, same = read(path, threads=3)
    assert (again, str(same)) == (shown, str(error))


def test_an_mp4_without_its_index_cannot_be_opened(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mp4", 30)
    os.truncate(path, path.stat().st_size * 2 // 3)
    shown, error = read(path)
    assert shown == []
    assert error is not None
    assert error.stage == "open"
    assert "Invalid data" in error.message
    assert str(tmp_path) not in error.message


def test_a_truncated_matroska_file_is_damaged(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mkv", 100, options={"g": "10"})
    whole, error = read(path)
    assert error is None
    os.truncate(path, path.stat().st_size * 2 // 3)
    shown, error = read(path)
    assert error is not None
    assert "bytes are missing" in error.message
    assert shown == whole[: len(shown)]
    assert 55 < len(shown) < 80


@pytest.mark.parametrize("until", [0.6, 1.0])
def test_unreadable_matroska_clusters_are_damage(tmp_path: Path, until: float) -> None:
    path = make_clip(tmp_path / "a.mkv", 300, size=(320, 192), options={"g": "10"})
    whole, _ = read(path)
    listed = packets(path)
    start = listed[150][0]
    end = listed[int(len(listed) * until) - 1]
    shown, error = read(damaged(path, start, end[0] + end[1] - start))
    assert error is not None
    assert shown == whole[: len(shown)]
    assert 140 <= len(shown) <= 150


def test_transport_streams_with_lost_packets_are_damaged(clips: Any) -> None:
    path, shown = clips("b-frames.ts")
    data = path.read_bytes()
    broken = path.with_name("lost.ts")
    middle = len(data) // 188 // 2 * 188
    broken.write_bytes(data[:middle] + data[middle + 5 * 188 :])
    before, error = read(broken)
    assert error is not None
    assert before == shown[: len(before)]
    assert 15 < len(before) < 40


@pytest.mark.parametrize("codec", ["libx264", "mpeg2video"])
def test_joined_transport_streams_are_not_damaged(tmp_path: Path, codec: str) -> None:
    lengths = (40, 31, 25)
    parts = [
        make_clip(tmp_path / f"{n}.ts", length, codec=codec, options={"g": "12", "bf": "2"}, first_pts=sum(lengths[:n]))
        for n, length in enumerate(lengths)
    ]
    joined = tmp_path / "joined.ts"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert any(packet.is_corrupt for packet in av.open(str(joined)).demux(video=0))
    shown, error = read(joined)
    assert error is None
    assert [s.number for s in shown] == [number for length in lengths for number in range(length)]
    assert read(joined, threads=3) == (shown, None)


def test_a_gap_before_a_keyframe_of_a_transport_stream_is_damage(tmp_path: Path) -> None:
    data = bytearray(make_clip(tmp_path / "a.ts", 80, options={"g": "10", "bf": "0"}).read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4000] = bytes(4000)
    (tmp_path / "hole.ts").write_bytes(data)
    shown, error = read(tmp_path / "hole.ts")
    assert error is not None
    assert [s.number for s in shown] == [*range(len(shown))]
    assert 20 < len(shown) < 50


def read_around(path: Path, start: Position | None = None, threads: int = 1) -> tuple[list[Shown], list[Gap]]:
    """Every frame that is kept if damage is skipped, and the gaps."""
    reader = FrameReader(str(path), threads, start, "skip")
    shown, _ = frames_of(reader)
    return shown, reader.gaps.take()


@pytest.mark.parametrize(
    ("name", "extra"),
    [(name, -20) for name in KINDS if not name.startswith(("b-frames.ts", "mpeg2", "raw"))]
    + [("b-frames.mp4", 200), ("open-gop.mp4", 200), ("mpeg4.mp4", 200)],
)
def test_reading_skips_damage_and_goes_on_at_the_next_decodable_frame(clips: Any, name: str, extra: int) -> None:
    path, whole = clips(name)
    place, size, _ = packets(path)[25]
    broken = damaged(path, place + 6, size + extra)
    before, error = read(broken)
    assert error is not None
    shown, gaps = read_around(broken)
    lost = {n for gap in gaps for n in range(gap.frame, gap.frame + gap.frames)}
    assert 1 <= len(lost) <= 12
    assert [one[:3] for one in shown] == [one[:3] for one in whole if one.frame not in lost]
    traces = {n for gap in gaps for n in range(gap.frame, gap.clean or COUNT)}
    assert len(traces) <= 24
    assert [one for one in shown if one.frame not in traces] == [one for one in whole if one.frame not in traces]
    assert shown[: len(before)] == before
    assert read_around(broken, threads=4) == (shown, gaps)


@pytest.mark.parametrize(
    "name", ["b-frames.mp4", "open-gop.mp4", "b-frames.mkv", "mpeg4.avi", "b-frames.avi", "b-frames.ts"]
)
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    which=st.lists(st.integers(0, COUNT - 10), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    threads=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_the_frames_kept_around_damage_depend_on_neither_threads_nor_a_resume(
    clips: Any, name: str, which: list[int], seed: int, threads: int, data: st.DataObject
) -> None:
    path, _ = clips(name)
    broken = path
    for n in which:
        place, size, _ = packets(path)[n]
        broken = damaged(broken, place + min(size - 1, 12), max(1, size - 12), seed)
    kept, gaps = read_around(broken)
    traces = {n for gap in gaps for n in range(gap.frame, gap.clean or COUNT)}
    again, _ = read_around(broken, threads=4)
    start = data.draw(st.integers(0, len(kept) - 1))
    for found, expected in (again, kept), (read_around(broken, at(kept[start]), threads)[0], kept[start:]):
        assert [one[:3] for one in found] == [one[:3] for one in expected]
        clean = [one for one in expected if one.frame not in traces]
        assert [one for one in found if one.frame not in traces] == clean


def test_a_resume_counts_the_frame_rate_from_the_beginning(clips: Any) -> None:
    path, _ = clips("b-frames.avi")
    broken = path
    for n in (2, 12):
        place, size, _ = packets(path)[n]
        broken = damaged(broken, place + min(size - 1, 12), max(1, size - 12), 0)
    kept, _ = read_around(broken)
    places = [i for i, frame in enumerate(kept) if frame.pts is not None]
    assert len(places) > 2
    for i in places:
        assert [one[:3] for one in read_around(broken, at(kept[i]))[0]] == [one[:3] for one in kept[i:]]


@pytest.mark.parametrize("name", ["b-frames.mp4", "b-frames.mkv", "open-gop.mp4"])
@pytest.mark.parametrize("kept", [0, 6, 20, 40])
def test_frames_keep_their_numbers_after_a_keyframe_that_shows_nothing(clips: Any, name: str, kept: int) -> None:
    path, whole = clips(name)
    with av.open(str(path)) as container:
        place, size = [(p.pos, p.size) for p in container.demux(video=0) if p.is_keyframe][1]
    for seed in range(4):
        shown, gaps = read_around(damaged(path, place + kept, size - kept, seed))
        assert [one[:3] for one in shown] == [whole[one.frame][:3] for one in shown]
        traces = {n for gap in gaps for n in range(gap.frame, gap.clean or COUNT)}
        assert [one for one in shown if one.frame not in traces] == [one for one in whole if one.frame not in traces]
        assert gaps


def test_a_hole_in_a_transport_stream_is_a_gap_of_as_many_frames_as_fit_into_its_time(tmp_path: Path) -> None:
    data = bytearray(make_clip(tmp_path / "a.ts", 80, options={"g": "10", "bf": "0"}).read_bytes())
    middle = len(data) // 2 // 188 * 188
    (tmp_path / "hole.ts").write_bytes(data[:middle] + data[middle + 188 * 60 :])
    shown, gaps = read_around(tmp_path / "hole.ts")
    assert sum(gap.frames for gap in gaps) > 20
    assert [one.frame for one in shown][-10:] == list(range(70, 80))
    assert [one.number for one in shown][-10:] == list(range(70, 80))
    assert shown[-1].time_s == pytest.approx(79 / 25)


def test_unreadable_matroska_clusters_are_a_gap(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "a.mkv", 600, size=(320, 192), options={"g": "10"})
    listed = packets(path)
    start, end = listed[250][0], listed[330]
    shown, gaps = read_around(damaged(path, start, end[0] + end[1] - start))
    lost = {n for gap in gaps for n in range(gap.frame, gap.frame + gap.frames)}
    assert [one.frame for one in shown] == [n for n in range(600) if n not in lost]
    assert len(lost) > 70
    assert shown[-1].number == shown[-1].frame == 599


def test_damage_after_which_nothing_can_be_decoded_ends_the_video(clips: Any, tmp_path: Path) -> None:
    path, whole = clips("b-frames.mkv")
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    kept, error = frames_of(FrameReader(str(cut), on_damage="skip"))
    assert error is not None
    assert (error.frame, "the file is truncated" in error.message) == (len(kept), True)
    assert kept == whole[: len(kept)]
    assert 20 < len(kept) < COUNT


def test_a_damaged_first_frame_is_a_gap_before_the_others(clips: Any) -> None:
    path, whole = clips("mjpeg.avi")
    place, size, _ = packets(path)[0]
    shown, gaps = read_around(damaged(path, place, size))
    assert [(gap.frame, gap.frames, gap.clean) for gap in gaps] == [(0, 1, 1)]
    assert shown == whole[1:]


def test_a_file_without_a_video_stream_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="has no video stream; its streams: audio") as caught:
        probe(str(make_sound(tmp_path / "a.m4a")))
    assert caught.value.stage == "open"


def with_cover(path: Path, film: Path | None) -> Path:
    """A file with sound, cover art, and the video of `film` after it."""
    cover = io.BytesIO()
    PIL.Image.new("RGB", (64, 64), "red").save(cover, "jpeg")
    with av.open(str(path), "w") as out:
        art = out.add_stream("mjpeg")
        art.width, art.height, art.pix_fmt = 64, 64, "yuvj420p"
        art.disposition = av.stream.Disposition.attached_pic
        sources = [] if film is None else [av.open(str(film))]
        copies = [out.add_stream_from_template(source.streams.video[0]) for source in sources]
        sound = out.add_stream("aac", rate=8000)
        packet = av.Packet(cover.getvalue())
        packet.stream, packet.time_base, packet.pts, packet.dts = art, Fraction(1, 25), 0, 0
        out.start_encoding()
        out.mux(packet)
        for source, copy in zip(sources, copies, strict=True):
            for part in (p for p in source.demux(video=0) if p.dts is not None):
                part.stream = copy
                out.mux(part)
            source.close()
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 8000, 0
        out.mux(sound.encode(frame))
        out.mux(sound.encode())
    return path


def test_cover_art_is_no_video(tmp_path: Path) -> None:
    film = make_clip(tmp_path / "film.mp4", 12, size=(48, 32))
    shown, error = read(with_cover(tmp_path / "with-film.mp4", film))
    assert ([one.number for one in shown], error) == (list(range(12)), None)
    with pytest.raises(VideoError, match="its streams: audio, cover art"):
        probe(str(with_cover(tmp_path / "song.mp4", None)))


def test_a_stream_can_be_named(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "two.mp4", 5, streams=2)
    for stream, numbers in (None, range(5)), (0, range(5)), (1, range(512, 517)):
        shown, error = frames_of(FrameReader(str(path), stream=stream))
        assert ([one.number for one in shown], error) == (list(numbers), None)
    film = make_clip(tmp_path / "film.mp4", 12, size=(48, 32))
    covered = with_cover(tmp_path / "with-film.mp4", film)
    with av.open(str(covered)) as container:
        indices = {s.index: s.disposition for s in container.streams.video}
    (cover,) = (index for index, kind in indices.items() if kind & av.stream.Disposition.attached_pic)
    assert probe(str(covered), cover).width == 64
    with pytest.raises(VideoError, match=r"its stream 9 is not a video; its video streams: 0, 2$") as caught:
        FrameReader(str(covered), stream=9).frames().__next__()
    assert caught.value.stage == "open"


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi"])
def test_a_file_without_frames_has_none(tmp_path: Path, suffix: str) -> None:
    shown, _ = read(make_clip(tmp_path / f"empty.{suffix}", 0, codec="mpeg4"))
    assert shown == []


def refused(path: Path, text: str) -> None:
    with pytest.raises(VideoError, match=text) as caught:
        probe(str(path))
    assert caught.value.stage == "open"


def test_a_file_that_is_not_a_video_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").write_bytes(b"")
    refused(tmp_path / "empty.mp4", "cannot be opened as a video")
    (tmp_path / "noise.mp4").write_bytes(random.Random(1).randbytes(4096))
    refused(tmp_path / "noise.mp4", r"cannot be opened as a video|is not a video")
    (tmp_path / "folder.mp4").mkdir()
    refused(tmp_path / "folder.mp4", "is not a regular file")
    (tmp_path / "empty.png").write_bytes(b"")
    refused(tmp_path / "empty.png", "cannot be opened as an image")
    for name in ("pipe.mp4", "pipe.png"):
        os.mkfifo(tmp_path / name)
        refused(tmp_path / name, "is not a regular file")
    with pytest.raises(VideoError, match="is not a regular file"):
        next(ImageReader(str(tmp_path / "pipe.png"), Pixels()).frames())
    refused(tmp_path / "gone.mp4", "cannot be opened: No such file")
    (tmp_path / "nul.mp4").symlink_to("nul.mp4")
    refused(tmp_path / "nul.mp4", "cannot be opened: Too many levels")
    with pytest.raises(VideoError, match="null byte"):
        probe("a\0b.mp4")


def test_a_playlist_disguised_as_a_video_is_not_followed(tmp_path: Path) -> None:
    make_clip(tmp_path / "other.ts", 5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        for place in ("other.ts", f"http://127.0.0.1:{server.getsockname()[1]}/x.ts"):
            (tmp_path / "list.mp4").write_text(
                f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{place}\n#EXT-X-ENDLIST\n", encoding="ascii"
            )
            refused(tmp_path / "list.mp4", r"is not a video|cannot be opened")
        with pytest.raises(BlockingIOError):  # no connection arrived
            server.accept()


def test_a_file_without_read_permission_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_clip(tmp_path / "a.mp4", 2)

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(av, "open", forbidden)
    refused(path, "cannot be opened as a video: Permission denied")


@pytest.mark.parametrize("name", KINDS)
def test_keyframes_are_those_of_the_whole_video(clips: Any, name: str) -> None:
    path, shown = clips(name)
    keys = [frame.number for frame in FrameReader(str(path)).frames() if frame.picture.key_frame]
    reader = FrameReader(str(path), keyframes=True)
    found, error = frames_of(reader)
    assert (found, error, reader.seen) == ([shown[number] for number in keys], None, COUNT)
    for place, key in enumerate(found):
        rest, _ = frames_of(FrameReader(str(path), start=at(key), keyframes=True))
        assert rest == found[place:]


def test_only_keyframes_are_decoded_where_the_packets_state_their_times(clips: Any, monkeypatch: Any) -> None:
    path, _ = clips("b-frames.mp4")

    def forbidden(*_: object) -> None:
        raise AssertionError("every frame is decoded")

    monkeypatch.setattr(FrameReader, "_all_frames", forbidden)
    found, _ = frames_of(FrameReader(str(path), keyframes=True))
    assert [one.frame for one in found] == [0, 12, 24, 36, 48]


def test_a_damaged_keyframe_is_a_gap_between_the_others(clips: Any) -> None:
    path, _ = clips("b-frames.mp4")
    with av.open(str(path)) as container:
        place, size = [(p.pos, p.size) for p in container.demux(video=0) if p.is_keyframe][1]
    reader = FrameReader(str(damaged(path, place + 6, size - 20)), on_damage="skip", keyframes=True)
    found, error = frames_of(reader)
    assert (error, [one.frame for one in found]) == (None, [0, 24, 36, 48])
    assert [(gap.frame, gap.frames, gap.clean) for gap in reader.gaps.take()] == [(12, 1, 24)]
    stopped = FrameReader(str(damaged(path, place + 6, size - 20)), keyframes=True)
    found, error = frames_of(stopped)
    assert error is not None
    assert (error.frame, [one.frame for one in found]) == (12, [0])


def test_keyframes_are_found_if_the_container_marks_none(clips: Any, tmp_path: Path) -> None:
    path, _ = clips("b-frames.mp4")
    plain = tmp_path / "unmarked.mkv"
    with av.open(str(path)) as given, av.open(str(plain), "w") as out:
        stream = out.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(video=0):
            if packet.size:
                packet.stream, packet.is_keyframe = stream, False
                out.mux(packet)
    found, error = frames_of(FrameReader(str(plain), keyframes=True))
    assert (error, [one.number for one in found]) == (None, [0, 12, 24, 36, 48])


def test_a_video_without_keyframes_is_reported(clips: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = clips("b-frames.avi")
    frame = DecodedFrame(0, 0.0, None, SimpleNamespace(key_frame=False))
    monkeypatch.setattr(FrameReader, "_all_frames", lambda *_: iter([frame]))
    with pytest.raises(VideoError, match="none of its 1 frames is a keyframe: read it without --keyframes"):
        list(FrameReader(str(path), keyframes=True).frames())


def test_a_probe_returns_what_the_header_states(tmp_path: Path) -> None:
    found = probe(str(make_clip(tmp_path / "a.mp4", 50)))
    assert (found.frames, found.duration_s, found.width, found.height, found.codec) == (50, 2.0, 160, 96, "h264")
    assert probe(str(make_clip(tmp_path / "a.mkv", 50))).frames == 50
    assert probe(str(make_clip(tmp_path / "b.mp4", 50, options={"g": "12", "sc_threshold": "0"}))).keyframes == 5


def test_large_frames_are_decoded_by_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_clip(tmp_path / "a.mp4", 3)
    counts = []
    for at_once_bytes in (1 << 30, 160 * 96 * 3 // 2 * 2 * 5, 1):
        monkeypatch.setattr(video_module, "CONCURRENT_BYTES", at_once_bytes)
        opened = OpenVideo(str(path), threads=8)
        counts.append(opened.stream.codec_context.thread_count)
        opened.close()
        assert len(read(path, threads=8)[0]) == 3
    assert counts == [8, 5, 1]
