"""The packets of an open video as frames: up to the first damage, or all that decode without an error.

LostFrames counts what damage costs while the packets are decoded.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.bulk.video import OpenVideo, av_library, reason

TIMES_MAY_JUMP = 0x0200  # AVFMT_TS_DISCONT: a time does not identify a place in the file
GAP_BYTES = 1024  # between two packets of Matroska: headers take tens of bytes
MISSING_S = 0.5  # of the duration in a Matroska header that may lie behind the last readable packet
MAX_REORDER = 32  # frames: no codec shows more of them before one that was decoded earlier
MAX_READ_ERRORS = 16  # of a damaged container, one after the other
SEGMENT = b"\x18\x53\x80\x67"
NO_FRAME = "a packet shows no frame"
COUNTABLE = ("mov,", "matroska,", "flv", "nut")  # containers that state when each packet is shown
PACKET_A_FRAME = {"h264", "hevc", "av1", "vp9", "mpeg4", "mjpeg", "prores"}  # VP8 and packed MPEG-4 hide some
STREAMS = ("mpegts", "mpeg")  # containers that state it for some packets or all, and leave their division to a parser
CORRUPT_FRAME = "the data of a frame is damaged"
WITHOUT_PTS = ("avi", "asf")  # containers
DEEP_REORDER = ("h264", "hevc")  # codecs whose pts FFmpeg cannot infer there
LEAP_FRAMES = 32  # after a gap in the file: the demuxer may notice it some packets early


class Damage(Exception):
    """The decoder or the container found something that it cannot read."""


def is_countable(container: Any, context: Any) -> bool:
    """Whether each packet of a file states when its one frame is shown."""
    return container.format.name.startswith(COUNTABLE) and context.name in PACKET_A_FRAME


def has_countable_keyframes(video: OpenVideo) -> bool:
    """Whether the packets of a file may show the number of a keyframe. Each must have a pts besides.

    Where a container states no order of presentation, it is the order of packets if the codec reorders no frame.
    """
    name, codec = video.container.format.name, video.stream.codec_context.name
    if name.startswith(STREAMS):
        return codec in PACKET_A_FRAME or codec == "mpeg2video"
    in_order = name in WITHOUT_PTS and codec in ("mpeg4", "mjpeg") and video.reorder_depth == 0
    return in_order or is_countable(video.container, video.stream.codec_context)


class PacketDecoder:
    """Decodes an open video from its current position.

    A single thread reports every damage, and at its packet. A file whose times may jump is possibly cut out of a
    longer recording: it need not begin with a keyframe.
    """

    def __init__(self, video: OpenVideo) -> None:
        self._errors = (Damage, OSError, ValueError, av_library().error.FFmpegError)
        self._container = video.container
        self._stream = video.stream
        self._depth = video.reorder_depth
        self._single_threaded = video.threads == 1
        self._cut = bool(video.container.format.flags & TIMES_MAY_JUMP)
        self._buffer = _ReorderBuffer(video.stream.codec_context)

    @property
    def resorted(self) -> bool:
        """Whether a frame has the pts of another packet: no seek finds it by its pts."""
        return self._buffer.resorted

    def time_of(self, frame: Any) -> int | None:
        """The pts of a frame, or else the dts at which a decoder that holds back no frame too many shows it."""
        late = self._stream.codec_context.reorder_depth > self._depth
        pts: int | None = frame.dts if frame.pts is None and not late else frame.pts
        return pts

    def frames(self) -> Iterator[Any]:
        """Yields frames in presentation order.

        Raises Damage after the frames that precede it and do not depend on damaged data. Several threads report
        damage late and omit the last of these frames.
        """
        self._buffer = buffer = _ReorderBuffer(self._stream.codec_context)
        try:
            for frame in self._decoded(buffer):
                if frame.is_corrupt:
                    buffer.drop_dependents(frame)
                    raise Damage(CORRUPT_FRAME)
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
        packets = self.packets()
        while True:
            counts = True
            try:
                packet, problem = next(packets, (None, ""))
                counts = packet is None or lead_in.is_over(packet) or not self._single_threaded
                if problem:
                    raise Damage(problem)
                frames = context.decode(packet)
            except self._errors as error:
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
        except self._errors:
            return []
        return frames

    def survivors(self) -> Iterator[Survivor]:
        """Yields the frames that a tolerant decoder decodes without an error.

        Frames shown before a damaged one that may be predicted from it are lost too. Raises Damage at the end if frames
        are lost there.
        """
        context = self._stream.codec_context
        self._buffer = buffer = _ReorderBuffer(self._stream.codec_context)
        lead_in = _LeadIn(self._cut)
        lost = LostFrames(self._stream, ordered=not self._cut, countable=is_countable(self._container, context))
        packets = self.packets(MAX_READ_ERRORS)
        packet: Any = ...
        while packet is not None:
            try:
                packet, problem = next(packets, (None, ""))
            except self._errors as error:
                packet, problem = None, reason(error)
            counts = packet is None or lead_in.is_over(packet)
            if counts:
                lost.packet(packet, problem)
            try:
                frames = context.decode(packet)
                if packet is not None:
                    buffer.packet_decoded(packet)
            except self._errors as error:
                frames = []
                if counts:
                    lost.packet_failed(packet, reason(error))
            for frame in frames:
                if not frame.is_corrupt and lost.is_intact(frame):
                    lead_in.frame_shown()
                    yield from map(lost.survivor, buffer.add(frame))
                else:
                    buffer.drop_dependents(frame)
                    buffer.forget(frame)
                    if counts:
                        lost.frame_failed(frame)
        yield from map(lost.survivor, buffer.rest())
        if error_at_end := lost.at_end():
            raise Damage(error_at_end)

    def packets(self, read_errors: int = 0) -> Iterator[tuple[Any, str]]:
        """Packets with data, each with the damage in it or before it, or ""; no packet with damage at the end.

        Goes on after `read_errors` errors of the container in a row, then raises the next one.
        """
        stream = self._stream
        check = self._container.format.name.startswith("matroska") and "alpha_mode" not in stream.metadata
        gaps = _MatroskaGaps(self._container) if check else None
        gap = ""
        packets = self._demuxed(None if check else stream, read_errors)
        if self._container.format.name in WITHOUT_PTS and stream.codec_context.name in DEEP_REORDER:
            packets = _with_pts(packets, self._depth)
        for packet, truncated in _with_truncation(packets, joined=self._cut):
            if gaps is not None:
                gap = gaps.before(packet) or gap
            if packet.size and packet.stream is stream:  # an empty packet in Ogg repeats the frame before it
                yield packet, "a packet is truncated" if truncated else gap
                gap = ""
        if gaps is not None and (gap := gap or gaps.at_end()):
            yield None, gap

    def _demuxed(self, stream: Any, read_errors: int) -> Iterator[Any]:
        """The packets of a stream, None for all. Raises the error that follows `read_errors` others in a row."""
        failed = 0
        while True:
            try:
                for packet in self._container.demux(*([] if stream is None else [stream])):
                    failed = 0
                    yield packet
                return
            except self._errors:
                failed += 1
                if failed > read_errors:
                    raise


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

    Some containers (AVI) and remuxers state no order of presentation: pts increase from packet to packet although the
    frames are shown in another order. The frames that are released together then exchange their times, so that the
    first one shown gets the earliest.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self.resorted = False  # whether any frame has the time of another
        self._last_pts: float = float("-inf")
        self._increasing = True  # pts, from packet to packet
        self._order: dict[int, int] = {}  # pts -> decoding order, of packets that were not shown yet
        self._decoded = 0
        self._last_dts: int | None = None
        self._last_pts_allowed: float = float("inf")
        self._frames: deque[tuple[int, Any]] = deque()

    def packet_decoded(self, packet: Any) -> None:
        self._decoded += 1
        if packet.pts is not None and not packet.is_discard:  # an edit list hides its frame
            self._increasing = self._increasing and packet.pts > self._last_pts
            self._last_pts = packet.pts
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
        late = self._increasing and self._context.reorder_depth > 0  # whether frames may be shown after later ones
        while self._order:
            first = next(iter(self._order))
            if pts is not None and (late or first > pts):
                break
            del self._order[first]  # its time has passed: the packet produced no frame
        if len(self._frames) > MAX_REORDER:  # the packet they wait for produces no frame, and its time never comes
            held = self._frames[0][0]
            self._order = {pts: order for pts, order in self._order.items() if order > held}
        oldest = next(iter(self._order.values()), None)
        yield from self._release(oldest)

    def drop_dependents(self, frame: Any) -> None:
        """Drops the frames decoded after a damaged one, which may be predicted from it."""
        order = self._order.get(frame.pts, 0)
        self._frames = deque(itertools.takewhile(lambda held: held[0] < order, self._frames))

    def forget(self, frame: Any) -> None:
        """No frame waits any longer for a damaged one."""
        self._order.pop(frame.pts, None)

    def rest(self) -> Iterator[Any]:
        yield from self._release(None)

    def _release(self, oldest: int | None) -> list[Any]:
        """The frames that were decoded before packet `oldest`, which was not shown yet."""
        released = []
        while self._frames and (oldest is None or self._frames[0][0] < oldest) and self._is_allowed():
            released.append(self._frames.popleft()[1])
        times = [frame.pts for frame in released]
        if self._increasing and None not in times and (self.resorted or times != sorted(times)):
            self.resorted = True
            later = [
                frame.pts for _, frame in self._frames if frame.pts is not None
            ]  # and some packets that damage keeps from being shown
            for frame, pts in zip(released, sorted([*times, *later, *self._order]), strict=False):
                frame.pts = pts
        return released

    def _is_allowed(self) -> bool:
        pts = self._frames[0][1].pts
        return self._last_pts_allowed == float("inf") or (pts is not None and pts <= self._last_pts_allowed)


def _with_pts(packets: Iterator[Any], depth: int) -> Iterator[Any]:
    """Packets with the pts of a container that states only dts.

    The frame that is shown in the place of a packet appears when a decoder that holds back `depth` frames decodes the
    packet `depth` after it. (FFmpeg guesses a pts from the next packet alone, which misplaces dropped frames.)
    """
    held: deque[Any] = deque()
    last_dts, step = 0, 1
    for packet in packets:
        if packet.size:
            step, last_dts = max(1, packet.dts - last_dts), packet.dts
            held.append(packet)
        if len(held) > depth:
            held[0].pts = last_dts
            yield held.popleft()
    for number, packet in enumerate(held, 1):
        packet.pts = last_dts + number * step
        yield packet


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


class _MatroskaGaps:
    """Finds missing packets of a Matroska file.

    The demuxer silently skips a cluster that it cannot read, and silently ends where the file is truncated.
    """

    def __init__(self, container: Any) -> None:
        self._container = container
        self._end: int | None = None  # of the last packet in the file
        self._shown_s = 0.0

    def before(self, packet: Any) -> str:
        """The damage between the last packet and this one, or "". Called for every packet of the file, in order."""
        gap = 0
        if packet.size and packet.pos is not None and packet.pos >= 0:
            gap = 0 if self._end is None else packet.pos - self._end
            self._end = max(self._end or 0, packet.pos + packet.size)
        if packet.pts is not None:
            end_s = float((packet.pts + (packet.duration or 0)) * packet.time_base)
            self._shown_s = max(self._shown_s, end_s)
        return f"{gap} bytes of the file cannot be read" if gap > GAP_BYTES else ""

    def at_end(self) -> str:
        """The damage after the last packet, or ""."""
        container = self._container
        missing = _segment_end(container.name) - container.size
        if missing > 0:
            return f"the file is truncated: {missing} bytes are missing"
        stated_s = ((container.duration or 0) + (container.start_time or 0)) / 1_000_000
        unread = self._end is not None and container.size - self._end > GAP_BYTES
        missing_s = stated_s - self._shown_s
        return f"its last {missing_s:.1f} seconds cannot be read" if unread and missing_s > MISSING_S else ""


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


# ---- the frames that damage costs


class Survivor(NamedTuple):
    """A frame that decodes without an error; `lost` frames before it do not, because of `error`."""

    picture: Any
    lost: int = 0
    error: str = ""


class LostFrames:
    """Counts the frames that damage costs, by the times of the packets that should have shown them."""

    def __init__(self, stream: Any, *, ordered: bool, countable: bool = False) -> None:
        """In `countable` files, a packet without a frame is a lost frame, even if the decoder reports nothing."""
        self._countable = countable
        rate = stream.average_rate or stream.guessed_rate or 25
        self._step = 1 / (rate * stream.time_base) if stream.time_base else 0  # ticks between two frames
        self._ordered = ordered
        self._due: set[int] = set()  # times of packets without a frame so far
        self._failed: dict[int, str] = {}  # of these times, those that damage concerns
        self._untimed: list[str] = []  # damage at packets and frames without a time
        self._missing: dict[int, str] = {}  # time of the first packet after bytes that cannot be read
        self._missing_end = ""
        self._leaps = 0  # frames before which a leap in time counts as lost frames
        self._last: int | None = None

    def packet(self, packet: Any, problem: str) -> None:
        """A packet is sent to the decoder; None at the end."""
        pts = None if packet is None else packet.pts
        if pts is not None and not packet.is_discard:  # an edit list hides its frame
            self._due.add(pts)
        if pts is not None:
            later = next((error for due, error in self._failed.items() if due > pts), "")
            if later:  # decoded after a frame that is shown later: probably predicted from it
                self._failed[pts] = later
        if not problem:
            return
        if pts is None:
            self._missing_end = problem
            return
        self._missing[pts] = problem
        if packet.is_corrupt:
            self._failed[pts] = problem

    def packet_failed(self, packet: Any, error: str) -> None:
        """The decoder rejects a packet; None at the end."""
        self._fail(None if packet is None else packet.pts, error)

    def frame_failed(self, frame: Any) -> None:
        """The decoder guesses pixels of a frame, or shows it late."""
        self._fail(frame.pts, CORRUPT_FRAME)

    def _fail(self, pts: int | None, error: str) -> None:
        if pts is None:
            self._untimed.append(error)
        else:
            self._failed.setdefault(pts, error)

    def is_intact(self, frame: Any) -> bool:
        """Whether its packet is whole, and it is not shown after a later one."""
        pts = frame.pts
        late = self._ordered and pts is not None and self._last is not None and pts <= self._last
        return pts not in self._failed and not late

    def survivor(self, frame: Any) -> Survivor:
        """An intact frame, with the frames that are lost between the last one and it."""
        pts, last = frame.pts, self._last
        untimed, self._untimed = self._untimed, []
        if pts is None:
            return Survivor(frame, len(untimed), untimed[0] if untimed else "")
        self._last = pts
        self._due.discard(pts)
        passed = {due for due in self._due if due < pts}
        errors = [e for found in (self._failed, self._missing) for due, e in sorted(found.items()) if due <= pts]
        if passed and self._countable:
            errors = errors or [NO_FRAME]
        lost = len(passed) if errors else len(untimed)
        if any(due <= pts for due in self._missing):
            self._leaps = LEAP_FRAMES
            self._error = errors[0]
        if self._leaps and last is not None and self._step:
            lost = max(lost, round((pts - last) / self._step) - 1)
            errors = errors or [self._error]
        self._leaps = max(0, self._leaps - 1)
        self._due -= passed
        self._failed = {due: e for due, e in self._failed.items() if due > pts}
        self._missing = {due: e for due, e in self._missing.items() if due > pts}
        return Survivor(frame, lost, next(iter([*errors, *untimed]), ""))

    def at_end(self) -> str:
        """The damage after the last intact frame, or ""."""
        return next(iter([*self._failed.values(), *self._missing.values(), *self._untimed]), self._missing_end)
