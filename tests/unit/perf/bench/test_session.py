from __future__ import annotations

from msgspec import structs

from penstock.perf.bench.measurement import Gpu, Latency, Load, Measurement, ObjectiveResult, ServerStats
from penstock.perf.bench.report import in_a_line
from penstock.perf.bench.session import notes, rows, server_lines

RUN = Measurement(
    load=Load(mode="closed", concurrency=8),
    requests=1000,
    answered=998,
    errors={"503": 2},
    throughput=1234.56,
    latency=Latency(mean_s=0.006, p50_s=0.005, p90_s=0.008, p99_s=0.0123, max_s=0.5),
    server=ServerStats(
        queue_s=0.001,
        run_s=0.004,
        batches={"1": 3, "2": 0, "8": 120},
        mean_batch=7.84,
        cpu=1.5,
        memory_bytes=300 * 2**20,
        gpus=[Gpu(name="NVIDIA H200", utilization=0.8, memory_bytes=2**30)],
    ),
    slo=[ObjectiveResult(text="p99<=10ms", value=0.0123, met=False)],
    first_error="status 503: busy",
    caveats=["a closed loop cannot see stalls"],
)
BROKEN = Measurement(
    load=Load(mode="closed", concurrency=64),
    throughput=9.0,
    invalid=["the generator was late"],
    caveats=["a closed loop cannot see stalls"],
)


def test_a_run_is_a_row_with_latencies_in_milliseconds_and_na_where_samples_are_too_few() -> None:
    heading, row = rows([RUN])
    assert dict(zip(heading, row, strict=True)) == {
        "load": "8 clients", "good/s": "1,234.6", "mean ms": "6", "p50 ms": "5", "p90 ms": "8", "p99 ms": "12.3",
        "p99.9 ms": "n/a", "max ms": "500", "errors": "503:2", "batch": "7.8", "cores": "1.50", "SLO": "MISSED",
    }  # fmt: skip


def test_an_invalid_run_has_a_word_in_the_place_of_its_numbers() -> None:
    table = rows([RUN, BROKEN])
    assert table[2][:2] == ["64 clients", "INVALID"]
    assert not any(table[2][2:])
    assert "9" not in " ".join(table[2][2:])


def test_columns_that_nothing_is_known_of_are_left_out_and_repeats_are_numbered() -> None:
    assert rows([BROKEN, BROKEN]) == [["load", "good/s"], *[["64 clients", "INVALID"]] * 2]
    heading, first, second = rows([Measurement(load=RUN.load), Measurement(load=RUN.load, repeat=1)])
    assert not {"batch", "SLO", "errors"} & {*heading}
    assert (first[0], second[0]) == ("8 clients #1", "8 clients #2")


def test_a_load_is_labelled_by_its_parameters() -> None:
    loads = [Load(mode="closed", concurrency=1), Load(mode="open", rate=0.5, arrival="gamma:2")]
    loads.append(Load(mode="open", arrival="trace:a.jsonl"))
    assert [load.label for load in loads] == ["1 client", "0.5/s gamma:2", "trace:a.jsonl"]


def test_a_note_on_all_runs_appears_once_and_errors_with_their_load() -> None:
    clean = Measurement(load=Load(mode="closed", concurrency=1), caveats=RUN.caveats)
    assert notes([clean, RUN]) == ["a closed loop cannot see stalls", "8 clients: first error: status 503: busy"]


def test_an_invalid_run_says_why() -> None:
    assert notes([RUN, BROKEN])[-1] == "64 clients: INVALID: the generator was late"


def test_the_servers_side_is_one_line_a_run() -> None:
    assert server_lines([RUN, BROKEN]) == [
        "8 clients: queue 1 ms · run 4 ms · batches by rows <=1:3 <=8:120 · memory 300 MiB · NVIDIA H200 80%, 1 GiB"
    ]
    assert server_lines([Measurement(load=RUN.load, server=ServerStats())]) == []


def test_a_finished_run_is_printed_in_one_line() -> None:
    assert in_a_line(RUN) == "1,234.6/s, p50 5 ms, p99 12.3 ms, 0.20 % errors"
    assert in_a_line(BROKEN) == "INVALID: the generator was late"


def test_many_errors_miss_an_slo_that_does_not_limit_them() -> None:
    kept = ObjectiveResult(text="p99<=10ms", value=0.009, met=True)
    few = Measurement(load=Load(mode="closed", concurrency=1), requests=100, errors={"503": 1}, slo=[kept])
    many = structs.replace(few, load=Load(mode="closed", concurrency=8), errors={"503": 50})
    borne = structs.replace(many, slo=[kept, ObjectiveResult(text="error<=60%", value=0.5, met=True)])
    assert (few.met, many.met, borne.met) == (True, False, True)
