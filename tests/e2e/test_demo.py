"""The demo runs from a wheel in a virtual environment that has only the base dependencies."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path, check: bool = True) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_demo_runs_from_a_wheel_with_the_base_dependencies_alone(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("penstock-*.whl")
    venv.create(tmp_path / "venv")
    python, penstock = (tmp_path / "venv" / "bin" / name for name in ("python", "penstock"))
    # a pip of its own and bytecode of what is never imported would take a third of the test's time
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
    run(*install, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert "Traceback" in run(python, "-c", "import cv2", cwd=tmp_path, check=False)

    shown = run(penstock, "demo", "--requests", "1", "--connections", "8", cwd=tmp_path)
    assert "450 held-out images of handwritten digits as JSON arrays" in shown
    assert re.search(r"batching answers [0-9.]+ x as many requests", shown)

    commands = [line.strip() for line in shown.partition("Try next:")[2].splitlines()]
    target = next(line.split()[-1] for line in commands if " serve penstock" in line)
    curl = next(line for line in commands if "/predictions/digits" in line)
    body = re.search(r"-d '(.*?)'", curl)
    assert body is not None
    code = f"from {target.partition(':')[0]} import Digits; m = Digits(); m.load('cpu'); import json, sys\n"
    code += "print(json.dumps(m.postprocess(m.predict([m.preprocess(json.loads(sys.argv[1]))])[0])))"
    assert json.loads(run(python, "-c", code, body[1], cwd=tmp_path))["probability"] > 0.9
