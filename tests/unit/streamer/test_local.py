import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from penstock.streamer.local import devices_of

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
NESTED = """
    import sys
    from penstock import ManagedModel, Streamer, ThreadedStreamer

    def increment(batch):
        return [x + 1 for x in batch]

    class Outer(ManagedModel):
        def init_model(self):
            self.threaded = ThreadedStreamer(increment, 8)
            self.processes = Streamer(increment, 8)

        def predict(self, batch):
            return [10 * x for x in self.processes.predict(self.threaded.predict(batch))]

    class Endless(ManagedModel):
        def init_model(self):
            Streamer(Endless, 8, wait_for_worker_ready=True)

    def main():
        with Streamer(Outer, 4) as streamer:
            print(streamer.predict([1]))
        try:
            Streamer(Endless, 4, wait_for_worker_ready=True)
        except Exception as e:
            print(e)

    if __name__ == "__main__":
        main()
"""
PROGRAM = """
    import os
    import penstock

    def double(batch):
        return [2 * x for x in batch]

    streamer = penstock.Streamer(double, 4, wait_for_worker_ready=True)
    threaded = penstock.ThreadedStreamer(double, 4)
    if os.environ.get("AT_IMPORT"):
        threaded.predict([1])
        streamer.predict([1])
"""


@pytest.mark.parametrize(
    ("visible", "given", "devices"),
    [
        (None, [1], ["cuda:1"]), ("", ("0",), ["cuda:0"]), ("2,3", [3], ["cuda:1"]), ("2,3", ["5"], ["cuda:5"]),
        ("1,0", 0, ["cuda:1"]), (None, 0, ["cuda:0"]), (None, "0,1", ["cuda:0", "cuda:1"]), (None, None, ["cpu"]),
        (None, (), ["cpu"]), (None, range(2), ["cuda:0", "cuda:1"]), (None, UUID, [f"cuda:{UUID}"]),
        (f"GPU-1,{UUID}", [UUID], ["cuda:1"]), (None, ["MIG-GPU-8932f937/1/0"], ["cuda:MIG-GPU-8932f937/1/0"]),
    ],
)  # fmt: skip
def test_devices_are_numbers_of_the_machine_or_uuids(
    visible: str | None, given: Any, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert devices_of(given) == tuple(devices)


@pytest.mark.parametrize("wrong", ["cuda:0", -1, 1.5, [None], True, [[0]], "0;1"])
def test_an_invalid_device_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="cuda_devices: expected numbers such as 0 or UUIDs such as GPU-8932f937"):
        devices_of(wrong)


def run(folder: Path, source: str, *how: str, **keys: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python on app.py, which has this source."""
    (folder / "app.py").write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, *how], cwd=folder, capture_output=True, text=True, timeout=60, check=False, **keys
    )


@pytest.mark.parametrize("how", [["app.py"], ["-c", "import app; app.main()"]], ids=["script", "module"])
def test_a_model_may_use_streamers_but_must_not_start_itself(how: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, NESTED, *how)
    result, _, error = done.stdout.partition("\n")
    assert result == "[30]", done.stderr
    assert "5 levels deep: a model must not start itself" in error


@pytest.mark.parametrize("how", ["import app; print(app.streamer.predict([1]))", "-m"])
def test_a_streamer_may_be_made_in_the_module_of_its_function(how: str, tmp_path: Path) -> None:
    source = textwrap.dedent(PROGRAM)
    if how == "-m":
        source += 'if __name__ == "__main__":\n    print(streamer.predict([1]))\n'
    done = run(tmp_path, source, *(["-m", "app"] if how == "-m" else ["-c", how]))
    assert done.stdout == "[2]\n", done.stderr


def test_a_function_defined_under_the_guard_is_named_with_what_to_do(tmp_path: Path) -> None:
    program = """
        import penstock
        if __name__ == "__main__":
            def f(batch): return batch
            penstock.Streamer(f, 4).predict([1])
    """
    done = run(tmp_path, program, "app.py")
    last = done.stderr.splitlines()[-1]
    assert "Can't get attribute 'f'" in last
    assert last.endswith("define it at the top level of its file, not under if __name__ == '__main__'")


@pytest.mark.parametrize("how", [["app.py"], ["-m", "app"], ["-"]])
def test_a_program_that_workers_cannot_import_is_refused_when_the_streamer_is_made(
    how: list[str], tmp_path: Path
) -> None:
    program = "import time, penstock\ndef f(batch): return batch\nstreamer = penstock.Streamer(f, 4)\ntime.sleep(60)\n"
    done = run(tmp_path, program, *how, input=program)
    expected = "needs the main program, which has no file" if how == ["-"] else "no line if __name__ == '__main__'"
    assert expected in done.stderr.splitlines()[-1]


def test_a_streamer_called_while_a_worker_imports_its_module_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, PROGRAM, "-c", "import app", env={**os.environ, "AT_IMPORT": "1"})
    assert "LoadFailed" in done.stderr
    assert "would start workers of their own without end" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("kind", ["ThreadedStreamer", "Streamer"])
def test_a_streamer_imports_nothing_after_its_construction(kind: str, tmp_path: Path) -> None:
    code = f"""
        import sys, penstock, app
        streamer = penstock.{kind}(app.echo, 4)
        before = set(sys.modules)
        streamer.predict([1])
        print(set(sys.modules) - before)
    """
    done = run(tmp_path, "def echo(batch):\n    return batch\n", "-c", textwrap.dedent(code))
    assert done.stdout == "set()\n", done.stderr
