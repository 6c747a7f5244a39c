"""The journal: what was answered is there after a kill, that of another run or version is refused, a full disk told."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.slo import parse_slo
from penstock.perf.tune.journal import Entry, Journal
from penstock.perf.tune.space import Settings, parse_space
from penstock.perf.tune.trial import Curve, Reading
from penstock.perf.tune.tuner import Outcome, tune

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


def test_invalid_readings_at_the_end_are_asked_again_and_those_before_a_valid_one_are_not(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    run = Measurement(load=Load(mode="open", rate=100, seconds=2), invalid=["the generator was late"])
    late = {key: Entry(key=key, reading=Reading(run=run, cost_s=2.5)) for key in "1346"}
    for _ in range(2):
        with Journal.open(path, RUN) as journal:
            for key in "123456":
                if journal.get(key) is None:
                    journal.add(late.get(key) or entry(key))
    with Journal.open(path, RUN) as journal:
        assert [key for key in "123456" if journal.get(key) is not None] == ["1", "2", "3", "4", "5"]
        journal.add(entry("6"))
    with Journal.open(path, RUN) as journal:
        assert journal.get("6") == entry("6")
        assert len(journal) == 6


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


@pytest.mark.parametrize("search", ["auto", "halving"])
def test_a_search_cut_off_anywhere_goes_on_as_if_it_had_not_been(
    hill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    """On a machine that is never the same twice, so that a measurement that is there and asked again would show."""
    monkeypatch.setattr(os, "fsync", lambda _: None)

    class Drifting(hill):  # type: ignore[misc]
        taken = 0

        def _reading(self, *args: Any) -> Reading:
            self.taken += 1
            return super()._reading(*args)  # type: ignore[no-any-return]

        def measure(self, settings: Settings, rate: float, *args: Any) -> Reading:
            self.base_s = 0.01 * random.Random(self.taken).uniform(1, 3)
            self.invalid = int(self.taken % 9 == 4)
            return super().measure(settings, rate, *args)  # type: ignore[no-any-return]

    def able(settings: Settings) -> float:
        return 300 * len(settings.text) if settings.items else 900

    def searched(path: Path, taken: int) -> Outcome:
        bench = Drifting(able)
        bench.taken = taken
        bench.fails.add(next(iter(space)))
        with Journal.open(path, RUN) as journal:
            return tune(bench, space, parse_slo("p99<=100ms"), search=search, seed=3, journal=journal, budget_s=400)

    space = parse_space("batch=1..32,instances=1..4")
    whole = searched(tmp_path / "whole", 0)
    content = (tmp_path / "whole").read_bytes()
    assert content.count(b'"reading"') > 40
    assert b'"failed"' in content
    for cut in random.Random(search).sample(range(len(content)), 12):
        path = tmp_path / f"{cut}"
        path.write_bytes(content[:cut])
        kept = content[: content.rfind(b"\n", 0, cut) + 1]
        assert searched(path, kept.count(b'"reading"')) == whole
        assert path.read_bytes() == content


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
