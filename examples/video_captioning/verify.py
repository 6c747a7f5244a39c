"""Checks captions of the videos of `make_videos.py`: `python verify.py captions.jsonl`.

By the column `frame`, every frame from the first to the last must have one row, in order; this reveals lost, repeated
and moved frames. The number in a caption proves that the row holds the caption of its frame: at least 99.5 % of the
numbers must be the frame's, modulo 1000. The captioner may misread a picture occasionally, but not three neighbours:
rows shifted by one would be wrong in a run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scenes import NUMBERS, number_of

LEAST_RIGHT = 0.995
LONGEST_RUN = 2


@dataclass
class Report:
    """The result of a check; `faults` is empty if the captions are complete and in order."""

    frames: int = 0
    numbers: int = 0
    whole: int | None = None
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.frames} frames in order, {self.numbers} numbers read right ({self.numbers / self.frames:.2%})"
        if self.whole is not None:
            text += f", {self.whole} whole captions right ({self.whole / self.frames:.2%})"
        return text


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def verify(rows: Iterable[Mapping[str, Any]], truth: Mapping[str, Sequence[str]] | None = None) -> Report:
    """Counts and faults of `rows`; `truth` maps the file name of each video to its captions, if known.

    Without it the number of frames is unknown, and missing rows at the end of a video go unnoticed.
    """
    videos: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    report = Report(whole=None if truth is None else 0)
    before = None
    for row in rows:
        if row["video"] != before and row["video"] in videos:
            report.faults.append(f"{row['video']}: its rows are not adjacent")
        before = row["video"]
        videos[before].append(row)
    for name, own in videos.items():
        _verify_video(name, own, report)
    if truth is not None:
        _compare(videos, truth, report)
    if report.frames == 0:
        report.faults.append("there are no captions")
    elif report.numbers < LEAST_RIGHT * report.frames:
        report.faults.append(f"{report.numbers} of {report.frames} numbers are right, fewer than {LEAST_RIGHT:.1%}")
    return report


def _verify_video(name: str, rows: list[Mapping[str, Any]], report: Report) -> None:
    run = longest = ended = 0
    for index, row in enumerate(rows):
        if row["frame"] != index:
            report.faults.append(f"{name}: row {index} has frame {row['frame']}, expected frame {index}")
            break
    for row in rows:
        right = number_of(row["caption"]) == row["frame"] % NUMBERS
        report.numbers += right
        run = 0 if right else run + 1
        if run > longest:
            longest, ended = run, row["frame"]
    report.frames += len(rows)
    if longest > LONGEST_RUN:
        report.faults.append(f"{name}: {longest} neighbouring numbers up to frame {ended} are wrong")


def _compare(
    videos: Mapping[str, Sequence[Mapping[str, Any]]], truth: Mapping[str, Sequence[str]], report: Report
) -> None:
    found = {Path(name).name: rows for name, rows in videos.items()}
    report.faults += [f"{name}: unknown video" for name in found.keys() - truth.keys()]
    report.whole = 0
    for name, captions in truth.items():
        rows = found.get(name, [])
        if len(rows) != len(captions):
            report.faults.append(f"{name}: {len(rows)} rows, expected {len(captions)}")
        report.whole += sum(row["caption"] == caption for row, caption in zip(rows, captions, strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captions", type=Path)
    report = verify(read_rows(parser.parse_args().captions))
    for fault in report.faults:
        print(fault, file=sys.stderr)
    if not report.faults:
        print(report)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
