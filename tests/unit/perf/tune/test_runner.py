"""The journal survives a kill and is refused for another run; the runner replays it and ends at the budget."""

import errno
import itertools
import os
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench.measurement import Load, Measurement, parse_slo
from penstock.perf.tune.runner import (
    BatchCurve,
    BudgetExhausted,
    Infeasible,
    Journal,
    JournalEntry,
    MeasuredRun,
    TrialRunner,
)
from penstock.perf.tune.space import CandidateSettings, parse_settings, parse_space
from penstock.perf.tune.tuner import TuningResult, tune

RUN = {"target": "app.py:Model", "space": "batch=1,2", "seed": "0"}


def entry(key: str) -> JournalEntry:
    run = Measurement(load=Load(mode="open", rate=100, seconds=2), throughput=99.5)
    return JournalEntry(key=key, measured=MeasuredRun(run=run, cost_s=2.5), cost_s=2.5)


def test_entries_survive_reopening(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal.jsonl"
    kept = [
        entry("1"),
        JournalEntry(key="curve", curve=BatchCurve(points=((1, 0.1),), cost_s=1.0)),
        JournalEntry(key="3", failed="no"),
    ]
    with Journal.open(path, RUN) as journal:
        for each in kept:
            journal.add(each)
    with Journal.open(path, RUN) as again:
        assert [again.get(each.key) for each in kept] == kept
        assert len(again) == 3
        assert again.get("4") is None


@pytest.mark.parametrize("cut", [13, -30])
def test_an_incomplete_last_line_is_dropped_and_overwritten(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, RUN) as journal:
        journal.add(entry("1"))
        journal.add(entry("2"))
    path.write_bytes(path.read_bytes()[:cut])
    with Journal.open(path, RUN) as journal:
        assert len(journal) == (1 if cut < 0 else 0)
        journal.add(entry("3"))
    with Journal.open(path, RUN) as journal:
        assert (journal.get("2"), journal.get("3")) == (None, entry("3"))


def test_only_invalid_runs_after_the_last_valid_one_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    run = Measurement(load=Load(mode="open", rate=100, seconds=2), invalid=["the generator was late"])
    late = {key: JournalEntry(key=key, measured=MeasuredRun(run=run, cost_s=2.5)) for key in "1346"}
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


def opened(path: Path, **changed: str) -> None:
    with Journal.open(path, RUN | changed):
        pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": "1"}, 'its seed is "0", now it is "1"'),
        ({"space": "batch=1"}, 'its space is "batch=1,2", now it is "batch=1"'),
        ({"data": "x.jpg"}, 'its data is "", now it is "x.jpg"'),
        ({"penstock": "0.0.7"}, 'now it is "0.0.7"'),
    ],
)
def test_the_journal_of_another_run_or_version_is_refused(
    tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    path = tmp_path / "journal.jsonl"
    opened(path)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        opened(path, **changed)
    assert "--no-resume" in str(caught.value)


@pytest.mark.parametrize(("line", "number"), [(b"PK\x03\x04\n", 1), (b'{"run":{}}\n', 1), (b"{}\n", 2)])
def test_a_file_that_is_not_a_journal_is_refused_with_its_line(tmp_path: Path, line: bytes, number: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, RUN) as journal:
        journal.add(entry("1"))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = line
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match=r"line [12]: not a line of a journal|belongs to another run"):
        opened(path)


def test_two_runs_do_not_share_one(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal.open(path, RUN), pytest.raises(ConfigError, match="another run is writing to"):
        opened(path)


@pytest.mark.parametrize("search", ["auto", "halving"])
def test_a_search_cut_off_anywhere_resumes_as_if_it_had_not_been(
    hill: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str
) -> None:
    """The machine drifts, so a repeated measurement would change the result."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr("penstock.perf.tune.runner.time.monotonic", lambda: 0.0)  # a failed load costs real time

    class Drifting(hill):  # type: ignore[misc]
        taken = 0

        def _measured(self, *args: Any) -> MeasuredRun:
            self.taken += 1
            return super()._measured(*args)  # type: ignore[no-any-return]

        def measure(self, settings: CandidateSettings, rate: float, *args: Any) -> MeasuredRun:
            self.base_s = 0.01 * random.Random(self.taken).uniform(1, 3)
            self.invalid = int(self.taken % 9 == 4)
            return super().measure(settings, rate, *args)  # type: ignore[no-any-return]

    def able(settings: CandidateSettings) -> float:
        return 300 * len(settings.text) if settings.items else 900

    def searched(path: Path, taken: int) -> TuningResult:
        bench = Drifting(able)
        bench.taken = taken
        bench.fails.add(next(iter(space)))
        with Journal.open(path, RUN) as journal:
            return tune(bench, space, parse_slo("p99<=100ms"), search=search, seed=3, budget_s=400, journal=journal)

    space = parse_space("batch=1..32,instances=1..4")
    whole = searched(tmp_path / "whole", 0)
    content = (tmp_path / "whole").read_bytes()
    assert content.count(b'"reading"') > 40
    assert b'"failed"' in content
    for cut in [*random.Random(search).sample(range(len(content)), 12), len(content)]:
        path = tmp_path / f"{cut}"
        path.write_bytes(content[:cut])
        kept = content[: content.rfind(b"\n", 0, cut) + 1].splitlines()
        while b'"invalid":["' in kept[-1]:  # measured again
            kept.pop()
        assert searched(path, b"".join(kept).count(b'"reading"')) == whole
        assert path.read_bytes() == content


def test_a_full_disk_is_an_error_and_loses_no_earlier_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


ONE = parse_settings("batch=4,instances=2,precision=fp16,batching.timeout_s=5")


def test_measuring_ends_at_the_budget_less_the_time_reserved(hill: Any) -> None:
    runner = TrialRunner(hill(lambda _: 1000), Journal(), limit_s=6.0)
    runner.reserved_s = lambda: runner.spent_s
    runner.measure(ONE, 100, 2)
    runner.saturate(ONE, 1)
    for ask in (lambda: runner.measure(ONE, 100, 1), lambda: runner.curve(ONE)):
        with pytest.raises(BudgetExhausted):
            ask()
    runner.reserved_s = lambda: 0.0
    runner.measure(ONE, 100, 3)
    assert runner.spent_s == 6.0
    with pytest.raises(BudgetExhausted):
        runner.measure(ONE, 100, 1)


def test_the_cost_of_a_settings_change_excludes_the_run(hill: Any) -> None:
    class Reloaded(hill):  # type: ignore[misc]
        def measure(self, settings: CandidateSettings, *args: Any) -> MeasuredRun:
            found: MeasuredRun = super().measure(settings, *args)
            new = len(self.asked) < 2 or self.asked[-2][0] != settings
            change_s = float(settings.get("batch") or 0) if new else 0.5
            return msgspec.structs.replace(found, cost_s=found.cost_s + change_s)

    runner = TrialRunner(Reloaded(lambda _: 1000), Journal())
    assert runner.change_s == 0
    for batch in (4, 4, 8, 8, 8, 3):
        runner.measure(ONE.put(batch=batch), 100, 2)
    assert runner.change_s == 5


def test_each_measurement_has_its_own_seed(hill: Any) -> None:
    runner = TrialRunner(hill(lambda _: 1000), Journal(), seed=2)
    seeds = [runner.measure(ONE, 100, 1).run.load.seed for _ in range(3)]
    assert len(set(seeds)) == 3
    again = TrialRunner(hill(lambda _: 1000), Journal(), seed=2)
    assert [again.measure(ONE, 100, 1).run.load.seed for _ in range(3)] == seeds


def test_one_curve_serves_all_settings_that_share_it(hill: Any) -> None:
    asked: list[CandidateSettings] = []

    class Curved(hill):  # type: ignore[misc]
        def curve(self, settings: CandidateSettings) -> BatchCurve:
            asked.append(settings)
            return BatchCurve(points=((1, 0.1),), cost_s=2.0)

    runner = TrialRunner(Curved(lambda _: 1000), Journal())
    for other in (ONE, ONE.put(batch=8), ONE.put(instances=1), ONE.put(hold=0)):
        assert runner.curve(other) == BatchCurve(points=((1, 0.1),), cost_s=2.0)
    runner.curve(ONE.put(precision="fp32"))
    assert [settings.text for settings in asked] == ["precision=fp16", "precision=fp32"]
    assert runner.spent_s == 4.0


def test_a_journalled_run_is_not_repeated_and_its_time_counts(hill: Any, tmp_path: Path) -> None:
    seen: list[tuple[str, float, bool]] = []

    def observer(settings: CandidateSettings, measured: MeasuredRun, replayed: bool, spent_s: float) -> None:
        seen.append((settings.text, measured.rate, replayed))

    first, second = hill(lambda _: 1000), hill(lambda _: 2000)
    with Journal.open(tmp_path / "journal.jsonl", {}) as journal:
        measured = TrialRunner(first, journal, observer=observer).measure(ONE, 100, 3)
    with Journal.open(tmp_path / "journal.jsonl", {}) as journal:
        runner = TrialRunner(second, journal, observer=observer)
        assert runner.measure(ONE, 100, 3) == measured
        assert (second.asked, second.prepared, runner.spent_s) == ([], [], 3.0)
        runner.measure(ONE, 100, 3)
    assert seen == [(ONE.text, 100, False), (ONE.text, 100, True), (ONE.text, 100, False)]


def test_settings_that_do_not_load_are_infeasible_also_from_the_journal(
    hill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, journal, now = hill(lambda _: 1000), Journal(), itertools.count(step=7.04)
    bench.fails.add(ONE)
    monkeypatch.setattr("penstock.perf.tune.runner.time.monotonic", lambda: next(now))
    for _ in range(2):
        runner = TrialRunner(bench, journal)
        with pytest.raises(Infeasible, match="no room for it"):
            runner.measure(ONE, 100, 1)
        assert runner.spent_s == 7.0, "a failed load costs time, too"
    assert bench.prepared == [ONE]
