import asyncio
import sys
from pathlib import Path
from types import ModuleType

import pytest

from penstock.torchserve.metrics.system import (
    SCRIPT,
    MetricsCommand,
    SystemMetric,
    SystemProbe,
    measure_of,
    parse_line,
    watch,
)


def test_the_machine_is_measured_in_torchserves_units() -> None:
    found = {m.name: m.value for m in SystemProbe().read()}
    assert set(found) == {
        "CPUUtilization", "DiskAvailable", "DiskUsage", "DiskUtilization", "MemoryAvailable", "MemoryUsed",
        "MemoryUtilization",
    }  # fmt: skip
    assert all(0 <= found[name] <= 100 for name in ("CPUUtilization", "DiskUtilization", "MemoryUtilization"))
    assert 100 < found["MemoryAvailable"] + found["MemoryUsed"] < 2**26
    assert 0 < found["DiskUsage"] < 2**24


def test_gpus_are_measured(one_gpu: ModuleType) -> None:
    found = [m for m in SystemProbe().read() if m.name.startswith("GPU")]
    assert found == [
        SystemMetric("GPUUtilization", ("Host", "0"), 25.0),
        SystemMetric("GPUMemoryUtilization", ("Host", "0"), 37.5),
        SystemMetric("GPUMemoryUsed", ("Host", "0"), 3 / 2**20),
    ]


@pytest.mark.parametrize(
    ("line", "measured"),
    [
        (
            "CPUUtilization.Percent:1.5|#Level:Host|#hostname:h,1795251549",
            SystemMetric("CPUUtilization", ("Host",), 1.5),
        ),
        (
            "  GPUMemoryUsed.Megabytes:2e3|#Level:Host,DeviceId:1|#type:GAUGE|#hostname:h,timestamp:1795251549\n",
            SystemMetric("GPUMemoryUsed", ("Host", "1"), 2000.0),
        ),
        ("Bare.Count:3|#|#hostname:h,1", SystemMetric("Bare", (), 3.0)),
        ("Bare.Count:3..4|#|#hostname:h,1", None),
        ("Bare.Count:nan|#|#hostname:h,1", None),
        ("Traceback (most recent call last):", None),
    ],
)
def test_a_line_of_output_is_parsed_or_rejected(line: str, measured: SystemMetric | None) -> None:
    assert parse_line(line) == measured


def script(folder: Path, text: str) -> str:
    (folder / "collect.py").write_text(text)
    return "collect.py"


async def test_output_counts_up_to_the_first_empty_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = """
import sys
print("a warning", file=sys.stderr, flush=True)
print(f"CPUUtilization.Percent:{sys.argv[1]}|#Level:Host|#hostname:h,1")
print()
print("DiskUsage.Gigabytes:1|#Level:Host|#hostname:h,1")
"""
    command = MetricsCommand([script(tmp_path, text), "7"], str(tmp_path), 20.0)
    for _ in range(2):
        assert await command.measure() == [SystemMetric("CPUUtilization", ("Host",), 7.0)]
    assert caplog.text.count("it printed 'a warning', expected Name.Unit:value|#Level:Host|#hostname:h,time") == 1


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("raise SystemExit(3)", "it ended with status 3"),
        ("import time; print('x', flush=True); time.sleep(600)", "it did not end within 0.5 s"),
    ],
)
async def test_a_command_that_fails_or_hangs_is_logged(
    tmp_path: Path, text: str, output: str, caplog: pytest.LogCaptureFixture
) -> None:
    limit_s = 0.5 if "sleep" in text else 20.0
    assert await MetricsCommand([script(tmp_path, text)], str(tmp_path), limit_s).measure() == []
    assert output in caplog.text


async def test_a_command_that_cannot_start_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await MetricsCommand(["x.py"], str(tmp_path / "nowhere"), 5.0).measure() == []
    assert "it could not be started" in caplog.text


async def test_endless_output_of_a_command_takes_no_memory(tmp_path: Path) -> None:
    text = "for _ in range(200_000): print('DiskUsage.Gigabytes:1|#Level:Host|#hostname:h,1')"
    found = await MetricsCommand([script(tmp_path, text)], str(tmp_path), 30.0).measure()
    assert 20_000 < len(found) < 30_000


def test_torchserves_own_script_is_replaced_if_it_is_missing(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert getattr(measure_of(f"{SCRIPT} --gpu 0", folder, 60.0), "__func__", None) is SystemProbe.measure
    assert getattr(measure_of(None, None, 60.0), "__func__", None) is SystemProbe.measure
    (tmp_path / SCRIPT).parent.mkdir(parents=True)
    (tmp_path / SCRIPT).touch()
    assert getattr(measure_of(f"{SCRIPT} --gpu 0", folder, 60.0), "__func__", None) is MetricsCommand.measure


async def test_measuring_continues_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[int] = []
    third = asyncio.Event()

    async def measure() -> list[SystemMetric]:
        looks.append(len(looks))
        if len(looks) == 1:
            raise RuntimeError("no")
        return [SystemMetric("a", (), float(len(looks)))]

    def tell(found: list[SystemMetric]) -> None:
        if found[0].value == 3:
            third.set()

    watching = asyncio.create_task(watch(measure, tell, 0.0))
    await asyncio.wait_for(third.wait(), 10)
    watching.cancel()
    assert "machine_not_measured" in caplog.text


async def test_measuring_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object, **settings: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", forbidden)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert len(await measure_of(None, None, 60.0)()) == 7
