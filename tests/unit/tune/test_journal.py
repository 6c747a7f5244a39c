"""The journal: what was answered is there after a kill, that of another run or version is refused, a full disk told."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.bench.measurement import Load, Measurement
from penstock.errors import ConfigError, PenstockError
from penstock.tune.journal import Entry, Journal
from penstock.tune.trial import Curve, Reading

RUN = {"target": "app.py:Model", "space": "batch=1,2", "seed": "0"}


def entry(key: str) -> Entry:
    run = Measurement(load=Load(mode="open", rate=100, seconds=2), throughput=99.5)
    return Entry(key=key, reading=Reading(run=run, cost_s=2.5), cost_s=2.5)


def test_what_was_added_is_there_after_it_was_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal.jsonl"
    kept = [entry("1"), Entry(key="curve", curve=Curve(points=((1, 0.1),), cost_s=1.0)), Entry(key="3", failed="no")]
    with Journal.open(path, RUN) as journal:
        for each in kept:
            journal.add(each)
    with Journal.open(path, RUN) as again:
        assert [again.get(each.key) for each in kept] == kept
        assert len(again) == 3
        assert again.get("4") is None


def test_a_last_line_that_was_cut_short_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, RUN) as journal:
        journal.add(entry("1"))
        whole = path.read_bytes()
        journal.add(entry("2"))
    path.write_bytes(path.read_bytes()[: len(whole) + 30])
    with Journal.open(path, RUN) as journal:
        assert journal.get("2") is None
        journal.add(entry("3"))
    with Journal.open(path, RUN) as journal:
        assert journal.get("1") == entry("1")
        assert journal.get("3") == entry("3")


def test_a_head_that_was_cut_short_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"run":{"pens')
    with Journal.open(path, RUN) as journal:
        journal.add(entry("1"))
    with Journal.open(path, RUN) as journal:
        assert len(journal) == 1


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"seed": "1"}, 'its seed is "0", now it is "1"'),
        ({"space": "batch=1"}, 'its space is "batch=1,2", now it is "batch=1"'),
        ({"data": "x.jpg"}, 'its data is "", now it is "x.jpg"'),
    ],
)
def test_the_journal_of_another_run_is_refused(tmp_path: Path, changed: dict[str, str], told: str) -> None:
    path = tmp_path / "journal.jsonl"
    Journal.open(path, RUN).close()
    with pytest.raises(ConfigError) as caught:
        Journal.open(path, RUN | changed)
    assert told in str(caught.value)
    assert "--no-resume" in str(caught.value)


def test_the_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal.open(path, RUN | {"penstock": "0.0.7"}).close()
    with pytest.raises(ConfigError, match=r'its penstock is "0\.0\.7", now it is'):
        Journal.open(path, RUN)


@pytest.mark.parametrize(("line", "number"), [(b"PK\x03\x04\n", 1), (b'{"run":{}}\n', 1), (b"{}\n", 2)])
def test_what_is_no_journal_is_refused_with_its_line(tmp_path: Path, line: bytes, number: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, RUN) as journal:
        journal.add(entry("1"))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = line
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=r"line 1: not of a journal|line 2: not of a journal|is of another run"):
        Journal.open(path, RUN)


def test_without_resume_it_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, RUN) as journal:
        journal.add(entry("1"))
    with Journal.open(path, RUN | {"seed": "5"}, resume=False) as journal:
        assert len(journal) == 0


def test_two_runs_do_not_share_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, RUN), pytest.raises(ConfigError, match="written to by another run"):
        Journal.open(path, RUN)


def test_a_full_disk_is_told_and_loses_nothing_that_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, RUN) as journal:
        journal.add(entry("1"))

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(PenstockError, match="the disk is full"):
                journal.add(entry("2"))
        assert journal.get("2") is None
        journal.add(entry("3"))
    with Journal.open(path, RUN) as journal:
        assert (journal.get("1"), journal.get("2"), journal.get("3")) == (entry("1"), None, entry("3"))
