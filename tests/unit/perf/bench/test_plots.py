import re
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from penstock.errors import ConfigError
from penstock.perf.bench.document import Plot
from penstock.perf.bench.figures import encode
from penstock.perf.bench.measurement import Latency, Measurement, SearchStep, Verdict
from penstock.perf.bench.plots import draw

pytest.importorskip("matplotlib")
Make = Callable[..., Measurement]
SLO = "p99<=100ms"
VERDICT = Verdict(
    slo=SLO, chosen="batch=8,instances=2", default="batch=1,instances=1",
    trajectory=[
        SearchStep(settings="batch=1,instances=1", goodput=90.0, met=True, elapsed_s=3.0),
        SearchStep(settings="batch=8,instances=1", goodput=310.0, met=True, elapsed_s=9.0),
        SearchStep(settings="batch=8,instances=2", goodput=480.0, met=True, elapsed_s=12.0),
        SearchStep(settings="batch=1,instances=2", goodput=70.0, met=False, elapsed_s=15.0),
        SearchStep(settings="batch=32,instances=2"),
    ],
)  # fmt: skip


def texts(plot: Plot) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", plot.svg)


def by_title(plots: list[Plot]) -> dict[str, Plot]:
    return {plot.title: plot for plot in plots}


@pytest.fixture
def tuned(make_measurement: Make) -> list[Measurement]:
    rows = {"batch=1,instances=1": 100.0, "batch=8,instances=2": 500.0}
    return [
        make_measurement(label=label, rate=share * most, most=most, slo=SLO)
        for label, most in rows.items()
        for share in (0.3, 0.9)
    ]


def test_a_search_has_all_seven_plots(tuned: list[Measurement]) -> None:
    plots = by_title(draw(tuned, SLO, VERDICT))
    assert list(plots) == [
        "Throughput against p99", "Latency against offered rate", "Percentiles", "Batch sizes", "Where the time goes",
        "The search", "Batch by instances",
    ]  # fmt: skip
    assert "SLO: p99 100 ms" in texts(plots["Throughput against p99"])
    assert "batch=8,instances=2 p99" in texts(plots["Latency against offered rate"])
    assert {"50 %", "90 %", "99 %", "99.9 %"} <= set(texts(plots["Percentiles"]))
    assert {"queue", "preprocess", "run", "postprocess"} <= set(texts(plots["Where the time goes"]))
    assert plots["The search"].note == "4 settings measured, 1 ruled out unmeasured."
    assert {"90", "310", "480", "0"} <= set(texts(plots["Batch by instances"]))


def test_plots_take_the_colours_of_the_page_and_can_stand_side_by_side(tuned: list[Measurement]) -> None:
    plots = draw(tuned[:1], SLO)
    assert draw(tuned[:1], SLO) == plots, "the same measurements give the same plots"
    joined = "".join(plot.svg for plot in plots)
    assert not re.findall(r"#00[ab]00\d", joined)
    assert {"currentColor", "var(--faint)", "var(--bad)", "var(--s1)"} <= set(
        re.findall(r"currentColor|var\(--\w+\)", joined)
    )
    ids = re.findall(r'\bid="([^"]+)"', joined)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="|url\()#([\w-]+)', joined)
    assert used
    assert set(used) <= set(ids)
    for plot in plots:
        root = ElementTree.fromstring(plot.svg)
        assert root.get("viewBox")
        assert not root.get("width")


def test_only_what_is_known_is_drawn(make_measurement: Make) -> None:
    single = by_title(draw([make_measurement(clients=4, server=None)]))
    assert list(single) == ["Throughput against p99", "Percentiles"]
    assert draw([make_measurement(clients=4, server=None, latency=Latency())]) == []
    assert draw([make_measurement(rate=10.0, invalid=["late"])], SLO) == draw([]) == []


def test_percentiles_come_from_the_histograms_of_all_repeats(make_measurement: Make) -> None:
    pytest.importorskip("hdrh")
    fast, slow = encode([0.001] * 99), encode([0.5])
    runs = [make_measurement(clients=1, server=None, histogram=text) for text in (fast, slow)]
    assert "500 ms" in texts(by_title(draw(runs))["Percentiles"])
    broken = [make_measurement(clients=1, server=None, histogram="no histogram")]
    assert "500 ms" not in texts(by_title(draw(broken))["Percentiles"])


def test_names_are_escaped_in_plots(make_measurement: Make) -> None:
    runs = [make_measurement(label=label, clients=2, server=None) for label in ("$\\frac$ <b>&", "x" * 100, "速度")]
    (first, _) = draw(runs)
    assert "$\\frac$ &lt;b&gt;&amp;" in texts(first)
    assert max(map(len, texts(first))) < 50


def test_long_settings_are_shortened_to_their_values(make_measurement: Make) -> None:
    most = "batch=4,instances=2,precision=bf16,optimize="
    runs = [make_measurement(label=most + what, clients=2, server=None) for what in ("none", "optimize_for_inference")]
    found = set(texts(by_title(draw(runs))["Throughput against p99"]))
    assert {"4, 2, bf16, none", "4, 2, bf16, optimize_for_inference"} <= found


def test_plots_show_the_best_settings_and_count_the_rest(make_measurement: Make) -> None:
    runs = [make_measurement(label=f"threads={n}", rate=50.0 * n, most=60.0 * n, server=None) for n in range(1, 12)]
    plot = by_title(draw(runs))["Throughput against p99"]
    assert "threads=11" in texts(plot)
    assert "threads=1" not in texts(plot)
    assert plot.note.endswith("3 more settings are not shown.")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'matplotlib"):
        draw([])
