"""What became of a job: the list of failed videos for programs, and the sums for people."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from penstock.bulk import spool
from penstock.bulk.outputs import OutputError, whole
from penstock.bulk.progress import duration
from penstock.bulk.types import Video
from penstock.errors import PenstockError

DONE: Final = 0
USAGE: Final = 2
INCOMPLETE: Final = 3  # some videos failed, or the job had to stop
INTERRUPTED: Final = 130  # as a shell tells of a program that Ctrl-C ended


class Failure(Struct, frozen=True):
    """A line of failures.jsonl. `captions` before the damage are kept, and are in the outputs."""

    path: str
    stage: str
    frame: int | None
    error: str
    attempts: int
    captions: int


class Summary(Struct):
    """Sums over all videos of the job; `new_frames`, `seconds` and `sent_bytes` are of this run."""

    videos: int = 0
    complete: int = 0
    failed: int = 0
    partial: int = 0  # of those that failed: with captions before the damage
    frames: int = 0
    new_frames: int = 0
    retries: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    stopped: PenstockError | None = None
    outputs: tuple[str, ...] = ()
    failures: str | None = None

    @property
    def unfinished(self) -> int:
        """Videos that a later run goes on with."""
        return self.videos - self.complete - self.failed

    @property
    def exit_code(self) -> int:
        """What the command ends with."""
        if self.interrupted:
            return INTERRUPTED
        return INCOMPLETE if self.stopped is not None or self.failed or self.unfinished else DONE

    def fields(self) -> dict[str, Any]:
        """For programs."""
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "stopped"}
        stopped = None if self.stopped is None else self.stopped.message
        return own | {"unfinished": self.unfinished, "stopped": stopped, "exit_code": self.exit_code}

    def lines(self) -> list[str]:
        """For people."""
        rate = f"{self.new_frames / self.seconds:,.1f} frames/s, " if self.seconds > 0 else ""
        said = [
            f"{self.complete:,} of {self.videos:,} videos complete, {self.frames:,} captions; this run: "
            f"{self.new_frames:,} in {duration(self.seconds)}, {rate}{self.sent_bytes / 1e6:,.1f} MB sent, "
            f"{self.retries} retries"
        ]
        if self.failed:
            partly = f", {self.partial:,} of them after some captions, which are kept" if self.partial else ""
            said.append(f"{self.failed:,} failed{partly}: see {self.failures}; --retry-failed tries them again")
        if self.outputs:
            said.append(f"written: {', '.join(self.outputs)}")
        if self.stopped is not None:
            said.append(f"stopped: {self.stopped.message}")
        if self.unfinished:
            said.append(f"{self.unfinished:,} videos are not finished: the same command goes on where this one ended")
        return said


def count(summary: Summary, spools: Iterable[tuple[Video, Path]]) -> None:
    """Adds what is on disk to the sums."""
    for video, file in spools:
        summary.videos += 1
        found = spool.glance(file) or spool.scan(file)
        if found is None or not found.is_of(video):
            continue
        summary.frames += found.rows
        if found.end is not None:
            summary.complete += found.end.end == "complete"
            summary.failed += found.end.end == "failed"
            summary.partial += found.end.end == "failed" and found.rows > 0


def write_failures(path: Path, spools: Iterable[tuple[Video, Path]]) -> bool:
    """Writes the failed videos among these, in their order; whether there are any. Without any no file is left.

    Raises OutputError, SpoolError.
    """
    failures = []
    for video, file in spools:
        found = spool.glance(file)
        if found is not None and found.end is not None and found.end.end == "failed" and found.is_of(video):
            end = found.end
            failures.append(Failure(video.name, end.stage, end.frame, end.error, end.attempts, end.rows))
    try:
        if not failures:
            path.unlink(missing_ok=True)
            return False
        with whole(path) as out:
            out.writelines(msgspec.json.encode(failure) + b"\n" for failure in failures)
    except OSError as e:
        raise OutputError(f"cannot write {path}: {e.strerror}") from e
    return True
