"""Reports of a folder of results, written into it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.perf.bench.document import markdown
from penstock.perf.bench.html import page
from penstock.perf.bench.plots import draw
from penstock.perf.bench.report import Verdict, compose
from penstock.perf.bench.results import not_written, read, write_whole

REPORT, PAGE, VERDICT = "report.md", "report.html", "verdict.json"


def publish(folder: Path | str, verdict: Verdict | None = None) -> tuple[Path, Path]:
    """Where report.md and report.html are, made from the folder's results. The verdict is kept beside them.

    Without matplotlib the page has no plots, and says so. Raises ConfigError for what is no folder of results,
    PenstockError when it cannot be written to.
    """
    folder = Path(folder)
    origin, measurements = read(folder)
    report = compose(origin, measurements, verdict)
    try:
        plots, without = draw(measurements, origin.slo, verdict), ""
    except ConfigError as error:
        plots, without = [], error.message
    try:
        if verdict is not None:
            write_whole(folder / VERDICT, msgspec.json.format(msgspec.json.encode(verdict)) + b"\n")
        write_whole(folder / REPORT, markdown(report).encode())
        write_whole(folder / PAGE, page(report, plots, without).encode())
    except OSError as e:
        raise not_written(folder, e) from e
    return folder / REPORT, folder / PAGE
