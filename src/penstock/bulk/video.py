"""A video file: its container, the video stream that is read, and its header."""

from __future__ import annotations

import logging
import os
import stat
from types import ModuleType
from typing import Any, Literal

from msgspec import Struct

from penstock.errors import PenstockError
from penstock.plugins import optional_module

_logger = logging.getLogger("penstock.bulk")

Stage = Literal["open", "decode"]

OPEN_OPTIONS = {"protocol_whitelist": "file"}  # a playlist disguised as a video reaches no network
DECODE_OPTIONS = {"max_pixels": str(8192 * 8192)}
STRICT_OPTIONS = {"err_detect": "explode"}  # damage is an error, not guessed pixels
CONCURRENT_BYTES = 128 << 20  # each decoder thread holds two frames: 21 threads at 1920x1080, 5 at 3840x2160
UNTIMED = 0x0200 | 0x0080  # AVFMT_TS_DISCONT, AVFMT_NOTIMESTAMPS: packets have no time to rely on
H264_MAX_REORDER = 15  # frames that FFmpeg's H.264 decoder can hold back
NOT_VIDEOS = {"hls", "dash", "concat", "imf", "tty", "ffmetadata", "webvtt", "srt", "ass"}
STILL_IMAGES = ("image2", "_pipe", "gif_pipe")


class VideoError(PenstockError):
    """A video cannot be opened, or is damaged from `frame` on."""

    code = "video"

    def __init__(self, message: str, *, stage: Stage = "decode", frame: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.stage = stage
        self.frame = frame


class VideoProbe(Struct, frozen=True):
    """What a container's header states: a hint, never a promise. `frames` is 0 if the header has no count."""

    frames: int
    duration_s: float | None
    width: int
    height: int
    codec: str


def av_library() -> ModuleType:
    """PyAV. Raises ConfigError if it is not installed."""
    return optional_module("av", "PyAV is not installed; videos need it", "video")


def probe(path: str) -> VideoProbe:
    """What the header of the video states. Raises VideoError."""
    opened = OpenVideo(path, threads=1)
    try:
        stream = opened.stream
        duration_s = float(stream.duration * stream.time_base) if stream.duration else None
        if duration_s is None and opened.container.duration:
            duration_s = opened.container.duration / 1_000_000
        frames = stream.frames
        if not frames and duration_s and stream.average_rate:
            frames = round(duration_s * stream.average_rate)
        context = stream.codec_context
        return VideoProbe(frames, duration_s, context.width, context.height, context.name)
    finally:
        opened.close()


class OpenVideo:
    """An open container and the one video stream that is read. Raises VideoError, stage "open", if it has none.

    A `tolerant` decoder goes on after damage and marks the frames in which it guesses pixels; otherwise damage is an
    error.
    """

    def __init__(self, path: str, threads: int, *, tolerant: bool = False) -> None:
        av = av_library()
        _require_regular_file(path)
        try:
            # "file:" because a name may look like a protocol or begin with "-"
            self.container = av.open("file:" + path, container_options=dict(OPEN_OPTIONS), metadata_errors="replace")
        except (OSError, ValueError, av.error.FFmpegError) as error:
            raise VideoError(f"cannot be opened as a video: {reason(error)}", stage="open", detail=path) from error
        try:
            self.stream = self._choose_stream(av, path)
            self._configure_decoder(threads, DECODE_OPTIONS if tolerant else DECODE_OPTIONS | STRICT_OPTIONS)
        except BaseException:
            self.container.close()
            raise

    def close(self) -> None:
        """Frees the container and its decoder."""
        self.container.close()

    @property
    def tick_s(self) -> float:
        """The unit of the stream's times."""
        return float(self.stream.time_base or 0)

    def _choose_stream(self, av: ModuleType, path: str) -> Any:
        name = self.container.format.name
        if name in NOT_VIDEOS or name.endswith(STILL_IMAGES):
            raise VideoError(f"is not a video, but {name}", stage="open", detail=path)
        cover = av.stream.Disposition.attached_pic
        videos = [s for s in self.container.streams.video if not s.disposition & cover]
        if not videos:
            kinds = sorted({"cover art" if s.type == "video" else s.type for s in self.container.streams}) or ["none"]
            raise VideoError(f"has no video stream; its streams: {', '.join(kinds)}", stage="open", detail=path)
        best = self.container.streams.best("video")
        stream = best if best in videos else videos[0]
        if stream.codec_context is None:
            raise VideoError("its codec cannot be decoded by this FFmpeg", stage="open", detail=path)
        others = [s.index for s in videos if s is not stream]
        if others:
            _logger.info("event=video_streams path=%r chosen=%d others=%s", path, stream.index, others)
        return stream

    def _configure_decoder(self, threads: int, options: dict[str, str]) -> None:
        context = self.stream.codec_context
        frame_bytes = max(1, context.width * context.height * 3 // 2)
        self.threads = max(1, min(threads, CONCURRENT_BYTES // (2 * frame_bytes)))
        if context.name == "h264":
            # Reorder as the standard allows. FFmpeg's guess can cost a frame, and would differ after a seek.
            options = options | {"strict": "strict"}
            # A deeper reorder buffer changes which frames survive a lost keyframe if packets have no reliable times.
            if self.container.format.flags & UNTIMED:
                self.threads = 1
            # One thread reads whether a frame of another is damaged when it shows that frame, even if the other still
            # decodes it. With this depth, a frame is shown when its thread decodes the next one.
            self.threads = max(1, min(self.threads, H264_MAX_REORDER - context.reorder_depth))
            if self.threads > 1:
                context.reorder_depth += self.threads
        context.thread_count = self.threads
        context.thread_type = "AUTO" if self.threads > 1 else "SLICE"
        context.options = options


def _require_regular_file(path: str) -> None:
    """Raises VideoError for files on which FFmpeg would wait, such as a pipe, or report little."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError) as error:
        raise VideoError(f"cannot be opened: {reason(error)}", stage="open", detail=path) from error
    if not regular:
        raise VideoError("is not a regular file", stage="open", detail=path)


def reason(error: BaseException) -> str:
    """The message of FFmpeg or the system, without the path."""
    strerror = getattr(error, "strerror", None)
    return str(strerror or error)
