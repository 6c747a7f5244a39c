"""The frames of a video file in presentation order, numbered and timed."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.bulk.packets import TIMES_MAY_JUMP, Damage, PacketDecoder, Survivor
from penstock.bulk.types import Gap, OnDamage, Position
from penstock.bulk.video import OpenVideo, VideoError, av_library

# a seek leads to frames that cannot be decoded alone, or to packets without times, without an error
UNSEEKABLE = {("mxf", "ffv1"), ("asf", "h264"), ("asf", "hevc")}
SEEK_BACK_S = (0.0, 10.0)  # some containers seek by decoding time and overshoot: try again further back


class DecodedFrame(NamedTuple):
    """`number` counts from 0 and `time_s` from the first frame; `pts` is None if the container cannot seek to it."""

    number: int
    time_s: float
    pts: int | None
    picture: Any


class _SeekFailed(Exception):
    """A seek did not lead to the wanted frame."""


class GapList:
    """The gaps between the frames of a video. A gap is complete when a keyframe ends the traces of its damage."""

    def __init__(self) -> None:
        self._complete: list[Gap] = []
        self._open: list[Gap] = []

    def suspect(self, frame: int, error: str) -> None:
        """Damage at a frame, which costs frames or not."""
        self._open.append(Gap(frame, 0, error))

    def frame(self, number: int, survivor: Survivor) -> None:
        """A frame was decoded. Called for every frame in order."""
        if survivor.lost:  # the damage that was suspected
            self._open = [gap for gap in self._open if gap.frames]
            self._open.append(Gap(number - survivor.lost, survivor.lost, survivor.error))
        if self._open and survivor.picture.key_frame and number >= self._open[-1].frame:
            self._complete += [replace(gap, clean=number) for gap in self._open]
            self._open = []

    def add_shifted(self, earlier: GapList, shift: int) -> None:
        """Adds gaps that precede its own, their frames renumbered by `shift`."""

        def shifted(gap: Gap) -> Gap:
            return replace(gap, frame=gap.frame + shift, clean=None if gap.clean is None else gap.clean + shift)

        self._complete = [*map(shifted, earlier._complete), *self._complete]
        self._open = [*map(shifted, earlier._open), *self._open]

    def end(self) -> None:
        """Completes every gap: no frame follows."""
        self._complete += self._open
        self._open = []

    def take(self) -> list[Gap]:
        """The complete gaps that were not taken before."""
        taken, self._complete = self._complete, []
        return taken


class FrameReader:
    """Reads the video at `path`, or what follows a position, numbered and timed as if read from the beginning.

    `on_damage` "stop" ends the video at its first damage; "skip" goes on at the next frame that decodes without an
    error. `gaps` collects the lost frames; the consumer takes them. `stream` is the index of the stream to read.
    """

    def __init__(
        self,
        path: str,
        threads: int = 1,
        start: Position | None = None,
        on_damage: OnDamage = "stop",
        stream: int | None = None,
    ) -> None:
        self._path, self._stream = path, stream
        self._threads = threads
        self._start = start
        self._skip = on_damage == "skip"
        self.gaps = GapList()
        self.tick_s = 0.0

    def frames(self) -> Generator[DecodedFrame, None, None]:
        """Yields each frame, beginning with the position's own.

        Raises VideoError at the damage after which no frame follows. The frames that are kept depend neither on the
        number of threads nor on the position.
        """
        start, threads = self._start, self._threads
        last = -1 if start is None else start.frame - 1
        skipped: Damage | None = None  # the damage after which the decoder is tolerant
        resumed = last
        while True:
            try:
                for frame in self._read(start, threads, skipped is not None):
                    if frame.number > last:
                        last, start = frame.number, Position(frame.number, frame.pts, 0)
                        yield frame
                if skipped is not None and last == resumed:
                    raise skipped
                self.gaps.end()
                return
            except Damage as damage:
                if threads == 1 and (not self._skip or skipped is not None):
                    self.gaps.end()
                    raise self._error(last, damage) from damage
                if threads == 1:
                    skipped, resumed = damage, last
                    self.gaps.suspect(last + 1, str(damage))
            threads = 1  # several threads report damage late and incompletely; one alone locates it

    def _error(self, last: int, damage: Damage) -> VideoError:
        place, kept = f"frame {last + 1}", "; the frames before it are kept"
        if last < 0:
            place, kept = "its first frame", ""
        return VideoError(f"is damaged at {place}: {damage}{kept}", frame=last + 1, detail=self._path)

    def _read(self, start: Position | None, threads: int, tolerant: bool) -> Iterator[DecodedFrame]:
        if start is not None and start.pts is not None:
            # only a single thread can distinguish damage from data that a seek skipped
            decoders = [(count, tolerant) for count in sorted({threads, 1}, reverse=True)]
            if self._skip and not tolerant:
                decoders.append((1, True))  # damage may lie between the keyframe and the position
            for decoder, back_s in itertools.product(decoders, SEEK_BACK_S):
                try:
                    yield from self._open(*decoder).frames_from(start, back_s)
                    return
                except _SeekFailed:
                    continue
        yield from self._open(threads, tolerant).all_frames()

    def _open(self, threads: int, tolerant: bool) -> _SinglePass:
        video = OpenVideo(self._path, threads, tolerant=tolerant, stream=self._stream)
        reading = _SinglePass(video, self.gaps if tolerant else None)
        self.tick_s = reading.tick_s
        return reading


class _Clock:
    """Times from pts. Without one, and after one that runs backwards, time continues at the frame rate.

    The next pts that is present and later than the last one states the time again. The frame rate is then the mean
    until there, because headers are often wrong about it. No later frame can be found by its pts.
    """

    def __init__(self, stream: Any, seekable: bool) -> None:
        self._unit = stream.time_base or Fraction(1, 25)
        self._step = 1 / (stream.average_rate or stream.guessed_rate or Fraction(25))
        self._seekable = seekable
        self._zero: int | Fraction | None = None
        self._last: Fraction = -self._step
        self._stated: Fraction | None = None  # the last time that a pts states
        self._frames = -1  # after the first

    def start(self, pts: int | None, lost: int = 0) -> None:
        """Sets time zero to the pts of the first frame, or to the time of the first of the frames `lost` before it."""
        self._zero = pts if pts is None or not lost else pts - lost * self._step / self._unit

    def next(self, pts: int | None, lost: int = 0, *, seekable: bool = True) -> tuple[float, int | None]:
        """The time of the next frame, which follows `lost` others, and the pts to seek to it if that finds it."""
        self._frames += 1 + lost
        self._seekable = self._seekable and seekable
        time = None if pts is None or self._zero is None else (pts - self._zero) * self._unit
        if time is None or (self._stated is not None and time <= self._stated):
            self._seekable = False
            time = self._last + (1 + lost) * self._step
            self._zero = self._zero if pts is None else pts - time / self._unit
        elif not self._seekable and self._frames:
            self._step = time / self._frames
        if pts is not None:
            self._stated = time
        self._last = max(time, self._last)
        return float(self._last), pts if self._seekable else None


class _SinglePass:
    """One pass over a file by one decoder, which is tolerant if there is a list for `gaps`."""

    def __init__(self, video: OpenVideo, gaps: GapList | None) -> None:
        self._video = video
        self.tick_s = video.tick_s
        self._gaps = gaps
        self._decoder = PacketDecoder(video)
        jumps = bool(video.container.format.flags & TIMES_MAY_JUMP)
        kind = video.container.format.name, video.stream.codec_context.name
        self._clock = _Clock(video.stream, seekable=not jumps and kind not in UNSEEKABLE)

    def all_frames(self) -> Iterator[DecodedFrame]:
        """Raises Damage."""
        try:
            number = -1
            for survivor in self._survivors():
                if number < 0:
                    self._clock.start(self._decoder.time_of(survivor.picture), survivor.lost)
                yield self._timed(number := self._number(number, survivor), survivor)
        finally:
            self._video.close()

    def frames_from(self, position: Position, back_s: float) -> Iterator[DecodedFrame]:
        """The frame at a position with a pts, and those after it. Raises _SeekFailed before the first, or Damage."""
        try:
            first, others = self._seek(position, back_s)
            number = position.frame
            yield self._timed(number, Survivor(first))
            for survivor in others:
                yield self._timed(number := self._number(number, survivor), survivor)
        finally:
            self._video.close()

    def _survivors(self) -> Iterator[Survivor]:
        return map(Survivor, self._decoder.frames()) if self._gaps is None else self._decoder.survivors()

    def _timed(self, number: int, survivor: Survivor) -> DecodedFrame:
        picture, decoder = survivor.picture, self._decoder
        seekable = picture.pts is not None and not decoder.resorted
        time_s, pts = self._clock.next(decoder.time_of(picture), survivor.lost, seekable=seekable)
        return DecodedFrame(number, time_s, pts, picture)

    def _number(self, last: int, survivor: Survivor) -> int:
        """The number of the frame that follows frame `last`."""
        number = last + 1 + survivor.lost
        if self._gaps is not None:
            self._gaps.frame(number, survivor)
        return number

    def _seek(self, position: Position, back_s: float) -> tuple[Any, Iterator[Survivor]]:
        assert position.pts is not None
        stream = self._video.stream
        try:
            first = next(self._survivors())
            self._clock.start(first.picture.pts, first.lost)
            self._video.container.seek(position.pts - round(back_s / stream.time_base), stream=stream)
            survivors = self._survivors()
            number, gaps = -1, GapList()  # from the keyframe on, until the position is found
            for survivor in survivors:
                picture = survivor.picture
                if picture.pts is None or picture.pts > position.pts:
                    raise _SeekFailed
                if self._gaps is not None and number < 0 and (survivor.lost or not picture.key_frame):
                    raise _SeekFailed  # guesses from here on depend on the frames before
                number += 1 + survivor.lost
                gaps.frame(number, survivor)
                if picture.pts == position.pts:
                    if self._gaps is not None:
                        self._gaps.add_shifted(gaps, position.frame - number)
                    return picture, survivors
        except (Damage, StopIteration, av_library().error.FFmpegError) as error:
            raise _SeekFailed from error
        raise _SeekFailed
