"""`penstock plan` plans for recorded and synthetic arrivals, and explains what cannot be planned."""

import functools
import json
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.cli.main import main
from penstock.perf.bench.measurement import parse_slo
from penstock.perf.bench.workload import parse_arrival, times
from penstock.perf.simulate.replay import PolicyChoice, parse_cost, replay
from penstock.perf.simulate.simulator import OpenLoop, ServiceTime

COST = ("--cost", "20ms,2ms")
SHORT = ("--seconds", "5", "--seed", "3")


@pytest.fixture(autouse=True)
def few_other_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.perf.simulate.plan.PEAK", 4000)


@functools.cache
def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], catch_exceptions=False)


def planned(*arguments: str, status: int = 0) -> dict[str, Any]:
    result = run(*COST, *SHORT, "--json", *arguments)
    assert result.exit_code == status, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def recording(path: Path, times: list[float], **more: Any) -> str:
    path.write_text("".join(json.dumps({"t": t, **more}) + "\n" for t in times))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rng = random.Random(1)
    waves = [rng.uniform(0, 150) for _ in range(1500)] + [rng.uniform(60, 90) for _ in range(4500)]
    return recording(tmp_path / "day.jsonl", sorted(waves), rows=1)


def test_a_plan_names_instances_batch_target_memory_and_price_and_the_json_has_the_same_numbers() -> None:
    asked = ("--arrivals", "poisson:600", "--slo", "p99<=120ms", "--price", "2.5", "--memory", "2GiB")
    result, plan = run(*COST, *SHORT, *asked), planned(*asked)
    assert result.exit_code == 0
    found = {line[:23].strip(): line[24:] for line in result.stdout.splitlines()}
    instances = int(found["instances"])
    assert 2 <= instances <= 4, "a full batch of 32 gives an instance 381/s"
    assert found["memory"] == f"{2 * instances} GiB"
    assert found["price"].startswith(f"{2.5 * instances:g} per hour")
    assert "requests/s per instance" in found["scale up at"]
    assert "meets p99<=120ms" in result.stdout.splitlines()[-1]
    assert plan["met"]
    assert plan["instances"] == plan["needed"] == plan["chosen"]["instances"] == instances
    assert plan["chosen"]["latency"]["p99_s"] <= 0.12
    assert plan["cost"]["hour"] == 2.5 * instances
    rate = plan["day"]["requests"] / plan["day"]["seconds"]
    assert plan["cost"]["million"] == pytest.approx(plan["cost"]["hour"] / rate / 3600 * 1e6)
    assert plan["limit"]["rate"] >= plan["chosen"]["offered"]
    assert plan["full_rate"] == pytest.approx(instances * plan["batch"] / (0.02 + 0.002 * plan["batch"]))


@pytest.mark.parametrize(
    ("arrivals", "cost", "slo"),
    [
        ("poisson:150", "20ms,2ms", "p99<=120ms"),
        pytest.param("gamma:2:600", "10ms,2ms", "p99<=60ms", marks=pytest.mark.slow),
    ],
)
def test_the_promised_p99_is_that_of_arrivals_which_the_plan_has_not_seen(
    arrivals: str, cost: str, slo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The p99 of so few arrivals is 8 to 12 % too low."""
    monkeypatch.setattr("penstock.perf.simulate.plan.PEAK", 40_000)
    asked = ("--arrivals", arrivals, "--cost", cost, "--slo", slo, "--jitter", "0.01", "--seconds", "6")
    plan = json.loads(run(*asked, "--json").stdout)
    assert plan["met"]
    kind, _, rate = arrivals.rpartition(":")
    service = ServiceTime(*parse_cost(cost), 0.01, 0.0)
    p99_s = []
    for seed in (101, 102, 103):
        load = OpenLoop(times(parse_arrival(kind), float(rate), 40_000 / float(rate), seed))
        options = {"handover_s": 0.0005, "seed": seed}
        unseen = replay(
            load, service, parse_slo(slo), PolicyChoice("adaptive"), plan["batch"], plan["instances"], **options
        )
        p99_s.append(unseen.latency.p99_s)
    assert plan["chosen"]["latency"]["p99_s"] == pytest.approx(statistics.median(p99_s), rel=0.08)


@pytest.mark.slow
def test_an_slo_that_the_arrivals_of_the_search_meet_by_luck_gets_another_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.perf.simulate.plan.PEAK", 40_000)
    asked = ("--arrivals", "poisson:150", "--jitter", "0.01", "--slo", "p99<=72ms")
    plan = planned(*asked, "--seconds", "6", "--batch", "8", "--seed", "4")
    lucky = next(one for one in plan["tried"] if one["instances"] == 1)
    assert lucky["latency"]["p99_s"] < 0.072
    assert (plan["met"], plan["instances"]) == (True, 2)
    assert plan["chosen"]["latency"]["p99_s"] < 0.072


def test_failures_are_planned_for_and_the_head_room_says_for_how_many_instances_it_holds() -> None:
    asked = ("--arrivals", "poisson:300", "--slo", "p99<=120ms", "--failures", "2")
    plan = planned(*asked)
    assert plan["instances"] == plan["needed"] + 2
    assert plan["degraded"]["instances"] == plan["needed"]
    assert all(one["met"] for one in plan["degraded"]["slo"])
    assert re.search(r"^head-room +\d+/s within the SLO with 2 down, ", run(*COST, *SHORT, *asked).stdout, re.M)


def test_ceilings_whose_batches_exceed_the_slo_are_not_tried() -> None:
    plan = planned("--arrivals", "poisson:200", "--slo", "p99<=60ms")
    assert {one["batch"] for one in plan["tried"]} <= {1, 2, 4, 8, 16}, "32 rows take 84 ms"


def test_ceilings_are_planned_with_the_sizes_to_which_batches_are_padded() -> None:
    asked = ("--arrivals", "poisson:300", "--slo", "p99<=120ms")
    plan = planned(*asked, "--sizes", "1,4,32")
    assert {one["batch"] for one in plan["tried"]} <= {1, 4, 32}
    assert plan["chosen"]["sizes"] == [size for size in (1, 4, 32) if size <= plan["batch"]]
    assert (
        f"batching.sizes          {plan['chosen']['sizes']}" in run(*COST, *SHORT, *asked, "--sizes", "1,4,32").stdout
    )
    assert planned(*asked, "--sizes", "auto")["chosen"]["sizes"][:3] == [1, 2, 4]


def test_texts_are_planned_by_their_tokens() -> None:
    asked = ("--arrivals", "poisson:2000", "--seconds", "2", "--slo", "p99<=50ms", "--batch", "8,32", "--json")
    flags = [("--lengths", "20..20"), ("--lengths", "8..200"), ("--lengths", "8..200", "--max-tokens", "400")]
    plain, mixed, bounded = (json.loads(run("--cost", "2ms,20us", *asked, *more).stdout) for more in flags)
    assert plain["full_rate"] == pytest.approx(
        plain["instances"] * plain["batch"] / (0.002 + 20e-6 * 20 * plain["batch"])
    )
    assert plain["instances"] < mixed["instances"] <= bounded["instances"]
    assert 0 < mixed["chosen"]["padding"] < 0.5
    refused = run("--arrivals", "poisson:5", "--cost", "http://127.0.0.1:1", "--lengths", "8..9", "--slo", "p99<=1s")
    assert "with --lengths it counts tokens; expected A,B" in refused.output


def test_a_long_recording_is_planned_for_its_busiest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.perf.simulate.planner.PEAK", 4000)
    rng = random.Random(2)
    waves = [rng.uniform(0, 900) for _ in range(3000)] + [rng.uniform(400, 440) for _ in range(8000)]
    plan = json.loads(
        run("--arrivals", recording(tmp_path / "t", sorted(waves)), *COST, "--slo", "p99<=150ms", "--json").stdout
    )
    assert plan["chosen"]["offered"] == pytest.approx(200, rel=0.1)
    assert any(note.startswith("planned for the busiest") for note in plan["notes"])


def test_holes_and_disorder_of_a_recording_are_noted(tmp_path: Path) -> None:
    times = [k * 0.03 for k in range(1000)] + [300 + k * 0.03 for k in range(1000)]
    times[10], times[11] = times[11], times[10]
    plan = json.loads(
        run("--arrivals", recording(tmp_path / "t", times), *COST, "--slo", "p99<=150ms", "--json").stdout
    )
    assert "1 lines were out of order and were sorted" in plan["notes"]
    assert any("a hole of 270 s from second 30 on" in note for note in plan["notes"])


def test_an_unreachable_slo_names_the_best_reachable() -> None:
    plan = planned("--arrivals", "poisson:200", "--slo", "p99<=23ms", "--most", "30", status=1)
    assert not plan["met"]
    assert plan["chosen"]["latency"]["p99_s"] == pytest.approx(0.025, abs=0.002)
    assert plan["instances"] < 30, "more do not help"
    few = run("--arrivals", "poisson:2000", *COST, *SHORT, "--slo", "p99<=150ms", "--most", "2")
    assert few.exit_code == 1
    assert "No instance count up to 2 meets p99<=150ms. The best reachable is " in few.stdout
    assert re.search(r"responses/s at (1,9|2,0)\d\d requests/s", few.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slo", "p99<=22ms"], "one row alone takes 22.5 ms (22 ms and a hand-over of 500 µs)"),
        (["--slo", "error<=1%"], "bounds no latency"),
        (["--slo", "p99<=0ms"], "the limit must be over 0"),
        (["--arrivals", "poisson:0"], "expected a rate and a time over 0"),
        (["--arrivals", "poisson:-5"], "expected a rate and a time over 0"),
        (["--arrivals", "gamma:3:x"], "expected a rate after the kind"),
        (["--arrivals", "no.jsonl"], "there is no such file"),
        (["--cost", "1:10ms,2:2ms"], "the cost falls"),
        (["--cost", "no-folder"], "is no folder, and no cost"),
        (["--cost", "http://127.0.0.1:1"], "127.0.0.1:1"),
        (["--price", "-1"], "'--price': -1.0 is not in the range"),
        (["--price", "0"], "'--price': 0.0 is not in the range"),
        (["--memory", "2"], "expected a size over 0"),
        (["--policy", "adaptive,none"], "`penstock simulate` compares several"),
        (["--most", "3", "--failures", "3"], "expected fewer than the most instances (3)"),
        (["--most", "1001"], "is not in the range 1<=x<=1000"),
        (["--seconds", "1", "--arrivals", "constant:20"], "too few to judge p99<=150ms"),
    ],
)
def test_what_cannot_be_planned_is_explained_in_one_line(arguments: list[str], message: str) -> None:
    given = {"--slo": "p99<=150ms", "--arrivals": "poisson:20", "--cost": "20ms,2ms"}
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    result = run(*(word for pair in given.items() for word in pair))
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_damaged_recording_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"t": 1}\nnonsense\n')
    result = run("--arrivals", str(tmp_path / "trace.jsonl"), *COST, "--slo", "p99<=150ms")
    assert result.exit_code == 2
    assert f"{tmp_path / 'trace.jsonl'}:2: " in result.output


def test_a_recording_is_autoscaled_and_its_folder_has_a_page_with_plots_and_the_numbers(
    trace: str, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "plan"
    slow = ("--cost", "60ms,6ms", "--slo", "p99<=400ms", "--price", "3", "--start", "2s")
    assert run("--arrivals", trace, *slow, "--output", str(folder)).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "report.html", "report.md"]
    page = (folder / "report.html").read_text()
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["day"]["requests"] == 6_000
    assert plan["autoscaled"]["start_s"] == 2
    assert plan["autoscaled"]["instance_s"] < plan["autoscaled"]["fixed_s"]
    assert planned("--arrivals", "poisson:100", "--slo", "p99<=1s")["autoscaled"] is None
    for more in (("--spare", "1"), ("--headroom", "0.5")):
        safer = json.loads(run("--arrivals", trace, *slow, *more, "--json").stdout)["autoscaled"]
        assert safer["late"] < plan["autoscaled"]["late"]
        assert safer["instance_s"] > plan["autoscaled"]["instance_s"]
    assert f"{plan['instances']} instance" in page
    assert "per million requests" in page
    assert "<script" not in page
    pytest.importorskip("matplotlib")
    titles = re.findall(r"<figcaption><strong>(.*?)\.</strong>", page)
    assert titles == [
        "Cost against SLO", "p99 against instances", "Utilisation over time", "p99 over time",
        "Autoscaling over time",
    ]  # fmt: skip
    assert page.count("<svg") == len(titles)
