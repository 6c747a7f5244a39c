import csv
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench import results as results_file
from penstock.perf.bench.measurement import Latency, Load, Measurement, ServerStats
from penstock.perf.bench.results import (
    RECORDS,
    RUN,
    SUMMARY,
    Origin,
    Results,
    command_line,
    machine,
    read,
    redacted,
    summary,
    versions,
)

ORIGIN = Origin(command="bench", target="app.py:Model", slo="p99<=100ms", seed=7, started="2026-01-01T00:00:00Z")


def measured(rate: float, **more: object) -> Measurement:
    return Measurement(
        load=Load(mode="open", rate=rate), label="batch=4", requests=100, answered=100, throughput=rate, **more
    )


def test_measurements_are_read_as_written(tmp_path: Path) -> None:
    server = ServerStats(queue_s=0.001, batches={"1": 3, "8": 2})
    runs = [measured(50.0, latency=Latency(p50_s=0.01), server=server), measured(100.0, errors={"503": 2, "lost": 1})]
    with Results.open(tmp_path / "new" / "run", ORIGIN) as results:
        for number, run in enumerate(runs, 1):
            results.append(run)
            assert len(read(tmp_path / "new" / "run")[1]) == number, "on the disk when append is done"
    assert read(tmp_path / "new" / "run") == (ORIGIN, runs)


def test_a_folder_with_a_run_continues_only_on_resume(tmp_path: Path) -> None:
    def interrupted() -> None:
        with Results.open(tmp_path, ORIGIN) as results:
            results.append(measured(50.0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len((tmp_path / SUMMARY).read_text().splitlines()) == 2
    with pytest.raises(ConfigError, match="already holds a run; name another folder"):
        Results.open(tmp_path, ORIGIN)
    later = structs.replace(ORIGIN, started="2026-01-02T00:00:00Z")
    with Results.open(tmp_path, later, resume=True) as results:
        assert results.measurements == [measured(50.0)]
        results.append(measured(60.0))
    assert read(tmp_path) == (ORIGIN, [measured(50.0), measured(60.0)])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"command": "tune"}, "its command"),
        ({"target": "other.py:Model"}, "its target"),
        ({"slo": "p99<=5ms"}, "its slo"),
        ({"seed": 8}, "its seed"),
        ({"penstock": "0.0.1"}, "its penstock"),
        ({"machine": {"cpu": "D"}}, "its cpu"),
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path: Path, change: dict[str, object], named: str) -> None:
    Results.open(tmp_path, ORIGIN).close()
    with pytest.raises(ConfigError, match=f"another run: {named} is .*, now it is .*; name another folder"):
        Results.open(tmp_path, structs.replace(ORIGIN, **change), resume=True)


def test_a_folder_of_another_schema_is_refused(tmp_path: Path) -> None:
    Results.open(tmp_path, ORIGIN).close()
    content = json.loads((tmp_path / RUN).read_text()) | {"schema": 99, "slo": {"new": "shape"}}
    (tmp_path / RUN).write_text(json.dumps(content))
    for use in (lambda: read(tmp_path), lambda: Results.open(tmp_path, ORIGIN, resume=True)):
        with pytest.raises(ConfigError, match=r"results of schema 99, this penstock \(.*\) reads 1; measure again"):
            use()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"schema": "one"}', '{"schema": 1}', "\0\0"])
def test_an_invalid_run_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / RUN).write_text(content)
    with pytest.raises(ConfigError, match="does not describe a run"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["thesis.txt"], r"has thesis\.txt, but no run\.json"),
        ([RECORDS], r"records\.jsonl without run\.json"),
        ([], r"run\.json: No such file"),
    ],
)
def test_a_folder_with_other_content_is_not_written_to(tmp_path: Path, names: list[str], why: str) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=why):
        Results.open(tmp_path, ORIGIN) if names else read(tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine") for name in names]


def test_a_start_that_was_killed_immediately_is_no_run(tmp_path: Path) -> None:
    (tmp_path / RECORDS).touch()
    with Results.open(tmp_path, ORIGIN) as results:
        results.append(measured(50.0))
    assert read(tmp_path) == (ORIGIN, [measured(50.0)])


def test_a_missing_or_unreadable_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(PenstockError, match="cannot write to"):
        Results.open(tmp_path / "file", ORIGIN)
    Results.open(folder := tmp_path / "run", ORIGIN).close()
    (folder / RECORDS).unlink()
    assert read(folder) == (ORIGIN, [])
    (folder / RECORDS).mkdir()
    with pytest.raises(ConfigError, match=r"records\.jsonl cannot be read: Is a directory"):
        read(folder)


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with Results.open(tmp_path, ORIGIN), pytest.raises(ConfigError, match="another run is writing to"):
        Results.open(tmp_path, ORIGIN, resume=True)


@pytest.mark.parametrize("torn", [b'{"load":{"mode":"op', b"\0\0\0\0\n", b"\xff\xfe", b"{}\n"])
def test_a_last_line_cut_short_is_dropped(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with Results.open(tmp_path, ORIGIN) as results:
        results.append(measured(50.0))
    with (tmp_path / RECORDS).open("ab") as f:
        f.write(torn)
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path)[1] == [measured(50.0)]
    assert f"bytes={len(torn)} dropped=true" in caplog.text
    with Results.open(tmp_path, ORIGIN, resume=True) as results:
        results.append(measured(60.0))
    assert read(tmp_path)[1] == [measured(50.0), measured(60.0)]


def test_an_invalid_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    with Results.open(tmp_path, ORIGIN) as results:
        results.append(measured(50.0))
    content = (tmp_path / RECORDS).read_bytes()
    (tmp_path / RECORDS).write_bytes(content + b"garbage\n" + content)
    with pytest.raises(ConfigError, match="line 2: not a measurement"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="line 2"):
        Results.open(tmp_path, ORIGIN, resume=True)


_WRITES = """
import itertools, sys
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.results import Origin
from penstock.perf.bench.results import Results
results = Results.open(sys.argv[1], Origin(command="bench"))
for number in itertools.count():
    results.append(Measurement(load=Load(mode="closed", concurrency=1), repeat=number, histogram="x" * 9000))
    print(number, flush=True)
"""


def test_a_run_that_is_killed_loses_at_most_the_measurement_in_progress(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITES, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.kill()
        synced = [19, *map(int, writer.stdout.read().split())]
    kept = [m.repeat for m in read(tmp_path)[1]]
    assert kept == list(range(len(kept)))
    assert len(kept) in (synced[-1] + 1, synced[-1] + 2)
    with Results.open(tmp_path, Origin(command="bench"), resume=True) as results:
        assert len(results.measurements) == len(kept)


_FILLS = """
import resource, sys
from penstock.perf.bench.measurement import Load, Measurement
from penstock.perf.bench.results import Origin
from penstock.perf.bench.results import Results
from penstock.errors import PenstockError
results = Results.open(sys.argv[1], Origin(command="bench"))
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
try:
    for number in range(1000):
        results.append(Measurement(load=Load(mode="closed", concurrency=1), repeat=number))
except PenstockError as error:
    print(number, len(results.measurements), error)
results.close()
"""


def test_a_failed_write_keeps_earlier_measurements(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FILLS, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kept, in_memory, *words = done.stdout.split()
    assert " ".join(words).startswith("the limit on file sizes is reached")
    assert int(in_memory) == int(kept) + 1  # the one that could not be written is still printed
    content = (tmp_path / RECORDS).read_bytes()
    assert content.endswith(b"\n")
    assert [m.repeat for m in read(tmp_path)[1]] == list(range(int(kept)))
    assert len((tmp_path / SUMMARY).read_text().splitlines()) == 1 + int(in_memory)


def test_a_full_disk_is_reported_and_a_run_resumes_once_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    results = Results.open(tmp_path, ORIGIN)
    results.append(measured(50.0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(PenstockError, match=r"the disk is full: .* takes no more results. Its content is intact"):
            results.append(measured(60.0))
    assert read(tmp_path)[1] == [measured(50.0)]
    results.append(measured(70.0))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(PenstockError, match="the disk is full"):
            results.close()
    assert sorted(os.listdir(tmp_path)) == [RECORDS, RUN], "no partial summary"
    assert read(tmp_path)[1] == [measured(50.0), measured(70.0)]


def test_the_summary_has_no_figures_of_an_invalid_run() -> None:
    good = measured(50.0, latency=Latency(p50_s=0.01, p99_s=0.02), errors={"503": 2, "lost": 1})
    bad = measured(60.0, latency=Latency(p50_s=0.01), invalid=["the generator was late"])
    first, second = csv.DictReader(summary([good, bad]).splitlines())
    assert (first["label"], first["load"], first["p99_s"]) == ("batch=4", "50/s poisson", "0.02")
    assert (first["errors"], first["error_share"], first["p999_s"]) == ("503:2 lost:1", "0.03", "")
    assert (second["throughput_per_s"], second["p50_s"]) == ("", "")
    assert second["invalid"] == "the generator was late"


def test_the_summary_has_the_servers_side_if_known() -> None:
    shown = {
        "queue_s": 0.1, "preprocess_s": 0.2, "run_s": 0.3, "postprocess_s": 0.4, "mean_batch": 5.5, "cpu_cores": 1.5,
        "memory_bytes": 9,
    }  # fmt: skip
    side = ServerStats(**{name.removesuffix("_cores"): value for name, value in shown.items()})
    known, unknown = csv.DictReader(summary([measured(50.0, server=side), measured(60.0)]).splitlines())
    assert {name: known[name] for name in shown} == {name: f"{value}" for name, value in shown.items()}
    assert {unknown[name] for name in shown} == {""}


def test_a_machine_is_busy_with_more_work_than_half_its_cores_do() -> None:
    def busy(load: float) -> str:
        return structs.replace(ORIGIN, machine={"load_before": load, "cores": 8}).busy

    assert (ORIGIN.busy, busy(0.5), busy(4.0)) == ("", "", "")
    assert busy(4.2) == "the machine was busy before the run began: load 4.2 on 8 cores"


# ---- the origin


def test_a_machine_has_the_facts_that_a_reader_compares() -> None:
    found = machine()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert set(found) == {"cpu", "cores", "memory_gib", "system", "gpus", "load_before"}


def test_a_machine_without_proc_and_gpus_is_described_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results_file, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(results_file.Gpus, "read", lambda self: [])
    found = machine()
    assert found["cpu"]
    assert found["gpus"] == []


def test_versions_are_those_of_installed_packages() -> None:
    found = versions(["numpy", "no-such-library"])
    assert {"python", "penstock", "msgspec", "numpy"} <= set(found)
    assert "no-such-library" not in found


def test_versions_work_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert "(" not in versions()["penstock"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://h:8080/predictions/m?token=t0p&x=1", "http://h:8080/predictions/m?token=***&x=1"),
        ("https://me:p@ss@h/x.mar?X-Amz-Signature=t0p", "https://***@h/x.mar?X-Amz-Signature=***"),
        ('{"apiKey": "t0 \\"p", "n": 1}', '{"apiKey": ***, "n": 1}'),
        ("{hf_token = 't0 p', n = 1}", "{hf_token = ***, n = 1}"),
        ("Authorization: Bearer t0p", "Authorization: ***"),
        ("PASSWORD=t0p;x", "PASSWORD=***;x"),
        ("http://h/a@b?max_tokens=5&token_file=/f&keyboard=1", "http://h/a@b?max_tokens=5&token_file=/f&keyboard=1"),
        ("package.token:Model", "package.token:Model"),
        ("app.py:Model", "app.py:Model"),
    ],
)
def test_values_of_secret_names_are_hidden(text: str, kept: str) -> None:
    assert redacted(text) == kept


def test_the_command_line_is_stored_without_its_secrets() -> None:
    words = ["bench", "app.py:My Model", "--option", "api_key=t0 p, x", "--option=db.password=t0=p", "--set", "a.key="]
    expected = "penstock bench 'app.py:My Model' --option 'api_key=***' '--option=db.password=***' --set a.key="
    assert command_line([*words, "--token-file", "f"]) == f"{expected} --token-file f"


def test_bytes_that_are_not_text_are_escaped() -> None:
    assert command_line(["a\udcff", "key=\udcff", "\udcffkey=x"]) == "penstock 'a\\udcff' 'key=***' '\\udcffkey=***'"
