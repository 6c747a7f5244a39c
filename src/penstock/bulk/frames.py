"""The frames of a video file, numbered and timed, in order of presentation, up to its end or to its first damage."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.bulk.types import Position
from penstock.bulk.video import Opened, VideoError, library, reason

TIMES_MAY_JUMP = 0x0200  # AVFMT_TS_DISCONT: a time does not say where in the file its frame is
BACK_S = (0.0, 10.0)  # some containers seek by decoding time and land behind the frame: one more try, further back
UNREAD_BYTES = 1024  # between two packets of Matroska: headers take tens of bytes
UNSHOWN_S = 0.5  # that the header of Matroska promises, behind the last packet that could be read


class Seen(NamedTuple):
    """A decoded frame: its number from 0, its time from the first one, its pts if the container can be asked by it."""

    number: int
    time_s: float
    pts: int | None
    picture: Any


class _Damage(Exception):
    """The decoder, or the container, found something that it cannot read."""


class _Lost(Exception):
    """A seek did not lead to the frame that was meant."""


class Reading:
    """The frames of the video at `path`, or those from a position on, numbered and timed as if read from the start."""

    def __init__(self, path: str, threads: int = 1, start: Position | None = None) -> None:
        self._path = path
        self._threads = threads
        self._start = start
        self.tick_s = 0.0

    def frames(self) -> Generator[Seen, None, None]:
        """Yields each frame, the position's own first. Raises VideoError at the first damage, after every frame that
        is shown before it: where that is depends neither on `threads` nor on the position."""
        start, threads = self._start, self._threads
        done = -1 if start is None else start.frame - 1
        while True:
            try:
                for seen in self._from(start, threads):
                    if seen.number > done:
                        done, start = seen.number, Position(seen.number, seen.pts, 0)
                        yield seen
                return
            except _Damage as damage:
                if threads == 1:
                    shown = "its first frame" if done < 0 else f"frame {done + 1}"
                    message = f"is damaged at {shown}: {damage}; what comes before is kept"
                    raise VideoError(message, frame=done + 1, detail=self._path) from damage
            threads = 1  # several tell of damage late, and not of all: one alone finds where it is

    def _from(self, start: Position | None, threads: int) -> Iterator[Seen]:
        if start is not None and start.pts is not None:
            for back_s in BACK_S:
                try:
                    yield from self._run(threads).sought(start, back_s)
                    return
                except _Lost:
                    continue
        yield from self._run(threads).whole()

    def _run(self, threads: int) -> _Run:
        run = _Run(self._path, threads)
        self.tick_s = run.tick_s
        return run


class _Clock:
    """Times from pts. Where a pts is missing or runs backwards, time goes on by the frame rate, and no later frame
    can be asked for by its pts."""

    def __init__(self, stream: Any, askable: bool) -> None:
        self._unit = stream.time_base or Fraction(1, 25)
        self._step = 1 / (stream.average_rate or stream.guessed_rate or Fraction(25))
        self._askable = askable
        self._zero: int | Fraction | None = None
        self._last: Fraction | None = None

    def start(self, pts: int | None) -> None:
        """Says where time begins: at the pts of the first frame."""
        self._zero = pts

    def tell(self, pts: int | None) -> tuple[float, int | None]:
        """The time of the next frame, and the pts by which it can be asked for."""
        time = None if pts is None or self._zero is None else (pts - self._zero) * self._unit
        if time is None or (self._last is not None and time <= self._last):
            self._askable = False
            time = Fraction(0) if self._last is None else self._last + self._step
            self._zero = None if pts is None else pts - time / self._unit
        self._last = time
        return float(time), pts if self._askable else None


class _Lead:
    """The packets that a recording cut out of a longer one begins with: those before its first keyframe, and those
    after it that are shown before it. That they cannot be decoded is no damage."""

    def __init__(self) -> None:
        self._over = False
        self._key_pts: int | None = None

    def over(self, packet: Any) -> bool:
        """Whether a packet is behind them. Told of every packet in order."""
        if self._over or (not packet.is_keyframe and self._key_pts is None):
            return self._over
        if self._key_pts is None:
            self._key_pts = packet.pts
            self._over = packet.pts is None
            return True
        self._over = packet.pts is None or packet.pts >= self._key_pts
        return self._over

    def shown(self) -> None:
        """Told that a frame came out: who needs no keyframe for it has none to wait for."""
        self._over = self._over or self._key_pts is None


class _Run:
    """One reading of a file by one decoder."""

    def __init__(self, path: str, threads: int) -> None:
        self._av = library()
        self._opened = Opened(path, threads)
        self._alone = threads == 1
        self._container = self._opened.container
        self._stream = self._opened.stream
        self.tick_s = self._opened.tick_s
        self._clock = _Clock(self._stream, not self._container.format.flags & TIMES_MAY_JUMP)

    def whole(self) -> Iterator[Seen]:
        """Every frame. Raises _Damage."""
        try:
            for number, picture in enumerate(self._pictures()):
                if number == 0:
                    self._clock.start(picture.pts)
                yield Seen(number, *self._clock.tell(picture.pts), picture)
        finally:
            self._opened.close()

    def sought(self, position: Position, back_s: float) -> Iterator[Seen]:
        """The frame at a position that has a pts, and those after it. Raises _Lost before the first one, or _Damage."""
        try:
            first, others = self._seek(position, back_s)
            for number, picture in enumerate(itertools.chain([first], others), position.frame):
                yield Seen(number, *self._clock.tell(picture.pts), picture)
        finally:
            self._opened.close()

    def _seek(self, position: Position, back_s: float) -> tuple[Any, Iterator[Any]]:
        assert position.pts is not None
        try:
            self._clock.start(next(self._pictures()).pts)
            target = position.pts - round(back_s / self._stream.time_base)
            self._container.seek(target, stream=self._stream)
            pictures = self._pictures()
            for picture in pictures:
                if picture.pts is None or picture.pts > position.pts:
                    raise _Lost
                if picture.pts == position.pts:
                    return picture, pictures
        except (_Damage, StopIteration, self._av.error.FFmpegError) as error:
            raise _Lost from error
        raise _Lost

    def _pictures(self) -> Iterator[Any]:
        """Decoded frames as they are shown. Raises _Damage, after those that are shown before it."""
        context = self._stream.codec_context
        owed = 0
        last_dts: int | None = None
        lead = _Lead()
        packets = self._packets()
        while True:
            counts = True
            try:
                packet = next(packets, None)
                counts = packet is None or lead.over(packet)
                if packet is not None and packet.is_corrupt:
                    raise _Damage("a packet is cut short")
                pictures = context.decode(packet)
            except (_Damage, OSError, ValueError, self._av.error.FFmpegError) as error:
                if not counts:
                    continue
                yield from self._rest(last_dts)
                raise _Damage(reason(error)) from error
            for picture in pictures:
                if not picture.is_corrupt:
                    lead.shown()
                    yield picture
                elif counts:
                    raise _Damage("the data of a frame is damaged")
            owed -= len(pictures)
            if packet is None:
                break
            owed += 1
            last_dts = packet.dts if packet.dts is not None else last_dts
        if owed and not self._alone:
            raise _Damage("frames are missing at its end")

    def _packets(self) -> Iterator[Any]:
        """Packets with data. Raises _Damage, or an error of FFmpeg."""
        stream = self._stream
        unsaid = self._container.format.name.startswith("matroska") and "alpha_mode" not in stream.metadata
        packets = self._container.demux() if unsaid else self._container.demux(stream)
        for packet in _whole(packets, self._container) if unsaid else packets:
            if packet.size and packet.stream is stream:  # an empty one, in Ogg, shows the frame before it for longer
                yield packet

    def _rest(self, last_dts: int | None) -> Iterator[Any]:
        """What the decoder still holds, up to the first frame that may be shown after one that is missing.

        A packet that was not decoded is of a later decoding time than `last_dts`, and is shown no sooner than decoded.
        """
        if last_dts is None or not self._alone:
            return
        try:
            pictures = self._stream.codec_context.decode(None)
        except (OSError, ValueError, self._av.error.FFmpegError):
            return
        for picture in pictures:
            if picture.pts is None or picture.pts > last_dts or picture.is_corrupt:
                return
            yield picture


def _whole(packets: Iterator[Any], container: Any) -> Iterator[Any]:
    """All packets of a Matroska file. Raises _Damage where some are left out: where a cluster cannot be read, the
    demuxer goes on at the next, if there is one, and says nothing."""
    end: int | None = None
    shown_s = 0.0
    for packet in packets:
        if packet.size and packet.pos is not None and packet.pos >= 0:
            if end is not None and packet.pos - end > UNREAD_BYTES:
                raise _Damage(f"{packet.pos - end} bytes of the file cannot be read")
            end = max(end or 0, packet.pos + packet.size)
        if packet.pts is not None:
            shown_s = max(shown_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        yield packet
    duration_s = (container.duration or 0) / 1_000_000 + (container.start_time or 0) / 1_000_000
    if end is not None and container.size - end > UNREAD_BYTES and duration_s - shown_s > UNSHOWN_S:
        raise _Damage(f"its last {duration_s - shown_s:.1f} seconds cannot be read")
