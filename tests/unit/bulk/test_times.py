"""The times of frames, next to ffprobe's, for every way in which containers state them."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest

from penstock.bulk import frames as frames_module
from penstock.bulk.decode import BlockPool, read_chunks
from penstock.bulk.frames import FrameReader, torchcodec_decoder
from penstock.bulk.types import Decoder, Pixels, Position, ReadPlan, Sampling, Video
from penstock.bulk.video import VideoError
from penstock.errors import ConfigError
from support.videos import make_clip, number_of

COUNT = 30
STEADY = tuple(range(COUNT))
VARIABLE = tuple(n + n // 3 + 4 * (n > 17) for n in range(COUNT))  # in units of 1/25 s
GOPS = {"plain": {"g": "12", "bf": "0"}, "b-frames": {"g": "12", "bf": "3"}}
CONTAINERS = {
    "libx264": "mp4 mov mkv avi flv ts nut asf",
    "libx265": "mp4 mkv ts nut",
    "mpeg4": "mp4 mkv avi ts nut asf",
    "mpeg2video": "mkv mpg ts avi",
}
RATES = {"steady": STEADY, "variable": VARIABLE}
KEPT = {"all": 1, "third": 3, "twelfth": 12, "no": COUNT + 1}  # time stamps of a transport stream


class Film(NamedTuple):
    """`times` are those of the encoder, in units of 1/25 s, by the number that a frame shows."""

    path: Path
    times: tuple[int, ...]


def cases() -> Iterator[tuple[str, ...]]:
    """What was written how: codec, GOP, rate, container, and what became of its times."""
    for codec, containers in CONTAINERS.items():
        for gop, rate, container in itertools.product(GOPS, RATES, containers.split()):
            yield codec, gop, rate, container, "kept"
    for codec, rate in itertools.product(("libx264", "libx265", "mpeg2video"), RATES):
        for kept in KEPT:
            yield codec, "b-frames", rate, "ts", f"{kept} stamps"
    for codec, container in itertools.product(("libx264", "libx265"), ("mp4", "mkv", "ts", "nut")):
        yield codec, "b-frames", "steady", container, "raw"
        yield codec, "b-frames", "steady", container, "in decoding order"
    for container, first_pts in itertools.product(("mp4", "mov", "mkv", "flv", "ts"), (-5, 7)):
        yield "libx264", "b-frames", "steady", container, f"from {first_pts}"


CASES = list(cases())
Make = Callable[[tuple[str, ...]], Film]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The film of a case, made once."""
    folder = tmp_path_factory.mktemp("films")

    @functools.cache
    def get(case: tuple[str, ...]) -> Film:
        codec, gop, rate, container, times = case
        path = folder / f"{'-'.join(case)}.{container}"
        if times == "raw" or times == "in decoding order":
            return remuxed(get((codec, gop, rate, "mp4", "kept")), path, raw=times == "raw")
        if times.endswith("stamps"):
            return without_times(get((codec, gop, rate, "ts", "kept")), path, KEPT[times.split()[0]])
        first_pts = int(times.removeprefix("from ")) if times.startswith("from") else 0
        options = GOPS[gop] | ({"x265-params": "log-level=none"} if codec == "libx265" else {})
        make_clip(path, RATES[rate], codec=codec, size=(64, 48), options=options, first_pts=first_pts)
        return Film(path, RATES[rate])

    return get


def remuxed(film: Film, path: Path, *, raw: bool = False) -> Film:
    """A copy whose packets have only times in decoding order: those of the container, or those of a raw stream."""
    with av.open(str(film.path)) as given, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(given.streams.video[0])
        for number, packet in enumerate(p for p in given.demux(video=0) if p.size):
            packet.stream = stream
            if raw:
                packet.time_base = 1 / given.streams.video[0].average_rate
                packet.dts = number
            packet.pts = packet.dts
            out.mux(packet)
    return Film(path, film.times)


def without_times(film: Film, path: Path, every: int) -> Film:
    """A copy of a transport stream in which only every so many packets have a time."""
    data, number = bytearray(film.path.read_bytes()), 0
    for place in range(0, len(data), 188):
        if data[place + 1] & 0x40:  # the first part of a packet
            head = place + 4 + (1 + data[place + 4] if data[place + 3] & 0x20 else 0)
            if data[head : head + 3] == b"\0\0\1" and data[head + 3] & 0xF0 == 0xE0:
                data[head + 7] &= 0x3F if number % every or every > COUNT else 0xFF  # PTS_DTS_flags
                number += 1
    path.write_bytes(data)
    return Film(path, film.times)


def seen(path: Path, threads: int = 1) -> list[tuple[int, float]]:
    """The number that each frame shows, and its time."""
    frames = FrameReader(str(path), threads).frames()
    return [(number_of(frame.picture.to_ndarray(format="rgb24")), frame.time_s) for frame in frames]


class Stated(NamedTuple):
    """A frame according to ffprobe; its time is from the first one."""

    time_s: float | None
    key: bool


@functools.cache
def stated(path: Path) -> list[Stated]:
    """Every frame according to ffprobe."""
    command = ["ffprobe", "-v", "quiet", "-select_streams", "V:0", "-of", "json"]
    shown = subprocess.run(
        [*command, "-show_entries", "frame=best_effort_timestamp_time,key_frame", str(path)],
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    frames = json.loads(shown.stdout)["frames"]
    times = [frame.get("best_effort_timestamp_time") for frame in frames]
    zero = next((float(time) for time in times if time is not None), 0.0)
    return [
        Stated(None if time is None else float(time) - zero, frame["key_frame"] == 1)
        for time, frame in zip(times, frames, strict=True)
    ]


def chosen(
    path: Path, sampling: Sampling, resume: Position | None = None, **pixels: Any
) -> list[tuple[int, float, int | None, int]]:
    """Number, time and pts of each sample, and the number that it shows."""
    plan = ReadPlan(sampling=sampling, pixels=Pixels(height=48, width=80, **pixels), chunk_size=4)
    pool = BlockPool(8 * 48 * 80 * 3, 4 * 48 * 80 * 3)
    found = []
    for chunk in read_chunks(Video(str(path), path.name, 0, 0), plan, pool, resume):
        shown = map(number_of, chunk.pixels)  # type: ignore[arg-type]
        found += zip(chunk.frames, chunk.times_s, chunk.pts, shown, strict=True)
        chunk.block.release()
    return found


def knows(case: tuple[str, ...]) -> bool:
    """Whether the file states the time of each frame, or its frame rate."""
    _, _, rate, container, times = case
    return rate == "steady" or (container not in ("mpg", "avi", "asf") and times in ("kept", "all stamps"))


def test_there_are_many_files() -> None:
    assert len(set(CASES)) > 120


@pytest.mark.parametrize("case", [*filter(knows, CASES)], ids="-".join)
def test_times_are_those_of_the_encoder(case: tuple[str, ...], make: Make) -> None:
    path, times = make(case)
    shown = seen(path)
    numbers = [number for number, _ in shown]
    assert numbers == sorted(numbers)
    hidden = 5 if case[3] in ("mp4", "mov") and case[4] == "from -5" else 0  # by an edit list
    if case[3:] == ("mp4", "in decoding order"):  # the edit list hides two frames, not the first two that are shown
        assert [time for _, time in shown] == pytest.approx([n / 25 for n in range(COUNT - 2)], abs=0.0015)
        return
    assert numbers == list(range(hidden, COUNT))
    assert [time for _, time in shown] == pytest.approx([(times[n] - times[hidden]) / 25 for n in numbers], abs=0.0015)


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="the program ffprobe is not here: make clients")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_times_equal_those_of_ffprobe_where_its_own_increase(case: tuple[str, ...], make: Make) -> None:
    path, _ = make(case)
    expected = [time for time, _ in stated(path)]
    known = [time for time in expected if time is not None]
    if known != sorted(set(known)):
        assert case[4] in ("raw", "in decoding order")  # of which ffprobe makes no sequence
        return
    times = [time for _, time in seen(path)]
    assert len(times) == len(expected)
    assert [time for time, known in zip(times, expected, strict=True) if known is not None] == pytest.approx(
        known, abs=0.0015
    )


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "b-frames"], ids="-".join)
def test_times_do_not_depend_on_the_number_of_threads(case: tuple[str, ...], make: Make) -> None:
    path, _ = make(case)
    once = seen(path)
    assert seen(path, threads=4) == once
    assert [time for _, time in once] == sorted(time for _, time in once)


@pytest.mark.parametrize("container", ["avi", "asf", "mkv"])
def test_sampling_takes_the_frames_of_its_times(container: str, make: Make) -> None:
    times = "raw" if container == "mkv" else "kept"
    path, _ = make(("libx264", "b-frames", "steady", container, times))

    def taken(**sampling: float) -> list[int]:
        return [shown for *_, shown in chosen(path, Sampling(**sampling))]  # type: ignore[arg-type]

    assert taken(fps=5) == list(range(0, COUNT, 5))
    assert taken(start_s=0.4, end_s=0.8) == list(range(10, 20))


MODES = {
    "keyframes": Sampling(keyframes=True),
    "seconds": Sampling(fps=3),
    "frames": Sampling(every=7),
    "near-duplicates": Sampling(dedupe=40),
    "clips": Sampling(fps=2 / 0.5, clip_frames=2),
}
if importlib.util.find_spec("scenedetect"):
    MODES["scenes"] = Sampling(scene=3.0)


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="the program ffprobe is not here: make clients")
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_chosen_frames_are_frames_of_the_whole_video_and_survive_a_resume(case: tuple[str, ...], make: Make) -> None:
    path, _ = make(case)
    shown = seen(path)
    expected = stated(path)
    for sampling in MODES.values():
        found = chosen(path, sampling)
        assert found
        assert [(picture, time) for _, time, _, picture in found] == [shown[number] for number, *_ in found]
        place = len(found) // 2
        number, _, pts, _ = found[place]
        assert chosen(path, sampling, Position(number, pts, place + 1)) == found[place + 1 :]
    if len(expected) == len(shown):
        keys = [number for number, *_ in chosen(path, MODES["keyframes"])]
        assert keys == [number for number, frame in enumerate(expected) if frame.key]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_another_decoder_reads_the_same_frames_at_the_same_times(case: tuple[str, ...], make: Make) -> None:
    usable_torchcodec()
    path, _ = make(case)
    for sampling in (Sampling(), Sampling(every=9), Sampling(fps=3, start_s=0.2)):
        whole = chosen(path, sampling, decoder="torchcodec")
        assert whole == chosen(path, sampling)
        number, _, pts, _ = whole[len(whole) // 2]
        resumed = chosen(path, sampling, Position(number, pts, len(whole) // 2 + 1), decoder="torchcodec")
        assert resumed == whole[len(whole) // 2 + 1 :]


@pytest.mark.parametrize(
    "how",
    [
        {"rotate": 90},
        {"rotate": 0, "mirrored": True},
        {"rotate": 90, "mirrored": True},
        {"pix_fmt": "yuv420p10le"},
        {"pix_fmt": "yuv420p10le", "options": {"x264-params": "fullrange=on"}},
    ],
)
def test_another_decoder_shows_frames_alike(tmp_path: Path, how: dict[str, Any]) -> None:
    usable_torchcodec()
    path = make_clip(tmp_path / "a.mp4", 12, **how)  # several, to have an order that the packets show

    def shown(decoder: Decoder) -> Any:
        plan = ReadPlan(pixels=Pixels(mode="source", decoder=decoder), chunk_size=12)
        (chunk,) = read_chunks(Video(str(path), path.name, 0, 0), plan, BlockPool(1 << 20, 1 << 20))
        return np.array(chunk.pixels, int)

    one, other = shown("pyav"), shown("torchcodec")
    assert one.shape == other.shape
    assert abs(one - other).mean() < 3  # edges of 10-bit colours differ


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case[3] in ("ts", "mpg") and case[4] == "kept" and case[:2] != ("mpeg2video", "plain")]
    + [("mpeg4", "plain", rate, container, "kept") for rate in RATES for container in ("avi", "asf")],
    ids="-".join,
)
def test_keyframes_alone_are_decoded_in_streams_that_state_all_times(
    case: tuple[str, ...], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = make(case)
    whole = [frame for frame in FrameReader(str(path)).frames() if frame.picture.key_frame]
    monkeypatch.setattr(FrameReader, "_all_frames", lambda *_: pytest.fail("every frame is decoded"))
    keys = list(FrameReader(str(path), keyframes=True).frames())
    assert [key[:3] for key in keys] == [frame[:3] for frame in whole]
    for key, frame in zip(keys, whole, strict=True):
        assert (key.picture.to_ndarray() == frame.picture.to_ndarray()).all()


def usable_torchcodec() -> None:
    """Skips the test if torchcodec is missing, or finds no FFmpeg."""
    try:
        torchcodec_decoder()
    except ConfigError as error:
        pytest.skip(error.message)


def test_few_frames_are_decoded_if_few_are_chosen(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    usable_torchcodec()
    asked: list[int] = []
    picture = frames_module._TorchcodecFrames.picture

    def counted(self: Any, number: int) -> Any:
        asked.append(number)
        return picture(self, number)

    monkeypatch.setattr(frames_module._TorchcodecFrames, "picture", counted)
    path, _ = make(("libx264", "b-frames", "steady", "mp4", "kept"))
    assert [number for number, *_ in chosen(path, Sampling(every=9), decoder="torchcodec")] == [0, 9, 18, 27]
    assert set(asked) == {0, 9, 18, 27}


def test_another_decoder_opens_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(self: object, path: str, *_: object, **__: object) -> None:
        raise VideoError("opened by PyAV", stage="open")

    monkeypatch.setattr(frames_module.OpenVideo, "__init__", opened)
    monkeypatch.setattr(frames_module, "torchcodec_decoder", lambda: pytest.fail("torchcodec opens a URL"))
    with pytest.raises(VideoError, match="opened by PyAV"):
        list(FrameReader("http://127.0.0.1:9/a.mp4", decoder="torchcodec").frames())
