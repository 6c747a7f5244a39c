"""`penstock doctor` beside servers with one fault each, which `benchmarks/doctor.py` injects."""

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.serving.observe.causes import CAUSES

FILE = Path(__file__).parents[2] / "benchmarks" / "doctor.py"


def _benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_doctor", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


benchmark = _benchmark()


@pytest.mark.parametrize("case", benchmark.CASES, ids=lambda case: case.cause or "healthy")
def test_the_fault_is_named_first(case: Any) -> None:
    if case.broker_s and shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    named = []
    with benchmark.injected(case) as url:
        for _ in range(8):  # the load has to fill the seconds that the doctor looks at, however slow the machine is
            view = benchmark.doctor(url)
            named.append(benchmark.named(view))
            if named[-1] == case.cause:
                break
    assert named[-1] == case.cause, named
    if case.cause:
        assert view["verdict"]["causes"][0]["model"] in ("m", "redis")
        assert view["verdict"]["causes"][0]["evidence"] in view["verdict"]["text"]


def test_every_cause_is_injected() -> None:
    assert {case.cause for case in benchmark.CASES} == {"", *(cause.name for cause in CAUSES)}
