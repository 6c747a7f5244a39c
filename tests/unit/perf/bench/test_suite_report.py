"""The suite's table: TorchServe's columns in order, medians of repeats, and empty cells for unknown figures."""

import csv
import io
from typing import Any

import pytest
from msgspec import structs

from penstock.perf.bench.document import markdown
from penstock.perf.bench.measurement import Gpu, Latency, Load, Measurement, ObjectiveResult, ServerStats, parse_slo
from penstock.perf.bench.results import Origin
from penstock.perf.bench.suite_report import COLUMNS, SuiteRow, ab_report, rows_of, suite_report
from penstock.perf.bench.suite_yaml import Processor, SuiteCase, suite_points

MACHINE = {"cpu": "Fast CPU", "cores": 4, "memory_gib": 8.0, "gpus": ["Card", "Card"]}
CASE = SuiteCase(model="resnet", mode="eager_mode", url="r.mar", batch_size=(1, 8), batch_delay_ms=50, input="cat.jpg")
SINGLE, EIGHT = suite_points(CASE)
SERVER = ServerStats(
    queue_s=0.002,
    preprocess_s=0.001,
    run_s=0.004,
    postprocess_s=0.001,
    queue_at_s={"p50": 0.001, "p90": 0.003, "p99": 0.009},
    worker_at_s={"p50": 0.006, "p90": 0.007, "p99": 0.008},
    mean_batch=6.5,
    cpu=2.0,
    memory_bytes=2**30,
    gpus=[
        Gpu(name="Card", utilization=0.5, memory_bytes=2**31, total_bytes=2**32),
        Gpu(name="Card", utilization=0.7, memory_bytes=2**30, total_bytes=2**31),
    ],
)


def origin(**more: Any) -> Origin:
    return Origin(command="benchmark-suite", machine=MACHINE, **more)


def measured(label: str, throughput: float, **more: object) -> Measurement:
    p50 = 10 / throughput
    latency = Latency(mean_s=p50, p50_s=p50, p75_s=p50, p90_s=2 * p50, p95_s=2 * p50, p99_s=3 * p50)
    load = Load(mode="closed", concurrency=10, requests=100)
    given = {"requests": 100, "answered": 100, "latency": latency, "server": SERVER, **more}
    return Measurement(load=load, label=label, throughput=throughput, **given)  # type: ignore[arg-type]


def cells(rows: list[SuiteRow]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(ab_report(rows, MACHINE))))


def test_the_columns_of_torchserves_report_come_first_and_in_its_order() -> None:
    theirs = (
        "Benchmark|Batch size|Batch delay|Workers|Model|Concurrency|Input|Requests|TS failed requests|TS throughput|"
        "TS latency P50|TS latency P90|TS latency P99|TS latency mean|TS error rate|Model_p50|Model_p90|Model_p99|"
        "Queue time p50|Queue time p90|Queue time p99|predict_mean|handler_time_mean|waiting_time_mean|"
        "worker_thread_mean|cpu_percentage_mean|memory_percentage_mean|gpu_percentage_mean|"
        "gpu_memory_percentage_mean|gpu_memory_used_mean"
    )
    assert "|".join(COLUMNS[:30]) == theirs


def test_a_row_has_the_medians_and_the_spread_of_its_repeats() -> None:
    errors = ({"503": 4}, {}, {"lost": 1, "503": 1})
    runs = [measured(SINGLE.label, rate, errors=e) for rate, e in zip((90.0, 100.0, 120.0), errors, strict=True)]
    first, second = cells(rows_of([SINGLE, EIGHT], runs))
    expected = {
        "Batch size": "1", "Batch delay": "50", "Workers": "1", "Model": "resnet", "Concurrency": "10",
        "Input": "cat.jpg", "Requests": "100", "TS failed requests": "2", "TS throughput": "100.0",
        "TS latency P50": "100.0", "TS latency P99": "300.0", "TS error rate": "2.0", "Model_p90": "7.0",
        "Queue time p99": "9.0", "predict_mean": "4.0", "handler_time_mean": "6.0", "waiting_time_mean": "2.0",
        "cpu_percentage_mean": "50.0", "memory_percentage_mean": "12.5", "gpu_percentage_mean": "60.0",
        "gpu_memory_percentage_mean": "50.0", "gpu_memory_used_mean": "1536.0", "TS latency P99.9": "",
        "Mode": "eager_mode", "Processor": "cpu",
        "Batch size mean": "6.5", "Server CPU cores": "2.0", "Server memory MB": "1024.0",
        "Repeats": "3", "Throughput spread %": "30.0", "SLO met": "", "Invalid": "",
        "Machine": "Fast CPU, 4 cores, 2 x Card",
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected
    assert (second["Batch size"], second["Repeats"], second["TS throughput"]) == ("8", "0", "")
    (two, _) = cells(rows_of([SINGLE, EIGHT], runs[:2]))
    assert float(two["Throughput spread %"]) == pytest.approx(10.526)


def test_an_invalid_run_has_no_figures_and_says_why() -> None:
    (row,) = cells(rows_of([SINGLE], [measured(SINGLE.label, 5.0, invalid=["the generator was overloaded"])]))
    assert row["Invalid"] == "the generator was overloaded"
    assert not row["TS throughput"] + row["TS latency P50"] + row["TS failed requests"]
    page = markdown(suite_report(rows_of([SINGLE], [measured(SINGLE.label, 5.0, invalid=["too busy"])]), origin()))
    assert "**resnet eager_mode: no valid measurement.**" in page
    assert "| cpu | 1 | 1 | 10 clients | INVALID |" in page
    assert "## Invalid runs\n\n- too busy\n" in page


def test_a_repeat_that_was_invalid_does_not_count_with_the_others() -> None:
    runs = [measured(SINGLE.label, 100.0), measured(SINGLE.label, 5.0, invalid=["overloaded"], repeat=1)]
    (row,) = cells(found := rows_of([SINGLE], runs))
    assert (row["TS throughput"], row["Throughput spread %"], row["Invalid"]) == ("100.0", "", "overloaded")
    page = markdown(suite_report(found, origin()))
    assert "## Invalid runs\n\n- overloaded\n" in page
    assert "100/s, p99 300 ms." in page


def judged(*clauses: bool | None) -> list[SuiteRow]:
    """A row whose repeats met the SLO, missed it, or are too short; and one INVALID repeat."""
    runs = [measured(SINGLE.label, 100.0, slo=[ObjectiveResult(text="p99<=1s", value=0.1, met=met)]) for met in clauses]
    return rows_of([SINGLE], [*runs, measured(SINGLE.label, 5.0, invalid=["overloaded"])])


@pytest.mark.parametrize(
    ("clauses", "cell", "choice"),
    [
        ((True, True), "yes", "100/s within p99<=1s, p99 300 ms."),
        ((True, False, None), "no", "no run meets p99<=1s."),
        ((True, None), "", "no run is known to meet p99<=1s; runs marked n/a were too short."),
        ((), "", "no valid measurement."),
    ],
)
def test_all_valid_repeats_judge_the_slo(clauses: tuple[bool | None, ...], cell: str, choice: str) -> None:
    (row,) = cells(found := judged(*clauses))
    assert row["SLO met"] == cell
    assert choice in markdown(suite_report(found, origin(slo="p99<=1s"))).splitlines()[2]


def test_a_percentile_missing_from_one_repeat_is_empty() -> None:
    (row,) = cells(rows_of([SINGLE], [measured(SINGLE.label, 100.0), measured(SINGLE.label, 1.0, latency=Latency())]))
    assert (row["TS throughput"], row["TS latency P99"], row["Model_p50"]) == ("50.5", "", "6.0")
    page = markdown(suite_report(rows_of([SINGLE], [measured(SINGLE.label, 1.0, latency=Latency())]), origin()))
    assert "10 clients: 1/s, p99 n/a.**" in page


def test_the_report_has_the_first_error_and_no_secrets() -> None:
    case = structs.replace(CASE, url="https://me:t0p@h/r.mar?sig=1&token=t0p")
    point = suite_points(case)[0]
    runs = [measured(point.label, 9.0, errors={"500": 3}, first_error="500: no <b>", repeat=n) for n in range(2)]
    page = markdown(suite_report(rows_of([point], runs), origin()))
    assert "First error:\n\n```\n500: no <b>\n```" in page
    assert "https://\\*\\*\\*@h/r.mar?sig=1&token=\\*\\*\\*: 100 requests per run" in page


def test_a_server_without_stats_leaves_its_columns_empty() -> None:
    (row,) = cells(rows_of([SINGLE], [measured(SINGLE.label, 100.0, server=None)]))
    assert row["TS throughput"] == "100.0"
    assert not row["Model_p50"] + row["handler_time_mean"] + row["cpu_percentage_mean"] + row["gpu_percentage_mean"]
    side = ServerStats(preprocess_s=0.1, gpus=[Gpu(name="Card", utilization=0.5, memory_bytes=2**20)])
    (row,) = cells(rows_of([SINGLE], [measured(SINGLE.label, 100.0, server=side)]))
    assert (row["handler_time_mean"], row["gpu_memory_percentage_mean"], row["gpu_percentage_mean"]) == ("", "", "50.0")
    (row,) = cells(rows_of([SINGLE], [measured(SINGLE.label, 100.0, server=structs.replace(side, gpus=[]))]))
    assert row["gpu_memory_used_mean"] == ""


def test_the_report_starts_with_the_best_run_within_the_slo() -> None:
    slo = parse_slo("p99<=250ms")
    runs = []
    for point, rate in ((SINGLE, 200.0), (EIGHT, 100.0)):  # p99 of 150 and 300 ms
        run = measured(point.label, rate, caveats=["a closed loop sees no stalls"])
        caveats = [*run.caveats, *(["it got slower"] * (rate < 200))]
        runs.append(measured(point.label, rate, caveats=caveats, slo=slo.judge(run)))
    rows = rows_of([SINGLE, EIGHT], runs)
    page = markdown(suite_report(rows, origin(versions={"python": "3.11"}, slo=slo.text, line="penstock x")))
    choice, table = page.splitlines()[2], [line for line in page.splitlines() if line.startswith("| cpu | 1")]
    assert choice == "**resnet eager_mode: cpu, 1 worker, batch 1, 10 clients: 200/s within p99<=250ms, p99 150 ms.**"
    assert [line.split(" | ")[4] for line in table] == ["met", "missed"]
    assert "\n- a closed loop sees no stalls\n" in page
    assert "\n- resnet eager_mode: cpu, 1 worker, batch 8, 10 clients: it got slower\n" in page
    assert "```\npenstock x\n```" in page
    assert "a batch waits at most 50 ms to fill" in page
    none = markdown(suite_report(rows_of([EIGHT], runs), origin(slo=slo.text)))
    assert "**resnet eager_mode: no run meets p99<=250ms.**" in none


def test_runs_whose_repeats_overlap_are_a_tie_that_the_cheaper_one_wins() -> None:
    (two,) = suite_points(structs.replace(CASE, batch_size=(1,), workers=(2,)))
    rates = {SINGLE.label: (190.0, 196.0, 200.0), two.label: (195.0, 202.0, 210.0)}
    runs = [measured(label, rate, repeat=n) for label, found in rates.items() for n, rate in enumerate(found)]
    choice = markdown(suite_report(rows_of([two, SINGLE], runs), origin())).splitlines()[2]
    assert choice.startswith("**resnet eager_mode: cpu, 1 worker, batch 1, 10 clients: 196/s")
    assert choice.endswith("A tie, because the repeats overlap: cpu, 2 workers, batch 1, 10 clients.**")
    apart = [m if m.label == two.label else structs.replace(m, throughput=m.throughput / 2) for m in runs]
    choice = markdown(suite_report(rows_of([two, SINGLE], apart), origin())).splitlines()[2]
    assert choice.startswith("**resnet eager_mode: cpu, 2 workers, batch 1, 10 clients: 202/s, p99")
    assert "tie" not in choice


def test_the_report_has_a_line_for_each_run() -> None:
    (_, *wide) = suite_points(structs.replace(CASE, batch_size=(1, 8, 16)))
    runs = [measured(SINGLE.label, 100.0), measured(wide[0].label, 200.0)]
    page = markdown(suite_report(rows_of([SINGLE, *wide], runs), origin())).splitlines()
    assert page[2] == "**resnet eager_mode: cpu, 1 worker, batch 8, 10 clients: 200/s, p99 150 ms.**"
    assert "r.mar: 100 requests per run with cat.jpg; a batch waits at most 50 ms to fill." in page
    start = page.index(next(line for line in page if line.startswith("| processor")))
    header, _, *lines = [line.strip("| ").split(" | ") for line in page[start : start + 5]]
    shown = ["workers", "batch", "load", "SLO", "throughput/s", "p50", "p90", "p99 (95 %)", "errors"]
    shown += ["mean", "batch p50"]
    rows = [dict(zip(header, line, strict=False)) for line in lines]
    assert [[row.get(name, "") for name in shown] for row in rows] == [
        ["1", "1", "10 clients", "", "100", "100 ms", "200 ms", "300 ms", "0", "100 ms", "6 ms"],
        ["1", "8", "10 clients", "", "200", "50 ms", "100 ms", "150 ms", "0", "50 ms", "6 ms"],
        ["1", "16", "10 clients", "not run", "", "", "", "", "", "", ""],
    ]
    assert "| resnet eager_mode: cpu, 1 worker, batch 1, 10 clients | 2 ms | 1 ms | 4 ms | 1 ms | 6.5 | 2 |" in "".join(
        page
    )
    own = structs.replace(CASE, input=None)
    assert "with its own example; a batch" in markdown(suite_report(rows_of(suite_points(own), []), origin()))


def test_runs_differ_by_registration_and_by_clients() -> None:
    case = SuiteCase(model="m", mode="e", url="m.mar", concurrency=(10, 20), processors=(Processor(), Processor("all")))
    rows = rows_of(suite_points(case), [measured(suite_points(case)[1].label, 7.0)])
    assert [(r.point.processor.text, r.load.concurrency, len(r.runs)) for r in rows] == [
        ("cpu", 10, 0),
        ("cpu", 20, 0),
        ("gpus all", 10, 1),
        ("gpus all", 20, 0),
    ]
