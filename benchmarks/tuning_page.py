"""Which figures do the commands of docs/tuning.md give on this machine?

Runs curve.py and each `penstock bench` of the page that starts its own server, and prints the page's tables. With
--write they replace the tables between the page's markers. Takes three minutes.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.perf.bench.results import machine

PAGE = Path(__file__).parents[1] / "docs" / "tuning.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
MARKED = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.S)
ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def ms(seconds: float | None) -> str:
    """Milliseconds with three digits."""
    if seconds is None:
        return "n/a"
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def rows(command: str, folder: Path, seconds: float) -> list[str]:
    """A row of the table for each load of a command."""
    print(command, file=sys.stderr)
    words = [*shlex.split(command), "--duration", f"{seconds:g}", "--json"]
    done = subprocess.run(words, cwd=folder, env=ENV, stdout=subprocess.PIPE, text=True)
    found = []
    for m in json.loads(done.stdout)["measurements"]:
        rate = "INVALID" if m.get("invalid") else f"{m['throughput']:,.0f}"
        latency, server = m.get("latency", {}), m.get("server") or {}
        load = m["load"]
        clients = f"{load['concurrency']} in a closed loop" if load["mode"] == "closed" else f"{load['rate']:g}/s"
        batch = server.get("mean_batch")
        cells = [f"`{short(command)}`", clients, rate, ms(latency.get("p50_s")), ms(latency.get("p99_s"))]
        found.append(f"| {' | '.join([*cells, 'n/a' if batch is None else f'{batch:.1f}'])} |")
    return found


def short(command: str) -> str:
    """The part of a command that distinguishes it."""
    kept = re.sub(r"penstock bench |--data \S+ |--duration \S+ ?|--concurrency \S+ |--slo \S+|--rate \S+ ", "", command)
    return re.sub(r"--set ('models\S+inputs=.*?'|models\.\w+\.)", "", kept).strip().replace("  ", " ")


def tables(folder: Path, seconds: float) -> str:
    """The machine, the curve and the loads."""
    found: dict[str, Any] = machine()
    load = found["load_before"]
    busy = ", so it was busy with other work: compare, but do not quote" if load > found["cores"] / 2 else ""
    lines = [f"{found['cpu']}, {found['cores']} cores, {datetime.now(UTC):%Y-%m-%d}, load before {load}{busy}.\n"]
    loads = [
        "| `penstock bench` | load | good answers/s | p50 ms | p99 ms | mean batch |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name is not None
            (folder / name[1]).write_text(text)
        for command in text.splitlines() if language == "" else ():
            if command.startswith("penstock bench ") and "http://" not in command:
                loads += rows(command, folder, seconds)
            elif command.startswith(("echo", "python curve.py")):
                done = subprocess.run(["bash", "-c", command], cwd=folder, env=ENV, stdout=subprocess.PIPE, text=True)
                lines += [f"    {line}" for line in done.stdout.splitlines()]
    return "\n".join([*lines, "", *loads])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the figures into the page")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = tables(Path(folder), args.seconds)
    print(figures)
    if args.write:
        PAGE.write_text(MARKED.sub(lambda found: f"{found[1]}{figures}\n{found[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
