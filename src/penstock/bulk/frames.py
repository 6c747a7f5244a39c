"""The frames of a video file in presentation order, numbered and timed."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Generator, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.bulk.packets import (
    CORRUPT_FRAME,
    STREAMS,
    TIMES_MAY_JUMP,
    Damage,
    PacketDecoder,
    Survivor,
    has_countable_keyframes,
    is_countable,
)
from penstock.bulk.pixels import orientation_of
from penstock.bulk.types import Decoder, Gap, OnDamage, Position
from penstock.bulk.urls import is_url
from penstock.bulk.video import OpenVideo, VideoError, av_library, reason
from penstock.errors import ConfigError
from penstock.plugins import optional_module

# a seek leads to frames that cannot be decoded alone, or to packets without times, without an error
UNSEEKABLE = {("mxf", "ffv1"), ("asf", "h264"), ("asf", "hevc")}
FULL_RANGE = 2  # AVCOL_RANGE_JPEG
SEEK_BACK_S = (0.0, 10.0)  # some containers seek by decoding time and overshoot: try again further back


class DecodedFrame(NamedTuple):
    """`number` counts from 0 and `time_s` from the first frame; `pts` is None if the container cannot seek to it."""

    number: int
    time_s: float
    pts: int | None
    picture: Any


class LazyFrame(DecodedFrame):
    """A frame whose picture is decoded when it is read."""

    @property
    def picture(self) -> Any:
        """Raises VideoError."""
        return self[3].picture(self.number)


class _SeekFailed(Exception):
    """A seek did not lead to the wanted frame."""


class _NotCountable(Exception):
    """The packets alone do not show the number or the time of a keyframe."""


class GapList:
    """The gaps between the frames of a video. A gap is complete when a keyframe ends the traces of its damage."""

    def __init__(self) -> None:
        self._complete: list[Gap] = []
        self._open: list[Gap] = []

    def suspect(self, frame: int, error: str, lost: int = 0) -> None:
        """Damage at a frame, which costs `lost` frames as far as known."""
        self._open.append(Gap(frame, lost, error))

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
    With the decoder "torchcodec", frames of files whose packets can be counted are decoded when their picture is read.
    With `keyframes`, only keyframes are read; the others keep their numbers. `seen` counts the frames so far, with
    those that are lost or not read.
    """

    def __init__(
        self,
        path: str,
        threads: int = 1,
        start: Position | None = None,
        on_damage: OnDamage = "stop",
        stream: int | None = None,
        keyframes: bool = False,
        decoder: Decoder = "pyav",
    ) -> None:
        self._path, self._stream = path, stream
        self._keyframes, self._decoder = keyframes, decoder
        self.seen = 0
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
        if self._keyframes:
            yield from self._key_frames()
            return
        frames = self._all_frames(self._start)
        if self._decoder == "torchcodec":
            with contextlib.suppress(_NotCountable):
                frames = self._by_index()
        for frame in frames:
            self.seen = frame.number + 1
            yield frame

    def _by_index(self) -> Iterator[DecodedFrame]:
        """Frames from the position on that torchcodec decodes when they are needed. Raises _NotCountable at once.

        torchcodec must not open a URL: it knows neither the list of allowed ones nor their limits.
        """
        if is_url(self._path):
            raise _NotCountable
        video = OpenVideo(self._path, 1, stream=self._stream)
        try:
            unit, stream, self.tick_s = video.stream.time_base, video.stream.index, video.tick_s
            packets = _CountedPackets(video, countable=is_countable(video.container, video.stream.codec_context))
            keys = packets.keyframes()
            if (first := next(keys, None)) is not None and not _is_plain(packets.decoded(first).picture):
                raise _NotCountable
            for _ in keys:
                pass
        except (Damage, OSError, ValueError, av_library().error.FFmpegError) as error:
            raise _NotCountable from error
        finally:
            video.close()
        if packets.hidden or not packets.times:  # torchcodec counts hidden frames too
            raise _NotCountable
        decoded = _TorchcodecFrames(self._path, self._threads, stream, len(packets.times))
        zero = packets.times[0]
        begin = 0 if self._start is None else self._start.frame
        return (
            LazyFrame(number, float((pts - zero) * unit), pts, decoded)
            for number, pts in enumerate(packets.times)
            if number >= begin
        )

    def _key_frames(self) -> Iterator[DecodedFrame]:
        start, key = self._start, None
        try:
            for key in self._count(start):
                self.seen = max(self.seen, key.number + 1)
                start = Position(key.number, key.pts, 0)
                yield key
        except _NotCountable:  # then every frame is decoded
            last = -1 if key is None else key.number
            for frame in self._all_frames(start):
                self.seen = frame.number + 1
                if frame.picture.key_frame and frame.number > last:
                    key = frame
                    yield key
        if key is None and self.seen:
            raise VideoError(f"none of its {self.seen} frames is a keyframe: read it without --keyframes", frame=0)

    def _count(self, start: Position | None) -> Iterator[DecodedFrame]:
        """The keyframes from a position on, in an intact file whose packets can be counted. Raises _NotCountable.

        Each is decoded alone. As many packets as its number are shown before it.
        """
        video = OpenVideo(self._path, 1, stream=self._stream)
        self.tick_s = video.tick_s
        try:
            packets = _CountedPackets(video, countable=has_countable_keyframes(video))
            for packet in packets.keyframes():
                if start is not None and packets.number(packet) < start.frame:
                    continue
                try:
                    key = packets.decoded(packet)
                except Damage as damage:
                    number = packets.number(packet)
                    if not self._skip:
                        raise self._error(number - 1, damage) from damage
                    self.gaps.suspect(number, str(damage), 1)
                else:
                    self.gaps.frame(key.number, Survivor(key.picture))
                    yield key
            self.seen = len(packets.times)
        except (OSError, ValueError, av_library().error.FFmpegError) as error:
            raise _NotCountable from error
        finally:
            video.close()

    def _all_frames(self, start: Position | None) -> Iterator[DecodedFrame]:
        threads = self._threads
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

    def start(self, pts: int | None, lost: int = 0, *, number: int = 0) -> None:
        """Sets time zero to the pts of the first frame, or to the time of the first of the frames `lost` before it.

        The next frame has that number.
        """
        self._frames = number - 1
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


def _clock_of(video: OpenVideo) -> _Clock:
    jumps = bool(video.container.format.flags & TIMES_MAY_JUMP)
    kind = video.container.format.name, video.stream.codec_context.name
    return _Clock(video.stream, seekable=not jumps and kind not in UNSEEKABLE)


class _SinglePass:
    """One pass over a file by one decoder, which is tolerant if there is a list for `gaps`."""

    def __init__(self, video: OpenVideo, gaps: GapList | None) -> None:
        self._video = video
        self.tick_s = video.tick_s
        self._gaps = gaps
        self._decoder = PacketDecoder(video)
        self._clock = _clock_of(video)

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
            self._clock.start(first.picture.pts, first.lost, number=position.frame)
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


class _CountedPackets:
    """The packets of a video in the order of decoding; `times` has their pts, sorted."""

    def __init__(self, video: OpenVideo, *, countable: bool) -> None:
        self._decoder = PacketDecoder(video)
        self._context = video.stream.codec_context
        self._parsed = video.container.format.name.startswith(STREAMS)
        self._clock = _clock_of(video)
        self._reorders = video.reorder_depth > 0
        self._in_order = self._all_key = True
        self.hidden = 0
        self._countable, self._key_pts = countable, -math.inf  # of the keyframe before the last
        self.times = array("q")

    def keyframes(self) -> Iterator[Any]:
        """The packet of each keyframe, once all packets that are shown before it are counted.

        Frames that are shown before a keyframe and decoded after it precede the next keyframe. Raises _NotCountable.
        """
        key, began = None, False
        for packet, problem in self._decoder.packets():
            began = began or (packet is not None and packet.is_keyframe)
            if problem or not began or packet.pts is None or not self._countable:
                raise _NotCountable
            if packet.is_discard:  # an edit list hides its frame
                self.hidden += 1
                continue
            if packet.is_keyframe:
                yield from self._counted(key)
                self._key_pts, key = -math.inf if key is None else key.pts, packet
            self._add(packet)
        yield from self._counted(key)

    def _add(self, packet: Any) -> None:
        place = self.number(packet)
        known = self.times[place : place + 1] == array("q", [packet.pts])
        if known or (place == 0 and self.times) or packet.pts <= self._key_pts:  # times jump back between recordings
            raise _NotCountable
        self._in_order = self._in_order and place == len(self.times)
        self._all_key = self._all_key and packet.is_keyframe
        self.times.insert(place, packet.pts)

    def _counted(self, key: Any) -> Iterator[Any]:
        if key is not None:
            if self._in_order and self._reorders:  # possibly the times of decoding
                raise _NotCountable
            yield key

    def number(self, packet: Any) -> int:
        """The number of a packet's frame among those counted so far."""
        return bisect_left(self.times, packet.pts)

    def decoded(self, packet: Any) -> DecodedFrame:
        """The frame of a keyframe's packet. Raises Damage, _NotCountable."""
        try:
            pictures = [*self._context.decode(packet), *self._context.decode(None)]
        except (OSError, ValueError, av_library().error.FFmpegError) as error:
            if self._all_key:  # the container probably marks every packet, whatever it holds
                raise _NotCountable from error
            raise Damage(reason(error)) from error
        finally:
            self._context.flush_buffers()
        if [picture.pts for picture in pictures] != [packet.pts] or not pictures[0].key_frame:
            raise _NotCountable
        if self._parsed and pictures[0].interlaced_frame:  # a packet may be a field
            raise _NotCountable
        if pictures[0].is_corrupt:
            raise Damage(CORRUPT_FRAME)
        self._clock.start(self.times[0])
        time_s, pts = self._clock.next(packet.pts)
        return DecodedFrame(self.number(packet), time_s, pts, pictures[0])


class _TorchcodecFrames:
    """The pictures of a file by number. torchcodec seeks to a frame that does not follow the last one."""

    def __init__(self, path: str, threads: int, stream: int, count: int) -> None:
        """Raises _NotCountable if torchcodec does not find as many frames."""
        self._path, self._last, self._picture = path, -1, None
        try:
            self._decoder = torchcodec_decoder()(
                os.path.abspath(path),  # a relative name may look like a URL
                stream_index=stream,
                dimension_order="NHWC",
                num_ffmpeg_threads=threads,
            )
        except (RuntimeError, ValueError) as error:
            raise _NotCountable from error
        if len(self._decoder) != count:
            raise _NotCountable

    def picture(self, number: int) -> Any:
        if number != self._last:
            try:
                rgb = self._decoder.get_frame_at(number).data.numpy()
            except (RuntimeError, ValueError, IndexError) as error:
                raise VideoError(f"is damaged at frame {number}: {error}", frame=number, detail=self._path) from error
            self._picture = av_library().VideoFrame.from_ndarray(rgb, format="rgb24")
            self._last = number
        return self._picture


def _is_plain(picture: Any) -> bool:
    """Whether torchcodec converts a frame correctly: it mirrors none, and takes deep levels for limited ones."""
    deep = picture.format.components[0].bits > 8
    return not (orientation_of(picture)[1] or (deep and picture.color_range == FULL_RANGE))


def torchcodec_decoder() -> Any:
    """The class VideoDecoder of torchcodec. Raises ConfigError if it cannot be imported."""
    need = "--decoder torchcodec needs torchcodec and FFmpeg's libraries"
    try:
        return optional_module("torchcodec.decoders", need, "torchcodec").VideoDecoder
    except RuntimeError as error:  # of its libraries
        raise ConfigError(f"{need}: {str(error).splitlines()[0]}") from error
