"""`penstock simulate` reads arrivals and costs and prints the prediction for each combination."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.perf.cli import simulate
from support.pages import ROOT, blocks


def run(*arguments: str) -> Result:
    return CliRunner().invoke(simulate, list(arguments), catch_exceptions=False)


def output(*arguments: str) -> str:
    result = run("--cost", "5ms,0.2ms", "--seconds", "2", *arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "arrivals.jsonl"
    lines = [{"t": 5 + n / 200, "rows": 1 + n % 2, "bytes": 10, "model": "ab"[n % 4 == 0]} for n in range(800)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_table_has_a_line_for_each_combination_and_then_the_best() -> None:
    lines = output("--arrivals", "poisson:500", "--batch", "1,8,16", "--slo", "p99<=50ms").splitlines()
    assert "requests in" in lines[0]
    assert lines[1].split()[:3] == ["policy", "instances", "batch"]
    assert [line.split()[:3] for line in lines[2:9]] == [
        *(["adaptive", "1", size] for size in ("1", "8", "16")),
        *(["fixed:5ms", "1", size] for size in ("1", "8", "16")),
        ["none", "1", "1"],
    ]
    assert lines[2].endswith("does not keep up")
    assert lines[4].endswith("met")
    assert lines[9].endswith("meets p99<=50ms with the fewest instances")


def test_the_docs_page_shows_what_its_commands_print(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [block for _, block in blocks((ROOT / "docs/simulate.md").read_text())]
    monkeypatch.chdir(Path(trace).parent)
    results = [
        run(*shlex.split(line)[2:], *(["--model", "a"] if "jsonl" in line else []))
        for line in "".join(shown).splitlines()
        if line.startswith("penstock simulate")
    ]
    assert [result.exit_code for result in results] == [0, 0, 0, 0]
    assert results[0].stdout == shown[1]


def test_it_says_when_no_combination_is_good_enough() -> None:
    assert output("--arrivals", "poisson:500", "--batch", "1").endswith("none of them keeps up\n")
    assert output("--arrivals", "gamma:2:50", "--slo", "p99<=1ms").endswith("none of them meets p99<=1ms\n")


@pytest.mark.parametrize("slo", [[], ["--slo", "p99<=1s"]])
def test_too_few_requests_give_no_verdict(slo: list[str]) -> None:
    last = output("--arrivals", "constant:20", "--batch", "1", *slo).splitlines()[-1]
    assert last.startswith("too few requests to choose the best")


def test_a_recording_is_replayed_with_its_rows(trace: str) -> None:
    lines = output(
        "--arrivals", trace, "--model", "a", "--policies", "adaptive", "--batch", "16", "--json"
    ).splitlines()
    result = json.loads(lines[0])
    assert len(lines) == 1
    assert result["offered"] == pytest.approx(150, rel=0.02)
    assert result["batch"] == 16
    faster = output(
        "--arrivals", trace, "--model", "a", "--policies", "adaptive", "--batch", "16", "--rate", "600", "--json"
    )
    assert json.loads(faster)["offered"] == pytest.approx(600, rel=0.02)


def test_a_recording_of_several_models_needs_a_model_name(trace: str) -> None:
    result = run("--arrivals", trace, "--cost", "5ms,0.2ms")
    assert result.exit_code == 2
    assert result.output.startswith("penstock: ")
    assert "has requests for a, b; name one with --model" in result.output


def test_with_lengths_the_cost_counts_tokens_and_padding_is_shown(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("10\n10\n200\n")
    asked = (
        "--arrivals",
        "constant:200",
        "--cost",
        "1ms,10us",
        "--jitter",
        "0",
        "--policies",
        "adaptive",
        "--batch",
        "8",
    )
    short, texts, bounded = (
        output(*asked, "--lengths", *more, "--json")
        for more in (["10..10"], [str(tmp_path / "lengths")], [str(tmp_path / "lengths"), "--max-tokens", "200"])
    )
    assert json.loads(short)["capacity"] == pytest.approx(8 / (0.001 + 80 * 10e-6))
    assert json.loads(short)["padding"] == 0
    assert json.loads(bounded)["padding"] <= json.loads(texts)["padding"] < 0.5
    assert json.loads(bounded)["capacity"] < json.loads(texts)["capacity"] < json.loads(short)["capacity"]
    assert output(*asked, "--lengths", "8..256").splitlines()[1].endswith("padding")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arrivals", "poisson:5", "--lengths", "9..8"], 'lengths "9..8": expected LEAST..MOST tokens'),
        (["--arrivals", "poisson:5", "--lengths", "no.txt"], 'lengths "no.txt": expected LEAST..MOST tokens'),
        (["--arrivals", "poisson:5", "--lengths", "9..9", "--max-tokens", "8"], "a row has 9 tokens"),
        (["--arrivals", "poisson:5", "--max-tokens", "8"], "it bounds batches of rows with --lengths"),
        (["--arrivals", "poisson"], "expected a rate after the kind"),
        (["--arrivals", "poisson:x"], "expected a rate after the kind"),
        (["--arrivals", "poisson:0"], "expected a rate and a time over 0"),
        (["--arrivals", "poisson:0.001"], "no request arrives within"),
        (["--arrivals", "gamma:500"], "expected a coefficient of variation"),
        (["--arrivals", "no.jsonl"], 'arrivals "no.jsonl": there is no such file; expected a file of'),
        (["--arrivals", "poison:500"], "poisson:RATE, constant:RATE or gamma:CV:RATE; did you mean 'poisson'?"),
        (["--arrivals", "poisson:5", "--rate", "7"], "are for a file of arrivals"),
        (["--arrivals", "poisson:5", "--policies", "greedy"], "unknown policy 'greedy'"),
        (["--arrivals", "poisson:5", "--batch", "8..1"], "runs backwards"),
        (["--arrivals", "poisson:5", "--batch", "auto"], "expected whole numbers"),
        (["--arrivals", "poisson:5", "--slo", "p99"], "expected NAME<=LIMIT"),
        *((["--arrivals", "poisson:5", "--cost", text], "5ms") for text in ("", "5", "5ms", "5ms,1", "5 m s,1ms")),
        (["--arrivals", "poisson:5", "--cost", "5ms,1ms,1ms"], "expected A,B"),
        (["--arrivals", "poisson:5", "--cost", "-5ms,1ms"], "is no time"),
        (["--arrivals", "poisson:5", "--cost", "0ms,0ms"], "takes no time needs no policy"),
        (["--arrivals", "poisson:5", "--policies", ""], "unknown policy"),
        (["--arrivals", "poisson:5", "--policies", "adaptve"], "adaptive"),
        (["--arrivals", "poisson:5", "--policies", "fixed:5"], "no time"),
        (["--arrivals", "poisson:5", "--policies", "none:5ms"], "holds nothing"),
        (["--arrivals", "poisson:5", "--handover", "5"], "is no time"),
        (["--arrivals", "poisson:5", "--sizes", "8,4"], "--sizes: found [8, 4], expected ascending whole numbers"),
        (["--arrivals", "poisson:5", "--sizes", "some"], "--sizes: found [some], expected ascending whole numbers"),
        (["--arrivals", "poisson:5", "--sizes", "1,8", "--batch", "4,8"], "--batch 4,8: 4 is none of the sizes 1, 8"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(arguments: list[str], message: str) -> None:
    result = run("--cost", "5ms,0.2ms", *arguments)
    assert result.exit_code == 2
    assert message in result.output
