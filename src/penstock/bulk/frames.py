"""The frames of a video file in presentation order, numbered and timed, up to its end or its first damage."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.bulk.types import Position
from penstock.bulk.video import Damage, OpenVideo, PacketDecoder, VideoError, av_library

TIMES_MAY_JUMP = 0x0200  # AVFMT_TS_DISCONT: a time does not identify a place in the file
UNSEEKABLE = {("mxf", "ffv1")}  # a seek leads to frames that cannot be decoded alone, without an error
SEEK_BACK_S = (0.0, 10.0)  # some containers seek by decoding time and overshoot: try again further back


class DecodedFrame(NamedTuple):
    """`number` counts from 0 and `time_s` from the first frame; `pts` is None if the container cannot seek to it."""

    number: int
    time_s: float
    pts: int | None
    picture: Any


class _SeekFailed(Exception):
    """A seek did not lead to the wanted frame."""


class FrameReader:
    """Reads the video at `path`, or what follows a position, numbered and timed as if read from the beginning."""

    def __init__(self, path: str, threads: int = 1, start: Position | None = None) -> None:
        self._path = path
        self._threads = threads
        self._start = start
        self.tick_s = 0.0

    def frames(self) -> Generator[DecodedFrame, None, None]:
        """Yields each frame, beginning with the position's own.

        Raises VideoError at the first damage, after every frame that precedes it. Where that is depends neither on
        the number of threads nor on the position.
        """
        start, threads = self._start, self._threads
        last = -1 if start is None else start.frame - 1
        while True:
            try:
                for frame in self._read(start, threads):
                    if frame.number > last:
                        last, start = frame.number, Position(frame.number, frame.pts, 0)
                        yield frame
                return
            except Damage as damage:
                if threads == 1:
                    place, kept = f"frame {last + 1}", "; the frames before it are kept"
                    if last < 0:
                        place, kept = "its first frame", ""
                    message = f"is damaged at {place}: {damage}{kept}"
                    raise VideoError(message, frame=last + 1, detail=self._path) from damage
            threads = 1  # several threads report damage late and incompletely; one alone locates it

    def _read(self, start: Position | None, threads: int) -> Iterator[DecodedFrame]:
        if start is not None and start.pts is not None:
            # only a single thread can tell damage from data that a seek skipped
            for count, back_s in itertools.product(sorted({threads, 1}, reverse=True), SEEK_BACK_S):
                try:
                    yield from self._open(count).frames_from(start, back_s)
                    return
                except _SeekFailed:
                    continue
        yield from self._open(threads).all_frames()

    def _open(self, threads: int) -> _SinglePass:
        reading = _SinglePass(self._path, threads)
        self.tick_s = reading.tick_s
        return reading


class _Clock:
    """Times from pts. After a pts that is missing or runs backwards, time continues at the frame rate.

    No later frame can then be found by its pts.
    """

    def __init__(self, stream: Any, seekable: bool) -> None:
        self._unit = stream.time_base or Fraction(1, 25)
        self._step = 1 / (stream.average_rate or stream.guessed_rate or Fraction(25))
        self._seekable = seekable
        self._zero: int | Fraction | None = None
        self._last: Fraction | None = None

    def start(self, pts: int | None) -> None:
        """Sets time zero to the pts of the first frame."""
        self._zero = pts

    def next(self, pts: int | None) -> tuple[float, int | None]:
        """The time of the next frame, and the pts to seek to it."""
        time = None if pts is None or self._zero is None else (pts - self._zero) * self._unit
        if time is None or (self._last is not None and time <= self._last):
            self._seekable = False
            time = Fraction(0) if self._last is None else self._last + self._step
            self._zero = None if pts is None else pts - time / self._unit
        self._last = time
        return float(time), pts if self._seekable else None


class _SinglePass:
    """One pass over a file by one decoder."""

    def __init__(self, path: str, threads: int) -> None:
        self._video = video = OpenVideo(path, threads)
        self.tick_s = video.tick_s
        jumps = bool(video.container.format.flags & TIMES_MAY_JUMP)
        self._decoder = PacketDecoder(video.container, video.stream, single_threaded=video.threads == 1, cut=jumps)
        kind = video.container.format.name, video.stream.codec_context.name
        self._clock = _Clock(video.stream, seekable=not jumps and kind not in UNSEEKABLE)

    def all_frames(self) -> Iterator[DecodedFrame]:
        """Raises Damage."""
        try:
            for number, picture in enumerate(self._decoder.frames()):
                if number == 0:
                    self._clock.start(picture.pts)
                yield DecodedFrame(number, *self._clock.next(picture.pts), picture)
        finally:
            self._video.close()

    def frames_from(self, position: Position, back_s: float) -> Iterator[DecodedFrame]:
        """The frame at a position with a pts, and those after it. Raises _SeekFailed before the first, or Damage."""
        try:
            first, others = self._seek(position, back_s)
            for number, picture in enumerate(itertools.chain([first], others), position.frame):
                yield DecodedFrame(number, *self._clock.next(picture.pts), picture)
        finally:
            self._video.close()

    def _seek(self, position: Position, back_s: float) -> tuple[Any, Iterator[Any]]:
        assert position.pts is not None
        stream = self._video.stream
        try:
            self._clock.start(next(self._decoder.frames()).pts)
            self._video.container.seek(position.pts - round(back_s / stream.time_base), stream=stream)
            pictures = self._decoder.frames()
            for picture in pictures:
                if picture.pts is None or picture.pts > position.pts:
                    raise _SeekFailed
                if picture.pts == position.pts:
                    return picture, pictures
        except (Damage, StopIteration, av_library().error.FFmpegError) as error:
            raise _SeekFailed from error
        raise _SeekFailed
