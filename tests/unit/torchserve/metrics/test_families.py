import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.serving.observe.series import SeriesTable
from penstock.serving.observe.text import Page
from penstock.torchserve.metrics.families import (
    BOUNDS,
    MetricDefinition,
    default_config,
    filter_page,
    read_config,
)

FILE = """
dimensions:
  - &level "Level"
  - &host "Hostname"
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [*level, *host]}
  histogram:
    - name: ts_inference_latency_microseconds
      unit: Microseconds
      dimensions: ["model", "version", "host"]
model_metrics:
  gauge:
    - name: HandlerTime
      unit: ms
      dimensions: ["ModelName", *level]
  counter:
    - {name: Faces, unit: faces, dimensions: []}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "metrics.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_defines_metrics_and_their_kinds(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, FILE))
    latency = MetricDefinition(
        "ts_inference_latency_microseconds", "histogram", "Microseconds", ("model", "version", "host")
    )
    assert list(config.server.values()) == [
        MetricDefinition("Requests2XX", "counter", "Count", ("Level", "Hostname")),
        latency,
    ]
    assert list(config.models) == ["HandlerTime", "Faces"]
    assert config.section() == {
        "counter": [{"name": "Faces", "unit": "faces", "dimensions": []}],
        "gauge": [{"name": "HandlerTime", "unit": "ms", "dimensions": ["ModelName", "Level"]}],
        "histogram": [],
    }


def test_without_a_file_torchserves_metrics_need_no_yaml(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    config = default_config()
    assert len(config.server) == 19
    assert config.server["GPUUtilization"].dimensions == ("Level", "DeviceId", "Hostname")
    assert sorted(config.models) == ["HandlerTime", "PredictionTime"]
    with pytest.raises(ConfigError, match=r"metrics_config=m\.yaml .*pip install .*pyyaml"):
        read_config("m.yaml")


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("ts_metrics: {counter: [", r"metrics\.yaml:1: not valid YAML: .+"),
        ("a: b\n\tc: d", r"metrics\.yaml:2: not valid YAML"),
        ("- a", "found a list of 1, expected the keys dimensions, ts_metrics, model_metrics"),
        ("", "found nothing, expected the keys"),
        ("ts_metric: {}", r"found the key 'ts_metric', expected .*did you mean 'ts_metrics'"),
        ("ts_metrics: [1]", "ts_metrics: found a list"),
        ("ts_metrics: {timer: []}", "ts_metrics: found the key 'timer', expected counter, gauge, histogram"),
        ("ts_metrics: {gauge: {name: a}}", r"ts_metrics\.gauge: found a table"),
        ("model_metrics: {gauge: [a]}", r"model_metrics\.gauge\[0\]: found the string 'a'"),
        ("model_metrics: {gauge: [{name: a, unit: ms}]}", r"gauge\[0\]: found no dimensions"),
        ("model_metrics: {gauge: [{name: 3, unit: ms, dimensions: []}]}", r"gauge\[0\]\.name: found 3"),
        ("model_metrics: {gauge: [{name: a, unit: , dimensions: []}]}", r"gauge\[0\]\.unit: found nothing"),
        (
            "model_metrics: {gauge: [{name: a, unit: s, dimensions: b}]}",
            r"gauge\[0\]\.dimensions: found the string 'b'",
        ),
        ("model_metrics: {gauge: [{name: a, unit: s, dimension: [], dimensions: []}]}", "found the key 'dimension'"),
        (
            "ts_metrics: {gauge: [{name: QueueTime, unit: ms, dimensions: [a]}]}",
            r"ts_metrics\.gauge: QueueTime: found the dimensions \['a'\], expected 2",
        ),
        ("#" * (2**20 + 1), "found more than 1048576 bytes"),
        ("\x00", "not valid YAML"),
        ('a: !!int ""', "not valid YAML"),
        ("&a [*a, !!python/object/apply:os.getpid []]", "not valid YAML"),
    ],
)
def test_an_invalid_file_is_refused_with_its_line_or_key(tmp_path: Path, text: str, output: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=output) as raised:
        read_config(path)
    assert path in str(raised.value)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(str(tmp_path / "none.yaml"))


def test_the_last_of_two_definitions_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "model_metrics: {gauge: [{name: a, unit: ms, dimensions: []}, {name: a, unit: s, dimensions: []}]}"
    assert read_config(written(tmp_path, text)).models["a"].unit == "s"
    assert "a is defined twice" in caplog.text


# ---- the page

LABELS = (("Level", "Host"),)


def declared(name: str = "a", kind: str = "counter", unit: str = "Count") -> MetricDefinition:
    return MetricDefinition(name, kind, unit, ("Level",))


def page(table: SeriesTable) -> str:
    found = Page()
    table.write(found)
    return found.encode().decode()


def test_a_defined_metric_is_on_the_page_before_its_first_value() -> None:
    table = SeriesTable(BOUNDS)
    table.declare(declared("a", unit='per "x"\nline'))
    assert page(table) == '# HELP a Torchserve prometheus counter metric with unit: per "x"\\nline\n# TYPE a counter\n'


def test_a_page_can_be_filtered_by_name() -> None:
    table = SeriesTable(BOUNDS)
    table.change(declared("a"), LABELS, (1.0,))
    table.change(declared("h", "histogram"), LABELS, (1.0,))
    table.change(declared("ab"), (("Level", "a h"),), (1.0,))
    whole = page(table).encode()
    assert filter_page(whole, ["a"]) == whole[: whole.index(b"# HELP h")]
    assert filter_page(whole, ["h"]).count(b"h_bucket") == len(BOUNDS) + 1
    assert filter_page(whole, ["h_sum"]).splitlines()[1:] == [b"# TYPE h histogram", b'h_sum{Level="Host"} 1.0']
    assert filter_page(whole, ["nobody"]) == b""
    assert filter_page(whole, ["a", "h", "ab"]) == whole
