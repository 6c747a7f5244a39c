"""The `penstock` command for a machine that is busy with other tests: no run of load is INVALID."""

from __future__ import annotations

import sys

_PROGRAM = """
import penstock.perf.bench.figures as figures
from penstock.cli.main import main

figures.MOST_LATE, figures.MOST_CPU = 2.0, 100.0
main()
"""


def penstock(*words: str) -> list[str]:
    """The command line."""
    return [sys.executable, "-c", _PROGRAM, *words]
