"""Which frames of a video are captioned: decided frame by frame, in order of presentation, from number and time."""

from __future__ import annotations

import math
from typing import Literal

from penstock.bulk.types import Sampling

Verdict = Literal["take", "skip", "over"]

ROUNDING_S = 1e-6  # times are floats of exact fractions: far above their error, far below any frame's duration


class Sampler:
    """Takes, of the frames from `start_s` to before `end_s`, those that `every` or `fps` choose, up to `max_frames`.

    `every` counts frames from the video's first one, so that a sample's number is a multiple of it. `fps` takes the
    first frame at or after each multiple of 1/fps of a second, and none twice: at most as many as there are frames.
    `tick_s` is the unit of the container's times: a time may be rounded by half of it.
    """

    def __init__(self, sampling: Sampling, tick_s: float = 0.0) -> None:
        self.sampling = sampling
        self.taken = 0
        self._slack_s = max(ROUNDING_S, tick_s / 2 * 1.01)
        self._next = 0  # the first multiple of 1/fps that no frame stands for yet

    @property
    def full(self) -> bool:
        """Whether no later frame is taken."""
        return self.sampling.max_frames is not None and self.taken >= self.sampling.max_frames

    def tell(self, frame: int, time_s: float) -> Verdict:
        """What becomes of the next frame: its number from 0, its time from the first one. "over": it and all after."""
        s = self.sampling
        if self.full or (s.end_s is not None and time_s >= s.end_s - ROUNDING_S):
            return "over"
        if time_s < s.start_s - ROUNDING_S:
            return "skip"
        if frame % s.every if s.fps is None else self._point(time_s) < self._next:
            return "skip"
        self.resume(time_s, self.taken + 1)
        return "take"

    def resume(self, time_s: float, taken: int) -> None:
        """Stands where it stood after the `taken`-th sample, which was at `time_s`."""
        self.taken = taken
        if self.sampling.fps is not None:
            self._next = self._point(time_s) + 1

    def _point(self, time_s: float) -> int:
        """The last multiple of 1/fps that a frame at this time is at or after."""
        assert self.sampling.fps is not None
        return math.floor((time_s + self._slack_s) * self.sampling.fps)


def estimate(sampling: Sampling, frames: int, duration_s: float | None) -> int:
    """About how many frames of such a video are captioned; `duration_s` None means unknown, as `frames` 0 does."""
    if sampling.max_frames == 0:
        return 0
    share = 1.0
    if duration_s:
        end_s = duration_s if sampling.end_s is None else min(duration_s, sampling.end_s)
        share = max(0.0, end_s - sampling.start_s) / duration_s
    count = math.ceil(frames * share - ROUNDING_S)
    if sampling.fps is not None and duration_s:
        count = min(count, math.ceil(duration_s * share * sampling.fps - ROUNDING_S))
    else:
        count = -(-count // sampling.every)
    return count if sampling.max_frames is None else min(count, sampling.max_frames)
