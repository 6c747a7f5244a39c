"""The demo succeeds only if every image is answered and enough of the answers are right."""

import json
import sys

import numpy as np
import pytest
from rich.console import Console

from penstock.cli.demo.command import DemoLoad, DemoRun, _verdict
from penstock.perf.bench.measurement import Load, Measurement


def row(accuracy: float = 0.99, rate: float = 1000.0, failed: int = 0) -> DemoRun:
    errors, first = {"503": failed} if failed else {}, "503 Service Unavailable: full" if failed else None
    run = Measurement(load=Load(mode="closed"), throughput=rate, errors=errors, first_error=first)
    return DemoRun(run, accuracy)


def verdict(off: DemoRun, on: DemoRun) -> tuple[bool, str]:
    console = Console(record=True, file=open("/dev/null", "w"), width=200)  # noqa: SIM115 - closed below
    with console.file:
        return _verdict(console, {"off": off, "on": on}), console.export_text()


def test_two_good_runs_are_compared() -> None:
    assert verdict(row(), row(rate=4000.0)) == (True, "batching answers 4.0 x as many requests\n")


def test_a_failed_request_or_an_accuracy_below_97_percent_fails_the_demo() -> None:
    good, text = verdict(row(failed=2), row())
    assert (good, text) == (False, "batching off: 2 requests failed: 503 Service Unavailable: full\n")
    good, text = verdict(row(), row(accuracy=0.96))
    assert (good, text) == (False, "batching on: accuracy 96.00%, expected 97%\n")


def test_without_opencv_the_images_are_sent_as_json_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    load = DemoLoad()
    assert (load.format, load.payloads[0].body[:4]) == ("PNG", b"\x89PNG")
    monkeypatch.setitem(sys.modules, "cv2", None)
    load = DemoLoad()
    assert load.format == "JSON arrays"
    assert np.array(json.loads(load.payloads[0].body)).shape == (8, 8)
    assert load.sample.encode() == load.payloads[0].body
