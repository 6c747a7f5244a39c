"""The frames of a damaged video that are lost: counted while its packets are decoded, listed as gaps."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.bulk.types import Gap

CORRUPT_FRAME = "the data of a frame is damaged"
LEAP_FRAMES = 32  # after a gap in the file: the demuxer may notice it some packets early


class Survivor(NamedTuple):
    """A frame that decodes without an error; `lost` frames before it do not, because of `error`."""

    picture: Any
    lost: int = 0
    error: str = ""


class LostFrames:
    """Counts the frames that damage costs, by the times of the packets that should have shown them."""

    def __init__(self, stream: Any, *, ordered: bool) -> None:
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
        if pts is not None:
            self._due.add(pts)
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
