"""Spools -> what the user reads: JSONL, CSV, Parquet, WebVTT, SRT, in the order of the inputs.

One pass over the spools feeds every output; nothing is held but the row at hand (Parquet: a group of rows). A file
appears under its name when it is whole.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
from msgspec import Struct

from penstock.bulk import spool
from penstock.bulk.types import Row, Video
from penstock.errors import PenstockError

SUFFIXES = (".jsonl", ".csv", ".parquet")
COLUMNS = ("video", "frame", "time", "caption")
GROUP_ROWS = 16_384  # of a Parquet file: about a megabyte
ALONE_S = 2.0  # how long the caption of a video's only sample is shown
NAME_BYTES = 200  # a longer name of a file is cut, so that its suffix fits into the usual 255


class OutputError(PenstockError):
    """An output cannot be written."""

    code = "output_error"


class Wanted(Struct, frozen=True):
    """Where the outputs go: files by their suffix, and a folder each for subtitles."""

    files: tuple[Path, ...]
    vtt: Path | None = None
    srt: Path | None = None

    def paths(self) -> list[Path]:
        """All of them."""
        return [*self.files, *(folder for folder in (self.vtt, self.srt) if folder is not None)]


class Output(Protocol):
    """Takes the videos one after another: `begin`, `row` in frame order, `end`."""

    def begin(self, video: Video) -> None: ...

    def row(self, row: Row) -> None: ...

    def end(self, seen: int) -> None: ...


def check(wanted: Wanted, failures: Path) -> None:
    """Raises OutputError for what could not be written when all captions are there, beside the list of failures."""
    for file in wanted.files:
        if file.suffix.lower() not in SUFFIXES:
            raise OutputError(
                f"the suffix of '{file}' must be {', '.join(SUFFIXES)}; for subtitles give --vtt or --srt"
            )
        if file.is_dir():
            raise OutputError(f"'{file}' is a folder; name a file")
    files = (*wanted.files, failures)
    if len({os.path.realpath(file) for file in files}) < len(files):
        raise OutputError(f"two outputs have the same name, or that of the list of failures, '{failures}'; name others")
    for folder in (*(file.parent for file in files), *wanted.paths()[len(wanted.files) :]):
        there = next(one for one in (folder, *folder.parents) if os.path.exists(one))
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise OutputError(f"nothing can be written into '{folder}': '{there}' allows no new files")
    if any(file.suffix.lower() == ".parquet" for file in wanted.files):
        _pyarrow()


def write(wanted: Wanted, spools: Sequence[tuple[Video, Path]]) -> None:
    """Writes all of them from spools that have ended. Raises OutputError, SpoolError."""
    try:
        with ExitStack() as stack:
            outputs: list[Output] = [stack.enter_context(_file(path)) for path in wanted.files]
            names = subtitle_names([video for video, _ in spools])
            if wanted.vtt is not None:
                outputs.append(stack.enter_context(_subtitles(Subtitles(wanted.vtt, names, vtt=True))))
            if wanted.srt is not None:
                outputs.append(stack.enter_context(_subtitles(Subtitles(wanted.srt, names, vtt=False))))
            for video, path in spools:
                _feed(outputs, video, path)
    except OSError as e:
        raise OutputError(f"cannot write {e.filename or 'the output'}: {e.strerror}; the captions are kept") from e


def _feed(outputs: list[Output], video: Video, path: Path) -> None:
    found = spool.glance(path)
    if found is None or found.end is None:
        return
    for output in outputs:
        output.begin(video)
    for row in spool.rows(path):
        for output in outputs:
            output.row(row)
    for output in outputs:
        output.end(found.end.seen)


@contextmanager
def whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name, and the place of an older one, when the block has ended well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _file(path: Path) -> Iterator[Output]:
    with whole(path) as file:
        suffix = path.suffix.lower()
        if suffix == ".jsonl":
            yield JsonLines(file)
        elif suffix == ".csv":
            yield Csv(file)
        else:
            parquet = Parquet(file)
            yield parquet
            parquet.close()


@contextmanager
def _subtitles(subtitles: Subtitles) -> Iterator[Output]:
    try:
        yield subtitles
    except BaseException as e:
        subtitles.file.__exit__(type(e), e, e.__traceback__)  # one that is half written takes no name
        raise


class JsonLines:
    """`{"video": ..., "frame": 12, "time": 0.4, "caption": ...}` a line."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def begin(self, video: Video) -> None:
        self._video = video.name

    def row(self, row: Row) -> None:
        fields = {"video": self._video, "frame": row.frame, "time": row.time_s, "caption": row.caption}
        self._file.write(msgspec.json.encode(fields) + b"\n")

    def end(self, seen: int) -> None: ...


class Csv:
    """A line of column names, then a line a row, as spreadsheets read them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._lines: list[str] = []
        self._csv = csv.writer(self)
        self._csv.writerow(COLUMNS)

    def write(self, line: str) -> None:
        """What csv.writer calls."""
        self._file.write(line.encode())

    def begin(self, video: Video) -> None:
        self._video = video.name

    def row(self, row: Row) -> None:
        self._csv.writerow((self._video, row.frame, row.time_s, row.caption))

    def end(self, seen: int) -> None: ...


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise OutputError("Parquet needs pyarrow: pip install 'penstock[parquet]'") from e
    return pyarrow


class Parquet:
    """Columns video, frame, time, caption; a group of rows at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        arrow = _pyarrow()
        types = (arrow.string(), arrow.int64(), arrow.float64(), arrow.string())
        self._schema = arrow.schema(list(zip(COLUMNS, types, strict=True)))
        self._table = arrow.table
        self._writer = arrow.parquet.ParquetWriter(file, self._schema)
        self._rows: list[tuple[str, int, float, str]] = []

    def begin(self, video: Video) -> None:
        self._video = video.name

    def row(self, row: Row) -> None:
        self._rows.append((self._video, row.frame, row.time_s, row.caption))
        if len(self._rows) == GROUP_ROWS:
            self._group()

    def end(self, seen: int) -> None: ...

    def close(self) -> None:
        """Writes what is left, and the foot."""
        self._group()
        self._writer.close()

    def _group(self) -> None:
        if self._rows:
            columns = dict(zip(COLUMNS, zip(*self._rows, strict=True), strict=True))
            self._writer.write_table(self._table(columns, schema=self._schema))
            self._rows = []


class Subtitles:
    """A WebVTT or SRT file a video: a cue lasts until the next sample; equal neighbours are one cue."""

    def __init__(self, folder: Path, names: dict[str, str], *, vtt: bool) -> None:
        self._folder, self._names, self._vtt = folder, names, vtt
        self.file = ExitStack()  # of the video at hand

    def begin(self, video: Video) -> None:
        suffix = ".vtt" if self._vtt else ".srt"
        self._file = self.file.enter_context(whole(self._folder / (self._names[video.name] + suffix)))
        self._cues = 0
        self._start_s, self._caption = 0.0, ""
        self._last: Row | None = None
        self._gap_s = ALONE_S
        if self._vtt:
            self._file.write(b"WEBVTT\n\n")

    def row(self, row: Row) -> None:
        caption = text(row.caption)
        if self._last is not None:
            self._gap_s = row.time_s - self._last.time_s
        if self._last is None or caption != self._caption:
            self._cue(row.time_s)
            self._start_s, self._caption = row.time_s, caption
        self._last = row

    def end(self, seen: int) -> None:
        """The last sample counts for as long as the one before did, or until the video ends."""
        if (last := self._last) is not None:
            until_s = last.time_s + self._gap_s
            if last.frame > 0 and seen > last.frame:
                until_s = min(until_s, last.time_s / last.frame * seen)
            self._cue(until_s)
        self.file.close()

    def _cue(self, end_s: float) -> None:
        """Writes the cue at hand, if there is one and it says something."""
        if self._last is None or not self._caption:
            return
        self._cues += 1
        start_ms = round(self._start_s * 1000)
        times = f"{self._time(start_ms)} --> {self._time(max(round(end_s * 1000), start_ms + 1))}"
        number = "" if self._vtt else f"{self._cues}\n"
        self._file.write(f"{number}{times}\n{self._caption}\n\n".encode())

    def _time(self, ms: int) -> str:
        point = "." if self._vtt else ","
        return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{point}{ms % 1000:03}"


def text(caption: str) -> str:
    """A caption as a cue may hold it: one line, without what would be a tag, an entity or an arrow."""
    line = " ".join(caption.split())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def subtitle_names(videos: Sequence[Video]) -> dict[str, str]:
    """Name of the video -> name of its subtitles, without suffix: that of the file; where two would share one, with a
    part of their own."""
    stems = {video.name: _cut(Path(video.name).stem) for video in videos}
    often = Counter(stem.casefold() for stem in stems.values())
    return {
        name: f"{stem}-{hashlib.sha256(name.encode()).hexdigest()[:8]}" if often[stem.casefold()] > 1 else stem
        for name, stem in stems.items()
    }


def _cut(stem: str) -> str:
    return stem.encode()[:NAME_BYTES].decode(errors="ignore")
