"""A video file: opened, its one video stream chosen, its header asked."""

from __future__ import annotations

import importlib
import logging
import os
import stat
from types import ModuleType
from typing import Any, Literal

from msgspec import Struct

from penstock.errors import ConfigError, PenstockError

log = logging.getLogger("penstock.bulk")

Stage = Literal["open", "decode"]

OPEN_OPTIONS = {"protocol_whitelist": "file"}  # a playlist in a video's clothes reaches no network
DECODE_OPTIONS = {"err_detect": "explode", "max_pixels": str(8192 * 8192)}  # damage is an error, not a guess at pixels
AT_ONCE_BYTES = 64 << 20  # each thread of a decoder works on a frame of its own: 21 of 1920x1080, 5 of 3840x2160
NO_VIDEOS = {"hls", "dash", "concat", "imf", "tty", "ffmetadata", "webvtt", "srt", "ass"}
STILLS = ("image2", "_pipe", "gif_pipe")


class VideoError(PenstockError):
    """A video cannot be opened, or is damaged from `frame` on."""

    code = "video"

    def __init__(self, message: str, *, stage: Stage = "decode", frame: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.stage = stage
        self.frame = frame


class Probe(Struct, frozen=True):
    """What a container's header says: a hint, never a promise. `frames` is 0 where nothing says how many."""

    frames: int
    duration_s: float | None
    width: int
    height: int
    codec: str


def library() -> ModuleType:
    """PyAV, or ConfigError where it is not installed."""
    try:
        return importlib.import_module("av")
    except ImportError as error:
        raise ConfigError("PyAV is not installed; videos need it: pip install 'penstock[video]'") from error


def probe(path: str) -> Probe:
    """What the header of the video at `path` says. Raises VideoError."""
    opened = Opened(path, threads=1)
    try:
        stream = opened.stream
        duration_s = float(stream.duration * stream.time_base) if stream.duration else None
        if duration_s is None and opened.container.duration:
            duration_s = opened.container.duration / 1_000_000
        frames = stream.frames
        if not frames and duration_s and stream.average_rate:
            frames = round(duration_s * stream.average_rate)
        context = stream.codec_context
        return Probe(frames, duration_s, context.width, context.height, context.name)
    finally:
        opened.close()


class Opened:
    """A container and the one video stream of it that is read. Raises VideoError, stage "open", for what has none."""

    def __init__(self, path: str, threads: int) -> None:
        av = library()
        _check(path)
        try:
            # "file:" because a name may look like a protocol's, or begin with "-"
            self.container = av.open("file:" + path, container_options=dict(OPEN_OPTIONS), metadata_errors="replace")
        except (OSError, ValueError, av.error.FFmpegError) as error:
            raise VideoError(f"cannot be opened as a video: {reason(error)}", stage="open", detail=path) from error
        try:
            self.stream = self._choose(av, path)
            self._set_up(threads)
        except BaseException:
            self.container.close()
            raise

    def close(self) -> None:
        """Frees the container and its decoder."""
        self.container.close()

    @property
    def tick_s(self) -> float:
        """The unit of its times."""
        return float(self.stream.time_base or 0)

    def _choose(self, av: ModuleType, path: str) -> Any:
        name = self.container.format.name
        if name in NO_VIDEOS or name.endswith(STILLS):
            raise VideoError(f"is no video, but {name}", stage="open", detail=path)
        stream = self.container.streams.best("video")
        if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
            kinds = sorted({s.type for s in self.container.streams}) or ["none"]
            raise VideoError(f"has no video stream; its streams: {', '.join(kinds)}", stage="open", detail=path)
        if stream.codec_context is None:
            raise VideoError("its video is of a codec that this FFmpeg cannot decode", stage="open", detail=path)
        others = [s.index for s in self.container.streams.video if s is not stream]
        if others:
            log.info("event=video_streams path=%r chosen=%d others=%s", path, stream.index, others)
        return stream

    def _set_up(self, threads: int) -> None:
        context = self.stream.codec_context
        frame_bytes = max(1, context.width * context.height * 3 // 2)
        self.threads = max(1, min(threads, AT_ONCE_BYTES // frame_bytes))
        context.thread_count = self.threads
        context.thread_type = "AUTO" if self.threads > 1 else "SLICE"
        context.options = dict(DECODE_OPTIONS)
        if context.name == "h264":
            # the reordering that the standard allows, not one guessed and, on a wrong guess, paid for with a frame:
            # the guess would fall differently after a seek
            context.options = {**DECODE_OPTIONS, "strict": "strict"}


def _check(path: str) -> None:
    """Raises VideoError for what FFmpeg would wait for, as a pipe that nobody writes to, or tell little of."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError) as error:
        raise VideoError(f"cannot be opened: {reason(error)}", stage="open", detail=path) from error
    if not regular:
        raise VideoError("is no regular file", stage="open", detail=path)


def reason(error: BaseException) -> str:
    """What FFmpeg or the system says, without the path."""
    strerror = getattr(error, "strerror", None)
    return str(strerror or error)
