"""A video file: its container, its video stream, its header, and its packets decoded up to the first damage."""

from __future__ import annotations

import itertools
import logging
import os
import stat
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal

from msgspec import Struct

from penstock.errors import PenstockError
from penstock.plugins import optional_module

_logger = logging.getLogger("penstock.bulk")

Stage = Literal["open", "decode"]

OPEN_OPTIONS = {"protocol_whitelist": "file"}  # a playlist disguised as a video reaches no network
DECODE_OPTIONS = {"err_detect": "explode", "max_pixels": str(8192 * 8192)}  # damage is an error, not guessed pixels
CONCURRENT_BYTES = 64 << 20  # each decoder thread holds one frame: 21 of 1920x1080, 5 of 3840x2160
NOT_VIDEOS = {"hls", "dash", "concat", "imf", "tty", "ffmetadata", "webvtt", "srt", "ass"}
STILL_IMAGES = ("image2", "_pipe", "gif_pipe")
GAP_BYTES = 1024  # between two packets of Matroska: headers take tens of bytes
MISSING_S = 0.5  # of the duration in a Matroska header that may lie behind the last readable packet
MAX_REORDER = 32  # frames: no codec shows more of them before one that was decoded earlier
SEGMENT = b"\x18\x53\x80\x67"


class VideoError(PenstockError):
    """A video cannot be opened, or is damaged from `frame` on."""

    code = "video"

    def __init__(self, message: str, *, stage: Stage = "decode", frame: int | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.stage = stage
        self.frame = frame


class Damage(Exception):
    """The decoder or the container found something that it cannot read."""


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
    """An open container and the one video stream that is read. Raises VideoError, stage "open", if it has none."""

    def __init__(self, path: str, threads: int) -> None:
        av = av_library()
        _require_regular_file(path)
        try:
            # "file:" because a name may look like a protocol or begin with "-"
            self.container = av.open("file:" + path, container_options=dict(OPEN_OPTIONS), metadata_errors="replace")
        except (OSError, ValueError, av.error.FFmpegError) as error:
            raise VideoError(f"cannot be opened as a video: {reason(error)}", stage="open", detail=path) from error
        try:
            self.stream = self._choose_stream(av, path)
            self._configure_decoder(threads)
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
        stream = self.container.streams.best("video")
        if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
            kinds = sorted({s.type for s in self.container.streams}) or ["none"]
            raise VideoError(f"has no video stream; its streams: {', '.join(kinds)}", stage="open", detail=path)
        if stream.codec_context is None:
            raise VideoError("its codec cannot be decoded by this FFmpeg", stage="open", detail=path)
        others = [s.index for s in self.container.streams.video if s is not stream]
        if others:
            _logger.info("event=video_streams path=%r chosen=%d others=%s", path, stream.index, others)
        return stream

    def _configure_decoder(self, threads: int) -> None:
        context = self.stream.codec_context
        frame_bytes = max(1, context.width * context.height * 3 // 2)
        self.threads = max(1, min(threads, CONCURRENT_BYTES // frame_bytes))
        context.thread_count = self.threads
        context.thread_type = "AUTO" if self.threads > 1 else "SLICE"
        context.options = dict(DECODE_OPTIONS)
        if context.name == "h264":
            # Reorder as the standard allows. FFmpeg's guess can cost a frame, and would differ after a seek.
            context.options = {**DECODE_OPTIONS, "strict": "strict"}


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


# ---- packets to frames


class PacketDecoder:
    """Decodes an open container from its current position.

    `single_threaded` decoding reports every damage, and at its packet. A file that may be `cut` out of a longer
    recording need not begin with a keyframe.
    """

    def __init__(self, container: Any, stream: Any, *, single_threaded: bool, cut: bool) -> None:
        self._av = av_library()
        self._container = container
        self._stream = stream
        self._single_threaded = single_threaded
        self._cut = cut

    def frames(self) -> Iterator[Any]:
        """Yields frames in presentation order.

        Raises Damage after the frames that precede it and do not depend on damaged data. Several threads report
        damage late and omit the last of these frames.
        """
        buffer = _ReorderBuffer()
        try:
            for frame in self._decoded(buffer):
                if frame.is_corrupt:
                    buffer.drop_dependents(frame)
                    raise Damage("the data of a frame is damaged")
                yield from buffer.add(frame)
        except Damage:
            if self._single_threaded:
                yield from buffer.rest()
            raise
        yield from buffer.rest()

    def _decoded(self, buffer: _ReorderBuffer) -> Iterator[Any]:
        """Frames in the order of the decoder; after damage, the frames that it still holds."""
        context = self._stream.codec_context
        pending = 0
        lead_in = _LeadIn(self._cut)
        packets = _with_truncation(self._packets(), joined=self._cut)
        while True:
            counts = True
            try:
                packet, truncated = next(packets, (None, False))
                counts = packet is None or lead_in.is_over(packet) or not self._single_threaded
                if truncated:
                    raise Damage("a packet is truncated")
                frames = context.decode(packet)
            except (Damage, OSError, ValueError, self._av.error.FFmpegError) as error:
                if not counts:
                    continue
                if self._single_threaded:
                    buffer.limit_to_decoded()
                    yield from self._flush()
                raise Damage(reason(error)) from error
            if packet is not None:
                buffer.packet_decoded(packet)
            for frame in frames:
                if counts or not frame.is_corrupt:
                    lead_in.frame_shown()
                    yield frame
            pending += bool(packet) - len(frames)
            if packet is None:
                break
        if pending and not self._single_threaded:
            raise Damage("frames are missing at its end")

    def _flush(self) -> list[Any]:
        try:
            frames: list[Any] = self._stream.codec_context.decode(None)
        except (OSError, ValueError, self._av.error.FFmpegError):
            return []
        return frames

    def _packets(self) -> Iterator[Any]:
        """Packets with data. Raises Damage, or an error of FFmpeg."""
        stream = self._stream
        check = self._container.format.name.startswith("matroska") and "alpha_mode" not in stream.metadata
        packets = self._container.demux() if check else self._container.demux(stream)
        for packet in _checked_matroska(packets, self._container) if check else packets:
            if packet.size and packet.stream is stream:  # an empty packet in Ogg repeats the frame before it
                yield packet


class _LeadIn:
    """The first packets, which may depend on others that are absent without any damage.

    These are the packets before the first keyframe of a file that was cut out of a longer recording, and those after
    the first keyframe that are shown before it.
    """

    def __init__(self, cut: bool) -> None:
        self._cut = cut
        self._over = False
        self._key_pts: int | None = None

    def is_over(self, packet: Any) -> bool:
        """Whether a packet comes after the lead-in. Called for every packet, in order."""
        if self._over:
            return True
        if self._key_pts is None and not packet.is_keyframe:
            self._over = not self._cut
            return self._over
        if self._key_pts is None:
            self._key_pts = packet.pts
            self._over = packet.pts is None
            return True
        self._over = packet.pts is None or packet.pts >= self._key_pts
        return self._over

    def frame_shown(self) -> None:
        """A frame without a keyframe before it: the codec needs none."""
        self._over = self._over or self._key_pts is None


class _ReorderBuffer:
    """Holds frames back until every frame decoded before them is shown.

    They may be predicted from such a frame, and only showing it reveals that it is damaged.
    """

    def __init__(self) -> None:
        self._order: dict[int, int] = {}  # pts -> decoding order, of packets that were not shown yet
        self._decoded = 0
        self._last_dts: int | None = None
        self._last_pts_allowed: float = float("inf")
        self._frames: deque[tuple[int, Any]] = deque()

    def packet_decoded(self, packet: Any) -> None:
        self._decoded += 1
        if packet.pts is not None:
            self._order[packet.pts] = self._decoded
        if packet.dts is not None:
            self._last_dts = packet.dts

    def limit_to_decoded(self) -> None:
        """Withholds frames after a missing packet, which would have been shown no sooner than it was decoded."""
        self._last_pts_allowed = float("-inf") if self._last_dts is None else self._last_dts

    def add(self, frame: Any) -> Iterator[Any]:
        """The frames that need not be held any longer now that the decoder shows this one."""
        pts = frame.pts
        order = 0 if pts is None else self._order.pop(pts, 0)
        self._frames.append((order, frame))
        while self._order:
            first = next(iter(self._order))
            if pts is not None and first > pts:
                break
            del self._order[first]  # its time has passed: the packet produced no frame
        if len(self._frames) > MAX_REORDER:  # the packet they wait for produces no frame, and its time never comes
            held = self._frames[0][0]
            self._order = {pts: order for pts, order in self._order.items() if order > held}
        oldest = next(iter(self._order.values()), None)
        while self._frames and (oldest is None or self._frames[0][0] < oldest) and self._is_allowed():
            yield self._frames.popleft()[1]

    def drop_dependents(self, frame: Any) -> None:
        """Drops the frames decoded after a damaged one, which may be predicted from it."""
        order = self._order.get(frame.pts, 0)
        self._frames = deque(itertools.takewhile(lambda held: held[0] < order, self._frames))

    def rest(self) -> Iterator[Any]:
        while self._frames and self._is_allowed():
            yield self._frames.popleft()[1]

    def _is_allowed(self) -> bool:
        pts = self._frames[0][1].pts
        return self._last_pts_allowed == float("inf") or (pts is not None and pts <= self._last_pts_allowed)


def _with_truncation(packets: Iterator[Any], *, joined: bool) -> Iterator[tuple[Any, bool]]:
    """Each packet with whether it is truncated.

    Where transport streams were `joined` end to end, their continuity counters jump as they do after a loss, and the
    demuxer marks the last packet but one before the joint. There a recording begins with a keyframe, and its times
    continue or go back: the decoder finds out whether anything is missing. If the times leap ahead, frames are missing.
    """
    ahead: deque[Any] = deque()
    while (packet := ahead.popleft() if ahead else next(packets, None)) is not None:
        if packet.is_corrupt and joined:
            ahead.extend(itertools.islice(packets, 2 - len(ahead)))
            keys = [after.is_keyframe and not after.is_corrupt for after in ahead]
            yield packet, keys != [False, True] or _leaps(*ahead)
        else:
            yield packet, packet.is_corrupt


def _leaps(before: Any, after: Any) -> bool:
    """Whether there is room for a frame between the times of two packets."""
    if before.dts is None or after.dts is None or not before.duration:
        return False
    leaps: bool = after.dts - before.dts > 2 * before.duration
    return leaps


def _checked_matroska(packets: Iterator[Any], container: Any) -> Iterator[Any]:
    """All packets of a Matroska file. Raises Damage if some are missing.

    The demuxer silently skips a cluster that it cannot read, and silently ends where the file is truncated.
    """
    end: int | None = None
    shown_s = 0.0
    for packet in packets:
        if packet.size and packet.pos is not None and packet.pos >= 0:
            if end is not None and packet.pos - end > GAP_BYTES:
                raise Damage(f"{packet.pos - end} bytes of the file cannot be read")
            end = max(end or 0, packet.pos + packet.size)
        if packet.pts is not None:
            shown_s = max(shown_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        yield packet
    missing = _segment_end(container.name) - container.size
    if missing > 0:
        raise Damage(f"the file is truncated: {missing} bytes are missing")
    stated_s = ((container.duration or 0) + (container.start_time or 0)) / 1_000_000
    if end is not None and container.size - end > GAP_BYTES and stated_s - shown_s > MISSING_S:
        raise Damage(f"its last {stated_s - shown_s:.1f} seconds cannot be read")


def _segment_end(name: str) -> int:
    """The end of a Matroska file according to its header, or 0 if the header states none.

    RFC 9559, 5.1 and RFC 8794, 4: the leading zeros of a size's first byte count the bytes that follow it, and all
    ones mean unknown.
    """
    with open(name.removeprefix("file:"), "rb") as file:
        head = file.read(4096)
    start = head.find(SEGMENT) + len(SEGMENT)
    if start < len(SEGMENT) or start >= len(head) or not head[start]:
        return 0
    length = 9 - head[start].bit_length()
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(head[start : start + length]) & unknown
    return 0 if size == unknown else start + length + size
