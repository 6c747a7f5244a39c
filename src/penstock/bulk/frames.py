"""The frames of a video file, numbered and timed, in order of presentation, up to its end or to its first damage."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from penstock.bulk.pictures import Damage, Decoder
from penstock.bulk.types import Position
from penstock.bulk.video import Opened, VideoError, library

TIMES_MAY_JUMP = 0x0200  # AVFMT_TS_DISCONT: a time does not say where in the file its frame is
ASKED_IN_VAIN = {("mxf", "ffv1")}  # a seek leads to frames that cannot be decoded alone, and nothing tells
BACK_S = (0.0, 10.0)  # some containers seek by decoding time and land behind the frame: one more try, further back


class Seen(NamedTuple):
    """A decoded frame: its number from 0, its time from the first one, its pts if the container can be asked by it."""

    number: int
    time_s: float
    pts: int | None
    picture: Any


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
            except Damage as damage:
                if threads == 1:
                    place, kept = f"frame {done + 1}", "; what comes before is kept"
                    if done < 0:
                        place, kept = "its first frame", ""
                    message = f"is damaged at {place}: {damage}{kept}"
                    raise VideoError(message, frame=done + 1, detail=self._path) from damage
            threads = 1  # several tell of damage late, and not of all: one alone finds where it is

    def _from(self, start: Position | None, threads: int) -> Iterator[Seen]:
        if start is not None and start.pts is not None:
            # only one thread tells of damage whether it is of what a seek left out
            for by, back_s in itertools.product(sorted({threads, 1}, reverse=True), BACK_S):
                try:
                    yield from self._run(by).sought(start, back_s)
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


class _Run:
    """One reading of a file by one decoder."""

    def __init__(self, path: str, threads: int) -> None:
        self._av = library()
        self._opened = Opened(path, threads)
        self._container = self._opened.container
        self._stream = self._opened.stream
        self.tick_s = self._opened.tick_s
        jumps = bool(self._container.format.flags & TIMES_MAY_JUMP)
        self._decoder = Decoder(self._container, self._stream, alone=self._opened.threads == 1, cut=jumps)
        kind = self._container.format.name, self._stream.codec_context.name
        self._clock = _Clock(self._stream, askable=not jumps and kind not in ASKED_IN_VAIN)

    def whole(self) -> Iterator[Seen]:
        """Every frame. Raises Damage."""
        try:
            for number, picture in enumerate(self._decoder.pictures()):
                if number == 0:
                    self._clock.start(picture.pts)
                yield Seen(number, *self._clock.tell(picture.pts), picture)
        finally:
            self._opened.close()

    def sought(self, position: Position, back_s: float) -> Iterator[Seen]:
        """The frame at a position that has a pts, and those after it. Raises _Lost before the first one, or Damage."""
        try:
            first, others = self._seek(position, back_s)
            for number, picture in enumerate(itertools.chain([first], others), position.frame):
                yield Seen(number, *self._clock.tell(picture.pts), picture)
        finally:
            self._opened.close()

    def _seek(self, position: Position, back_s: float) -> tuple[Any, Iterator[Any]]:
        assert position.pts is not None
        try:
            self._clock.start(next(self._decoder.pictures()).pts)
            target = position.pts - round(back_s / self._stream.time_base)
            self._container.seek(target, stream=self._stream)
            pictures = self._decoder.pictures()
            for picture in pictures:
                if picture.pts is None or picture.pts > position.pts:
                    raise _Lost
                if picture.pts == position.pts:
                    return picture, pictures
        except (Damage, StopIteration, self._av.error.FFmpegError) as error:
            raise _Lost from error
        raise _Lost
