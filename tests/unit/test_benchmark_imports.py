"""Every benchmark can be imported: its names still exist in Penstock."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
NEEDS_A_WORKLOAD = {"streamer_app", "streamer_models"}  # they read BENCH_SPEC when they are imported


def test_every_benchmark_can_be_imported() -> None:
    names = sorted({path.stem for path in FOLDER.glob("*.py")} - NEEDS_A_WORKLOAD)
    script = "import importlib, sys, traceback\nfailed = 0\nfor name in sys.argv[1:]:\n"
    script += "    try:\n        importlib.import_module(name)\n"
    script += "    except ImportError:\n        traceback.print_exc()\n        failed = 1\nsys.exit(failed)\n"
    done = subprocess.run([sys.executable, "-c", script, *names], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
