"""The same requests leave the same metrics: lines of the log files, and families of the page."""

import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.archives import write_mar

pytestmark = pytest.mark.peer

HANDLER = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

def handle(data, context):
    metrics = context.metrics
    if data is None:
        metrics.add_counter("Loads", 1)
        metrics.add_time("WarmUp", 12.5)
        return None
    metrics.add_counter("Faces", 3)
    metrics.add_counter("Doors", 2, 0, [Dimension("camera", "door")])
    metrics.add_time("Slow", 4.5, None, "s")
    metrics.add_percent("Share", 12.5)
    metrics.add_size("Big", 3, unit="GB")
    metrics.add_error("Oops", 1)
    metrics.add_metric("Odd", 7, "widgets", metric_type=MetricTypes.GAUGE)
    if metrics.request_ids and context.get_request_id(0) is not None:
        metrics.add_metric_to_cache("Spread", "ms", ["kind"], MetricTypes.HISTOGRAM).add_or_update(3.3, ["x"])
    if bytes(data[0]["body"]) == b"bad":
        raise ValueError("no")
    return ["ok"] * len(data)
"""
SYSTEM = "disable_system_metrics=false\nmetric_time_interval=2\nmodel_metrics_auto_detect=true\n"
LINE = re.compile(r"[-\dT:]+,\d{3} - (\w+)\.(\w+):[0-9.E-]+\|#([^|]*)\|#hostname:[^,]+,(.*)")
CONSOLE = re.compile(
    r"[-\dT:]+,\d{3} \[INFO \] (\S+) (\w+_METRICS) - (\w+\.\w+):[0-9.E-]+\|#([^|]*)\|#hostname:\w+,"
    r"(?:requestID:\S+,)?timestamp:\d+"
)
LOOKS_S = 6.0  # for the looks at the machine, of which TorchServe's are processes


def asked(peer_server: Any, folder: Path, owner: str, settings: str) -> Any:
    """A server that has answered some requests well and some not."""
    write_mar(folder, "m", HANDLER)
    server = peer_server(owner, folder, ["m=m.mar"], SYSTEM + settings)
    assert server.post("/predictions/m/1.0", b"x")[0] == 200
    assert server.post("/predictions/m", b"bad")[0] == 503
    assert server.post("/predictions/nobody", b"x")[0] == 404
    time.sleep(LOOKS_S)
    return server


def lines(path: Path) -> set[tuple[str, ...]]:
    """(name, unit, dimensions, what is beside the time) of the lines."""
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    assert found
    assert all(found), path.read_text()
    return {
        (match[1], match[2], match[3], re.sub(r"[0-9a-f-]{36}", "ID", re.sub(r"timestamp:\d{10}", "TIME", match[4])))
        for match in found
        if match
    }


def console(path: Path) -> list[tuple[str, str, str, str]]:
    """(thread of a model's metric, logger, name, dimensions) of the lines on stdout."""
    shown = [line for line in path.read_text().splitlines() if "_METRICS - " in line]
    found = [CONSOLE.fullmatch(line) for line in shown]
    assert all(found), shown
    for line in shown:  # as auto_benchmark.py reads them
        float(line.split("|")[0].split(":")[3])
    return [(m[1] if m[2] == "MODEL_METRICS" else "", m[2], m[3], m[4]) for m in found if m]


def test_the_log_files_have_lines_of_the_same_shape(peer_server: Any, tmp_path: Path) -> None:
    for owner in ("torchserve", "penstock"):
        asked(peer_server, tmp_path, owner, "").close()
    for name in ("ts_metrics.log", "model_metrics.log"):
        theirs, ours = (lines(tmp_path / owner / "logs" / name) for owner in ("torchserve", "penstock"))
        assert ours == theirs
    printed = [console(tmp_path / owner / "output") for owner in ("torchserve", "penstock")]
    assert set(printed[1]) == set(printed[0])
    for owner, shown in zip(("torchserve", "penstock"), printed, strict=True):  # every value is on stdout
        logged = (tmp_path / owner / "logs" / "model_metrics.log").read_text().splitlines()
        assert len([name for _, logger, name, _ in shown if logger == "MODEL_METRICS"]) == len(logged)
        assert sum(name == "QueueTime.Milliseconds" for _, _, name, _ in shown) == sum(
            "- PredictionTime" in line for line in logged
        )


def test_the_page_has_the_same_families_with_the_same_labels(peer_server: Any, tmp_path: Path) -> None:
    bounds: list[set[str]] = []  # of the histogram

    def families(owner: str) -> dict[str, tuple[str, str, set[str]]]:
        """name -> (kind, help, its series without values and buckets)."""
        server = asked(peer_server, tmp_path, owner, "metrics_mode=prometheus\n")
        config = (tmp_path / owner / "config.properties").read_text()
        address = re.findall(r"metrics_address=(.*)", config)[0]
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
            assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            page = response.read().decode()
        server.close()
        kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", page, re.M))
        bounds.append(set(re.findall(r'^Spread_bucket\{.*,le="([^"]*)",\}', page, re.M)))
        series: dict[str, set[str]] = {name: set() for name in kinds}
        for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", page, re.M):
            family = name if name in kinds else re.sub(r"_(bucket|count|sum)$", "", name)
            series[family].add(re.sub(r'le="[^"]*",', "", labels))
        helps = dict(re.findall(r"^# HELP (\w+) (.*)$", page, re.M))
        return {name: (kind, helps[name], series[name]) for name, kind in kinds.items()}

    theirs, ours = families("torchserve"), families("penstock")
    assert len(theirs) > 25
    assert len(bounds[0]) > 10
    assert bounds[0] <= bounds[1], "queries name buckets by their text"
    assert {name: ours.get(name) for name in theirs} == theirs
    assert not [name for name in set(ours) - set(theirs) if not name.startswith(("penstock_", "process_"))]
