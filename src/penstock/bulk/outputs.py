"""The files of captions for users (JSONL, CSV, Parquet, WebVTT, SRT, in the order of the inputs), and failed videos.

One pass over the spools feeds every output and holds one row at a time (Parquet: a group of rows). A file appears
under its name once it is complete.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import msgspec
from msgspec import Struct

from penstock.bulk import spool
from penstock.bulk.types import CaptionRow, Gap, Video
from penstock.core.os_threads import atomic_file
from penstock.errors import PenstockError
from penstock.plugins import optional_module

SUFFIXES = (".jsonl", ".csv", ".parquet")
COLUMNS = ("video", "frame", "time", "caption")
REQUEST_COLUMNS = (*COLUMNS, "error", "prompt_tokens", "completion_tokens")  # of answers to requests to OpenAI's API
GROUP_ROWS = 16_384  # of a Parquet file: about a megabyte
SINGLE_CUE_S = 2.0  # how long the caption of a video's only sample is shown
NAME_BYTES = 200  # longer names are cut, so that the suffix fits into the usual limit of 255


class OutputError(PenstockError, code="output_error"):
    """An output cannot be written."""


class OutputPaths(Struct, frozen=True):
    """The paths of the outputs: files, whose suffix selects the format, and a folder for each kind of subtitles."""

    files: tuple[Path, ...]
    vtt: Path | None = None
    srt: Path | None = None

    def all(self) -> list[Path]:
        return [*self.files, *(folder for folder in (self.vtt, self.srt) if folder is not None)]

    def written(self, videos: Sequence[Video]) -> list[Path]:
        """Every file that may be written for these videos."""
        names = subtitle_names(videos).values()
        folders = ((self.vtt, ".vtt"), (self.srt, ".srt"))
        return [*self.files, *(folder / (name + suffix) for folder, suffix in folders if folder for name in names)]


class FailureRecord(Struct, frozen=True, omit_defaults=True):
    """A line of failures.jsonl: a video that failed, or has `gaps`. Its `captions` are kept and are in the outputs."""

    path: str
    stage: str
    frame: int | None
    error: str
    attempts: int
    captions: int
    gaps: list[Gap] = []


def check_outputs(outputs: OutputPaths, failures: Path) -> None:
    """Raises OutputError before the job begins if an output or the list of failures could not be written."""
    for file in outputs.files:
        if file.suffix.lower() not in SUFFIXES:
            raise OutputError(
                f"the suffix of '{file}' must be {', '.join(SUFFIXES)}; for subtitles give --vtt or --srt"
            )
        if file.is_dir():
            raise OutputError(f"'{file}' is a folder; name a file")
    files = (*outputs.files, failures)
    path, count = Counter(map(os.path.realpath, files)).most_common(1)[0]
    if count > 1:
        raise OutputError(f"outputs and the failures list need different paths; found '{path}' twice")
    for folder in (*(file.parent for file in files), *outputs.all()[len(outputs.files) :]):
        existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
            raise OutputError(f"nothing can be written into '{folder}': '{existing}' allows no new files")
    if any(file.suffix.lower() == ".parquet" for file in outputs.files):
        _pyarrow()


def write_outputs(
    outputs: OutputPaths, spools: Sequence[tuple[Video, Path]], request: dict[str, Any] | None = None
) -> None:
    """Writes all outputs from the spools of the videos that have ended. Raises OutputError, SpoolError.

    Answers to a `request` have errors and tokens, and are JSON if they were checked against a schema.
    """
    columns = COLUMNS if request is None else REQUEST_COLUMNS
    form = request is not None and "schema" in request
    try:
        with ExitStack() as stack:
            writers: list[OutputWriter] = [
                stack.enter_context(_open_file(path, columns, form)) for path in outputs.files
            ]
            names = subtitle_names([video for video, _ in spools])
            for folder, vtt in ((outputs.vtt, True), (outputs.srt, False)):
                if folder is not None:
                    writers.append(subtitles := SubtitleWriter(folder, names, vtt=vtt))
                    stack.push(subtitles.file)  # discards a file that an error leaves incomplete
            for video, path in spools:
                _write_video(writers, video, path)
    except OSError as e:
        raise OutputError(f"cannot write {e.filename or 'the output'}: {e.strerror}; the captions are kept") from e


def write_failures(path: Path, spools: Iterable[tuple[Video, Path]], folder: spool.WorkFolder) -> bool:
    """Lists the videos that failed or have gaps, in order. Removes the job's old list if there are none, and returns
    False.

    Raises OutputError, SpoolError, FolderError.
    """
    failures = []
    for video, file in spools:
        state = spool.read_end(file)
        end = None if state is None else state.end
        if state is None or end is None or not state.is_of(video):
            continue
        stage, frame, error = end.stage, end.frame, end.error
        if not state.failed and end.tally.errors:
            stage, frame = "caption", end.tally.frame
            error = f"{end.tally.errors} of its rows have an error, the first at frame {frame}: {end.tally.error}"
        elif not state.failed and end.gaps:
            stage, frame, lost = "decode", end.gaps[0].frame, sum(gap.frames for gap in end.gaps)
            error = f"is damaged at frame {frame}: {end.gaps[0].error}; {lost} of its frames cannot be decoded"
        if state.failed or error:
            failures.append(FailureRecord(video.name, stage, frame, error, end.attempts, end.rows, end.gaps))
    if not failures:
        folder.remove(path)
        return False
    folder.own([path])
    try:
        with atomic_file(path) as out:
            out.writelines(msgspec.json.encode(failure) + b"\n" for failure in failures)
    except OSError as e:
        raise OutputError(f"cannot write {path}: {e.strerror}") from e
    return True


def _write_video(writers: list[OutputWriter], video: Video, path: Path) -> None:
    state = spool.read_end(path)
    if state is None or state.end is None:
        return
    for writer in writers:
        writer.begin(video)
    for row in spool.rows(path):
        for writer in writers:
            writer.row(row)
    for writer in writers:
        writer.end(state.end.seen)


class OutputWriter:
    """Receives one video after another: `begin`, each `row` in frame order, `end`."""

    def begin(self, video: Video) -> None:
        self._video = video.name

    def row(self, row: CaptionRow) -> None:
        raise NotImplementedError

    def end(self, seen: int) -> None:
        """The video had `seen` frames."""


Cells = tuple[str | int | float | None, ...]


class RowWriter(OutputWriter):
    """Passes the cells of each row, in the order of `columns`, to `write`."""

    def __init__(self, columns: Sequence[str], write: Callable[[Cells], object]) -> None:
        self._count, self._write = len(columns), write

    def row(self, row: CaptionRow) -> None:
        tokens = row.tokens or (None, None)
        self._write((self._video, row.frame, row.time_s, row.caption, row.error, *tokens)[: self._count])


@contextmanager
def _open_file(path: Path, columns: Sequence[str], form: bool) -> Iterator[OutputWriter]:
    """The writer of one file in the format of its suffix: an object a line, a spreadsheet's dialect, or Parquet.

    In objects, captions of a `form` are values instead of texts, and missing ones are left out.
    """
    suffix = path.suffix.lower()
    with atomic_file(path) as file:
        if suffix == ".jsonl":

            def write(cells: Cells) -> None:
                cell = dict(zip(columns, cells, strict=True))
                row: dict[str, object] = {n: v for n, v in cell.items() if n in COLUMNS or v not in ("", None)}
                if form and not cell["error"]:
                    row["caption"] = msgspec.Raw(str(cell["caption"]).encode())
                file.write(msgspec.json.encode(row) + b"\n")

            yield RowWriter(columns, write)
        elif suffix == ".csv":
            writer = csv.writer(SimpleNamespace(write=lambda line: file.write(line.encode())))
            writer.writerow(columns)
            yield RowWriter(columns, writer.writerow)
        else:
            groups = ParquetGroups(file, columns)
            yield RowWriter(columns, groups.add)
            groups.close()


def _pyarrow() -> Any:
    optional_module("pyarrow.parquet", "Parquet needs pyarrow", "parquet", OutputError)
    import pyarrow

    return pyarrow


class ParquetGroups:
    """Some of `REQUEST_COLUMNS`; one group of rows at a time."""

    def __init__(self, file: IO[bytes], columns: Sequence[str]) -> None:
        arrow = _pyarrow()
        text, number = arrow.string(), arrow.int64()
        types = (text, number, arrow.float64(), text, text, number, number)
        self._schema = arrow.schema(list(zip(columns, types, strict=False)))
        self._table = arrow.table
        self._writer = arrow.parquet.ParquetWriter(file, self._schema)
        self._rows: list[Cells] = []

    def add(self, cells: Cells) -> None:
        self._rows.append(cells)
        if len(self._rows) == GROUP_ROWS:
            self._write_group()

    def close(self) -> None:
        """Writes the remaining rows and the footer."""
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        if self._rows:
            columns = dict(zip(self._schema.names, zip(*self._rows, strict=True), strict=True))
            self._writer.write_table(self._table(columns, schema=self._schema))
            self._rows = []


class SubtitleWriter(OutputWriter):
    """One WebVTT or SRT file for each video with captions.

    A cue lasts until the next sample; equal neighbours share a cue.
    """

    def __init__(self, folder: Path, names: dict[str, str], *, vtt: bool) -> None:
        self._folder, self._names, self._vtt = folder, names, vtt
        self.file = ExitStack()  # of the current video

    def begin(self, video: Video) -> None:
        self._path = self._folder / (self._names[video.name] + (".vtt" if self._vtt else ".srt"))
        self._cues = 0
        self._start_s, self._caption = 0.0, ""
        self._last: CaptionRow | None = None
        self._gap_s = SINGLE_CUE_S

    def row(self, row: CaptionRow) -> None:
        caption = "" if row.error else cue_text(row.caption, markup=self._vtt)
        if self._last is None:
            self._file = self.file.enter_context(atomic_file(self._path))
            self._file.write(b"WEBVTT\n\n" if self._vtt else b"")
        else:
            self._gap_s = row.time_s - self._last.time_s
        if self._last is None or caption != self._caption:
            self._write_cue(row.time_s)
            self._start_s, self._caption = row.time_s, caption
        self._last = row

    def end(self, seen: int) -> None:
        """Shows the last sample as long as the previous sample, or until the video ends."""
        if (last := self._last) is not None:
            until_s = last.time_s + self._gap_s
            if last.frame > 0 and seen > last.frame:
                until_s = min(until_s, last.time_s / last.frame * seen)
            self._write_cue(until_s)
        self.file.close()

    def _write_cue(self, end_s: float) -> None:
        """Writes the current cue unless it is empty."""
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


def cue_text(caption: str, *, markup: bool) -> str:
    """A caption on one line; in WebVTT, which has `markup`, with escapes for tags, entities and arrows.

    SRT has no escapes: players show `&lt;` as it is.
    """
    line = " ".join(caption.split())
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") if markup else line


def subtitle_names(videos: Sequence[Video]) -> dict[str, str]:
    """Video name -> subtitle file name without suffix; files with the same name get a digest."""
    stems = {v.name: Path(v.name).stem.encode()[:NAME_BYTES].decode(errors="ignore") for v in videos}
    often = Counter(stem.casefold() for stem in stems.values())
    return {
        name: f"{stem}-{hashlib.sha256(name.encode()).hexdigest()[:8]}" if often[stem.casefold()] > 1 else stem
        for name, stem in stems.items()
    }
