"""A container's video packets as decoded pictures, in order of presentation, up to the first damage."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock.bulk.video import library, reason

UNREAD_BYTES = 1024  # between two packets of Matroska: headers take tens of bytes
UNSHOWN_S = 0.5  # that the header of Matroska promises, behind the last packet that could be read
MOST_HELD = 32  # pictures: no codec shows more of them before one that was decoded earlier
SEGMENT = b"\x18\x53\x80\x67"


class Damage(Exception):
    """The decoder, or the container, found something that it cannot read."""


class Decoder:
    """Decodes the stream of an open container from where it stands. `alone`: by one thread, so that every damage is
    told, and at its packet. `cut`: it may be a part of a longer recording, which need not begin with a keyframe."""

    def __init__(self, container: Any, stream: Any, *, alone: bool, cut: bool) -> None:
        self._av = library()
        self._container = container
        self._stream = stream
        self._alone = alone
        self._cut = cut

    def pictures(self) -> Iterator[Any]:
        """Yields decoded frames as they are shown. Raises Damage, after those that are shown before it and owe nothing
        to what is damaged; several threads tell of it late, and leave out the last of these."""
        held = _Held()
        try:
            for picture in self._decoded(held):
                if picture.is_corrupt:
                    held.spoil(picture)
                    raise Damage("the data of a frame is damaged")
                yield from held.shown(picture)
        except Damage:
            if self._alone:
                yield from held.rest()
            raise
        yield from held.rest()

    def _decoded(self, held: _Held) -> Iterator[Any]:
        """What the decoder makes of the packets, and, after damage, what it still has."""
        context = self._stream.codec_context
        owed = 0
        lead = _Lead(self._cut)
        packets = _marked(self._packets(), joined=self._cut)
        while True:
            counts = True
            try:
                packet, cut_short = next(packets, (None, False))
                counts = packet is None or lead.over(packet) or not self._alone
                if cut_short:
                    raise Damage("a packet is cut short")
                pictures = context.decode(packet)
            except (Damage, OSError, ValueError, self._av.error.FFmpegError) as error:
                if not counts:
                    continue
                if self._alone:
                    held.limit()
                    yield from self._rest()
                raise Damage(reason(error)) from error
            if packet is not None:
                held.sent(packet)
            for picture in pictures:
                if counts or not picture.is_corrupt:
                    lead.shown()
                    yield picture
            owed += bool(packet) - len(pictures)
            if packet is None:
                break
        if owed and not self._alone:
            raise Damage("frames are missing at its end")

    def _rest(self) -> list[Any]:
        try:
            pictures: list[Any] = self._stream.codec_context.decode(None)
        except (OSError, ValueError, self._av.error.FFmpegError):
            return []
        return pictures

    def _packets(self) -> Iterator[Any]:
        """Packets with data. Raises Damage, or an error of FFmpeg."""
        stream = self._stream
        unsaid = self._container.format.name.startswith("matroska") and "alpha_mode" not in stream.metadata
        packets = self._container.demux() if unsaid else self._container.demux(stream)
        for packet in _whole(packets, self._container) if unsaid else packets:
            if packet.size and packet.stream is stream:  # an empty one, in Ogg, shows the frame before it for longer
                yield packet


class _Lead:
    """The packets that cannot be decoded without others that are not there, which is no damage: those before the first
    keyframe of what was cut out of a longer recording, and those after a first keyframe that are shown before it."""

    def __init__(self, cut: bool) -> None:
        self._cut = cut
        self._over = False
        self._key_pts: int | None = None

    def over(self, packet: Any) -> bool:
        """Whether a packet is behind them. Told of every packet in order."""
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

    def shown(self) -> None:
        """Told that a frame came out: who needs no keyframe for it has none to wait for."""
        self._over = self._over or self._key_pts is None


class _Held:
    """Pictures that are held back until all that was decoded before them is shown: they may be drawn from it, and that
    it is damaged is seen only then."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # pts -> place in the order of decoding, of what was not shown yet
        self._sent = 0
        self._last_dts: int | None = None
        self._limit: float = float("inf")
        self._pictures: deque[tuple[int, Any]] = deque()

    def sent(self, packet: Any) -> None:
        """Told of a packet that the decoder took."""
        self._sent += 1
        if packet.pts is not None:
            self._numbers[packet.pts] = self._sent
        if packet.dts is not None:
            self._last_dts = packet.dts

    def limit(self) -> None:
        """Told that a packet is missing: it would have been decoded later than the last one, and shown no sooner than
        decoded. A later picture would be shown after a gap."""
        self._limit = float("-inf") if self._last_dts is None else self._last_dts

    def shown(self, picture: Any) -> Iterator[Any]:
        """The pictures that need not be held any longer, now that the decoder shows this one."""
        pts = picture.pts
        number = 0 if pts is None else self._numbers.pop(pts, 0)
        self._pictures.append((number, picture))
        while self._numbers:
            first = next(iter(self._numbers))
            if pts is not None and first > pts:
                break
            del self._numbers[first]  # a packet that gave no picture: its time is past
        if len(self._pictures) > MOST_HELD:  # what they wait for gives no picture, and its time never comes
            held = self._pictures[0][0]
            self._numbers = {pts: place for pts, place in self._numbers.items() if place > held}
        oldest = next(iter(self._numbers.values()), None)
        while self._pictures and (oldest is None or self._pictures[0][0] < oldest) and self._within():
            yield self._pictures.popleft()[1]

    def spoil(self, picture: Any) -> None:
        """Told of a damaged picture: what was decoded after it may be drawn from it."""
        number = self._numbers.get(picture.pts, 0)
        kept = itertools.takewhile(lambda held: held[0] < number, self._pictures)
        self._pictures = deque(kept)

    def rest(self) -> Iterator[Any]:
        """Those that are held, no later than the limit."""
        while self._pictures and self._within():
            yield self._pictures.popleft()[1]

    def _within(self) -> bool:
        pts = self._pictures[0][1].pts
        return self._limit == float("inf") or (pts is not None and pts <= self._limit)


def _marked(packets: Iterator[Any], *, joined: bool) -> Iterator[tuple[Any, bool]]:
    """Each packet with whether it is cut short.

    Where transport streams were `joined` end to end the counters in them do not go on, as where something was lost,
    and the demuxer marks the last packet but one before the joint. There a recording begins, with a keyframe and with
    times that go on or back: whether anything is missing is left to the decoder. Where times leap ahead, pictures are.
    """
    ahead: deque[Any] = deque()
    while (packet := ahead.popleft() if ahead else next(packets, None)) is not None:
        if packet.is_corrupt and joined:
            ahead.extend(itertools.islice(packets, 2 - len(ahead)))
            keys = [after.is_keyframe and not after.is_corrupt for after in ahead]
            yield packet, keys != [False, True] or _leap(*ahead)
        else:
            yield packet, packet.is_corrupt


def _leap(before: Any, after: Any) -> bool:
    """Whether there is room for a picture between the times of two packets."""
    if before.dts is None or after.dts is None or not before.duration:
        return False
    leap: bool = after.dts - before.dts > 2 * before.duration
    return leap


def _whole(packets: Iterator[Any], container: Any) -> Iterator[Any]:
    """All packets of a Matroska file. Raises Damage where some are left out: where a cluster cannot be read, the
    demuxer goes on at the next, if there is one, and says nothing; nor does it where the file is cut off."""
    end: int | None = None
    shown_s = 0.0
    for packet in packets:
        if packet.size and packet.pos is not None and packet.pos >= 0:
            if end is not None and packet.pos - end > UNREAD_BYTES:
                raise Damage(f"{packet.pos - end} bytes of the file cannot be read")
            end = max(end or 0, packet.pos + packet.size)
        if packet.pts is not None:
            shown_s = max(shown_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        yield packet
    missing = _segment_end(container.name) - container.size
    if missing > 0:
        raise Damage(f"the file is cut off: {missing} bytes are missing")
    promised_s = ((container.duration or 0) + (container.start_time or 0)) / 1_000_000
    if end is not None and container.size - end > UNREAD_BYTES and promised_s - shown_s > UNSHOWN_S:
        raise Damage(f"its last {promised_s - shown_s:.1f} seconds cannot be read")


def _segment_end(name: str) -> int:
    """Where a Matroska file ends by its own account, 0 if it gives none. RFC 9559, 5.1; RFC 8794, 4: the number of
    leading zeros in a size's first byte is that of the bytes behind it, and all ones mean unknown."""
    with open(name.removeprefix("file:"), "rb") as file:
        head = file.read(4096)
    start = head.find(SEGMENT) + len(SEGMENT)
    if start < len(SEGMENT) or start >= len(head) or not head[start]:
        return 0
    length = 9 - head[start].bit_length()
    unknown = (1 << 7 * length) - 1
    size = int.from_bytes(head[start : start + length]) & unknown
    return 0 if size == unknown else start + length + size
