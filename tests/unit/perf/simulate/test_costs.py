"""Costs are read from numbers and from folders, and each weakness of a curve is an error or a note."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import ConfigError
from penstock.perf.bench.measurement import Load, Measurement, ServerStats, Verdict
from penstock.perf.bench.results import Origin, Results
from penstock.perf.simulate.costs import CostCurve, parse_memory, read_cost
from penstock.perf.tune.runner import BatchCurve, Journal, JournalEntry

FLAGS: dict[str, Any] = {"model": "", "token_file": None, "lengths": None}


def cost(text: object) -> CostCurve:
    return read_cost(str(text), FLAGS)


def test_a_formula_holds_for_every_size() -> None:
    found = cost("5ms,0.2ms")
    assert [found.seconds(n) for n in (1, 8, 1000)] == pytest.approx([0.0052, 0.0066, 0.205])
    assert found.largest is None
    assert not found.notes
    service = found.service(16, 0.05)
    assert service.t(16) == pytest.approx(0.0082)
    assert service.capacity(3, 16) == pytest.approx(3 * 16 / 0.0082)


def test_times_by_size_are_interpolated_and_extrapolated() -> None:
    found = cost("8:6.6ms, 1:5.2ms,16:9.8ms")
    assert [found.seconds(n) for n in (1, 4, 8, 12, 32)] == pytest.approx([0.0052, 0.0058, 0.0066, 0.0082, 0.0162])
    assert found.largest == 16


def test_a_curve_that_falls_a_little_is_levelled_with_a_note() -> None:
    found = cost("1:10ms,2:9ms,4:9.5ms,8:20ms")
    assert found.seconds(1) == pytest.approx(0.0095)
    assert found.seconds(2) == pytest.approx(0.0095)
    assert all(found.seconds(n) <= found.seconds(n + 1) for n in range(1, 20))
    assert "a batch of 2 rows was measured faster than one of 1" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("4:9ms,8:12ms", "no batch below 4 rows was measured"),
        ("1:5ms,32:12ms", "no size between 1 and 32 rows was measured"),
        ("8:12ms", "only batches of 8 rows were measured"),
    ],
)
def test_missing_sizes_are_noted(text: str, note: str) -> None:
    found = cost(text)
    assert any(note in one for one in found.notes)
    assert found.seconds(1) > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1:10ms,2:2ms", "the cost falls: a batch of 2 rows takes 2 ms, one of 1 takes 10 ms"),
        ("1:5ms,1:6ms", "batches of 1 rows have two times"),
        ("1:0ms,2:1ms", "takes no time"),
        ("0:5ms", "no ROWS:TIME"),
        ("x:5ms", "no ROWS:TIME"),
        ("1:5", "is no time"),
        ("1:-5ms", "is no time"),
        ("5", "no folder, and no cost"),
        ("5ms,-1ms", "is no time"),
        ("0ms,0ms", "takes no time"),
    ],
)
def test_an_impossible_cost_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost(text)


def tuned(folder: Path, chosen: str) -> Path:
    folder.mkdir()
    with Journal.open(folder / "journal.jsonl", {"target": "app.py"}) as journal:
        for key, a in (("baseline", 0.004), ("precision=bf16", 0.002)):
            curve = BatchCurve(points=((1, a + 0.001), (4, a + 0.004)), memory_bytes=2**29)
            journal.add(JournalEntry(key=f"curve {key}", curve=curve))
        journal.add(JournalEntry(key="1 open batch=4 rate=9", failed="no room"))
    (folder / "verdict.json").write_bytes(msgspec.json.encode(Verdict(slo="p99<=1s", chosen=chosen, default="")))
    return folder


def test_a_folder_of_tune_gives_the_curve_of_the_chosen_settings(tmp_path: Path) -> None:
    found = cost(tuned(tmp_path / "a", "batch=4,instances=2,precision=bf16"))
    assert found.seconds(4) == pytest.approx(0.006)
    assert found.largest == 4
    assert found.memory_bytes == 2**29
    assert cost(tuned(tmp_path / "b", "batch=4")).seconds(4) == pytest.approx(0.008)


def test_a_tuning_without_a_choice_gives_its_first_curve_with_a_note(tmp_path: Path) -> None:
    folder = tuned(tmp_path / "a", "")
    (folder / "verdict.json").write_text(json.dumps({}))
    (folder / "journal.jsonl").write_text((folder / "journal.jsonl").read_text().replace("baseline", "precision=fp16"))
    found = cost(folder)
    assert found.seconds(1) == pytest.approx(0.005)
    assert "names no chosen settings" in found.notes[0]
    (folder / "journal.jsonl").write_text('{"run": {}}\n')
    with pytest.raises(ConfigError, match="has no batch times"):
        cost(folder)
    (folder / "journal.jsonl").write_text('{"run": {}}\nno line\n')
    with pytest.raises(ConfigError, match="not a journal"):
        cost(folder)


def benched(folder: Path, runs: list[tuple[float, float]]) -> Path:
    with Results.open(folder, Origin(command="bench")) as results:
        for number, (rows, seconds) in enumerate(runs):
            server = ServerStats(mean_batch=rows, run_s=seconds, postprocess_s=0.001) if rows else None
            results.append(Measurement(load=Load(mode="closed", concurrency=number + 1), server=server))
    return folder


def test_a_folder_of_bench_gives_a_point_for_each_mean_batch(tmp_path: Path) -> None:
    found = cost(benched(tmp_path / "r", [(1.0, 0.004), (7.9, 0.010), (8.1, 0.012), (0, 0)]))
    assert [found.seconds(n) for n in (1, 8)] == pytest.approx([0.005, 0.012])
    assert len(found.points) == 2, "runs with about the same batches are one size"
    assert found.largest == 8


def test_a_folder_without_batches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no run with the server's batches"):
        cost(benched(tmp_path / "r", [(0, 0)]))
    with pytest.raises(ConfigError, match="holds no results"):
        cost(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        cost(tmp_path / "file")


def test_memory_is_read() -> None:
    assert [parse_memory(text) for text in ("2GiB", "800MiB", "1.5GB")] == [2**31, 800 * 2**20, 1_500_000_000]
    for text in ("2", "-1GiB", "0MiB", "x GiB", "1e999GiB"):
        with pytest.raises(ConfigError, match="expected a size over 0"):
            parse_memory(text)
