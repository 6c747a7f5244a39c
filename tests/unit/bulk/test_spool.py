from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.bulk import spool
from penstock.bulk.spool import SpoolEnd, SpoolError
from penstock.bulk.types import CaptionRow, Position, Video

VIDEO = Video("a/b.mp4", "a/b.mp4", 123, 456)
CAPTIONS = ["a dog", "zwei Hunde – ünd 狗", 'a "quote"\nand a line', "", "\u2028"]


def row(number: int) -> CaptionRow:
    return CaptionRow(number * 3, number * 0.1, None if number == 2 else number * 300, CAPTIONS[number % len(CAPTIONS)])


def lines(rows: int, end: SpoolEnd | None = None) -> bytes:
    head = [spool.head_line(VIDEO)]
    return b"".join(head + [spool.row_line(n, row(n)) for n in range(rows)] + ([spool.end_line(end)] if end else []))


def written(folder: Path, data: bytes) -> Path:
    path = folder / "spool.jsonl"
    path.write_bytes(data)
    return path


def test_rows_can_be_read_back(tmp_path: Path) -> None:
    path = written(tmp_path, lines(7, SpoolEnd("complete", 7, 20)))
    assert list(spool.rows(path)) == [row(n) for n in range(7)]
    found = spool.scan(path)
    assert found is not None
    assert (found.rows, found.last, found.end) == (7, Position(18, 1800, 7), SpoolEnd("complete", 7, 20))
    assert found.is_of(VIDEO)
    assert not found.is_of(Video(VIDEO.path, VIDEO.name, 123, 457))


@given(size=st.integers(0, len(lines(6, SpoolEnd("complete", 6, 18)))), garbage=st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300)
def test_a_spool_truncated_anywhere_continues_to_the_same_bytes(tmp_path: Path, size: int, garbage: bytes) -> None:
    whole = lines(6, SpoolEnd("complete", 6, 18))
    path = written(tmp_path, whole[:size] + garbage)
    found = spool.scan(path)
    if found is None or found.bytes > len(whole) or path.read_bytes()[: found.bytes] != whole[: found.bytes]:
        # either the garbage happens to form a line, or the head is incomplete
        assert found is None
        spool.append(path, whole, overwrite=True)
    else:
        spool.truncate(path, found.bytes)
        rest = [spool.row_line(n, row(n)) for n in range(found.rows, 6)]
        end = [spool.end_line(SpoolEnd("complete", 6, 18))] if found.end is None else []
        spool.append(path, b"".join(rest + end))
        if found.rows and found.end is None:
            assert found.last == Position(row(found.rows - 1).frame, row(found.rows - 1).pts, found.rows)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line",
    [
        spool.row_line(4, row(4)),  # a gap
        spool.row_line(2, row(2)),  # a repeat
        spool.row_line(3, CaptionRow(6, 0.1, None, "x")),  # an earlier frame
        b'{"row":3,"frame":9,"time":0.3,"pts":null,"capt\n',
        b'{"row":3,"frame":9,"time":0.3,"pts":null,"caption":"x","more":1}\n',
        b'{"row":"3","frame":9,"time":0.3,"pts":null,"caption":"x"}\n',
        b'{"end":"complete","rows":4}\n',
        b'{"end":"perhaps","rows":3}\n',
        b"\0" * 100 + b"\n",
        b"\xff\xfe\n",
        spool.row_line(3, row(3))[:-1],
    ],
)
def test_an_invalid_line_and_all_after_it_count_as_never_written(tmp_path: Path, line: bytes) -> None:
    good = lines(3)
    path = written(tmp_path, good + line + spool.row_line(3, row(3)))
    found = spool.scan(path)
    assert found is not None
    assert (found.rows, found.bytes, found.end) == (3, len(good), None)


@pytest.mark.parametrize("data", [b"", b"\n", b'{"video":"x"}\n', lines(0)[:-1], b"\0\0\0\0\n", b"no json\n"])
def test_a_spool_without_a_complete_head_is_empty(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, data)
    assert spool.scan(path) is None
    assert spool.read_end(path) is None


def test_a_missing_spool_is_empty(tmp_path: Path) -> None:
    assert spool.scan(tmp_path / "none") is None
    assert spool.read_end(tmp_path / "none") is None


def test_read_end_returns_the_end_of_a_finished_video(tmp_path: Path) -> None:
    end = SpoolEnd("failed", 5000, 9, 2, "decode", 7, "broken")
    path = written(tmp_path, lines(5000, end))
    found = spool.read_end(path)
    assert found is not None
    assert (found.rows, found.end, found.attempts, found.last) == (5000, end, 2, None)
    assert spool.read_end(written(tmp_path, lines(5000))) is None
    assert spool.read_end(written(tmp_path, lines(3, end)[:-1])) is None


def test_rows_after_a_failed_end_belong_to_another_attempt(tmp_path: Path) -> None:
    data = lines(2, SpoolEnd("failed", 2, 6, 3, "send", 6, "away")) + spool.row_line(2, row(2))
    found = spool.scan(written(tmp_path, data))
    assert found is not None
    assert (found.rows, found.end, found.attempts) == (3, None, 3)
    again = data + spool.end_line(SpoolEnd("complete", 3, 9))
    assert len(list(spool.rows(written(tmp_path, again)))) == 3


def test_a_write_error_has_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="No such file"):
        spool.append(tmp_path / "no" / "folder", b"x")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_lines_are_synced_before_they_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spool"
    synced: list[bytes] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(path.read_bytes()))
    spool.append(path, b"head\n", overwrite=True)
    spool.append(path, b"row\n")
    assert synced == [b"head\n", b"head\nrow\n"]


def test_a_full_disk_is_reported() -> None:
    with pytest.raises(SpoolError, match="No space left"):
        spool.append(Path("/dev/full"), b"x" * 10)


def test_a_damaged_spool_is_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, lines(1) + b'{"row":1,"fr\n')
    with pytest.raises(SpoolError, match="--restart"):
        list(spool.rows(path))
