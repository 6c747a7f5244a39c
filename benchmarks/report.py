"""The command line of a benchmark, its tables, and its results with machine, versions and spread."""

import argparse
import datetime
import json
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from closed_loop import Sample
from servers import HERE, PACKAGES, python_of

from penstock.perf.bench.results import machine
from penstock.perf.bench.results import versions as own_versions

KEPT_ROUNDS = 5  # a result needs at least these

Runs = dict[str, list[Sample]]


FLAG: Mapping[str, Any] = {"action": "store_true"}


def options(
    doc: str,
    *,
    seconds: int | None = 2,
    peers: Sequence[str] = (),
    others: Sequence[str] = (),
    tables: Iterable[str] = (),
    **further: Mapping[str, Any],
) -> argparse.Namespace:
    """The parsed command line. `peers` run by default, `others` can be named. `--only` selects among `tables`.

    `further` has the other options of the benchmark, with the arguments of `add_argument`.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # lets `finally` blocks end the servers
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=KEPT_ROUNDS)
    parser.add_argument("--seconds", type=int, default=seconds, help="length of one run")
    known = (*peers, *others)
    parser.add_argument("--peers", help=f"some of {', '.join(known) or '(none)'}; '' for none")
    tables = list(tables)
    if tables:
        parser.add_argument("--only", default=",".join(tables), help=f"some of {', '.join(tables)}")
    for name, arguments in further.items():
        parser.add_argument(f"--{name}", **arguments)
    found = parser.parse_args()
    if tables:
        found.only = [table for table in found.only.split(",") if table]
        if missing := set(found.only) - set(tables):
            parser.error(f"no such table: {', '.join(sorted(missing))}; there are {', '.join(tables)}")
    if seconds is None:
        found.seconds = None
    asked = list(peers) if found.peers is None else [p for p in found.peers.split(",") if p]
    if unknown := set(asked) - set(PACKAGES):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; known are {', '.join(PACKAGES)}")
    if cannot := set(asked) - set(known):
        print(f"not measured: {', '.join(sorted(cannot))} cannot answer this question")
    found.peers = [p for p in asked if p in known and (p != "torchserve" or shutil.which("java"))]
    found.absent = [p for p in peers if p not in found.peers]
    return found


def versions(peers: Sequence[str], libraries: Sequence[str]) -> dict[str, str]:
    found = own_versions(libraries)
    for peer in peers:
        package = PACKAGES[peer][0].partition("==")[0]
        code = f"import importlib.metadata as m; print(m.version('{package}'))"
        found[package] = subprocess.run([python_of(peer), "-c", code], capture_output=True, text=True).stdout.strip()
    if shutil.which("wrk"):
        found["wrk"] = subprocess.run(["wrk", "-v"], capture_output=True, text=True).stdout.split()[1]
    return found


def number(value: float, digits: int = 3) -> str:
    """The value with this many significant digits; rounded to an integer above 1000."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def spread(values: Sequence[float]) -> str:
    """The median and its range."""
    if not values:
        return "-"
    median = number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({number(min(values))}..{number(max(values))})"


def label_of(runs: Runs, name: str) -> str | None:
    """The row of a contender, also of one that is listed with its setting ("mosec, one by one")."""
    return next((label for label in runs if label == name or label.startswith(f"{name}, ")), None)


class Report:
    """The tables of one benchmark: printed while it runs, and saved if there were enough rounds."""

    def __init__(
        self,
        file: str,
        doc: str,
        options: argparse.Namespace,
        columns: Mapping[str, str],
        libraries: Sequence[str] = (),
        method: str | None = None,
        part: str = "",
    ) -> None:
        """`columns`: key in a sample -> heading, for the shown columns; the first one is compared.

        `libraries`: libraries of this environment whose versions are relevant besides the usual ones. `method`: how
        the numbers arise, if not as medians of interleaved rounds. `part`: the flag that selects this part of the
        question.
        """
        self._name = Path(file).stem
        self._part = part
        self._question = doc.splitlines()[0]
        self._options = options
        self._columns = dict(columns)
        self._machine = machine()
        self._versions = versions(options.peers, libraries)
        self._results: list[dict[str, Any]] = []
        self._targets: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._header: list[str] = []
        about = self._machine
        self._say(f"# {self._question}\n")
        self._say(f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}.")
        self._say(", ".join(f"{k} {v}" for k, v in self._versions.items()) + ".")
        rounds = f"Medians of {options.rounds} interleaved rounds of {options.seconds} s, with (least..most)."
        self._say(method or rounds)
        if options.absent:
            self._say(f"Not measured, because they were not requested or Java is missing: {', '.join(options.absent)}.")

    def _say(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)

    def section(self, line: str) -> None:
        """A line between tables."""
        self._header = []
        self._say(f"\n{line}")

    def add(self, cell: Mapping[str, Any], runs: Runs, base: str = "penstock") -> None:
        """One row for each contender: medians, and the ratio of `base` to it from the pairs of each round.

        A row is INVALID if one of its runs is (see `closed_loop.wrk`); it meets no target.
        """
        self._results.append({**cell, "runs": runs})
        shown = [k for k in self._columns if any(k in s for samples in runs.values() for s in samples)]
        if any(s.get("errors") for samples in runs.values() for s in samples):
            shown.append("errors")
        header = [*cell, "who", *(self._columns.get(k, k) for k in shown)] + [f"{base} ÷ this"] * (base in runs)
        if header != self._header:
            self._header = header
            self._say("\n| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
        if errors := sum(s.get("errors", 0) for s in runs.get("penstock", ())):
            self.target(f"errors of penstock, {', '.join(f'{k} {v}' for k, v in cell.items())}", [errors], most=0)
        for name, samples in runs.items():
            row = [str(v) for v in cell.values()] + [name]
            for key in shown:
                values = [s[key] for s in samples if key in s]
                if values and isinstance(values[0], str):
                    row.append(values[0])
                    continue
                row.append(spread(values) if key == shown[0] else number(statistics.median(values)) if values else "-")
            if invalid := [s["under_way"] for s in samples if s.get("invalid")]:
                row.append(f"INVALID: {number(min(invalid))} requests under way")
            elif base in runs:
                row.append("" if name == base else spread(self.ratios(runs, base, name, shown[0])))
            self._say("| " + " | ".join(row) + " |")

    def ratios(self, runs: Runs, one: str, other: str, key: str | None = None) -> list[float]:
        """The value of `one` over the value of `other` per round, for the first column unless `key` names another.

        Empty if one of them was not measured, or had an invalid run.
        """
        key = key or next(iter(self._columns))
        a, b = label_of(runs, one), label_of(runs, other)
        if a is None or b is None or any(s.get("invalid") for s in (*runs[a], *runs[b])):
            return []
        return [x[key] / y[key] for x, y in zip(runs[a], runs[b], strict=True) if key in x and y.get(key)]

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table that does not compare runs."""
        self._header = []
        self._results.append({"title": title, "header": header, "rows": rows})
        self._say(f"\n{title}\n\n| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
        for row in rows:
            self._say("| " + " | ".join(row) + " |")

    def target(
        self, what: str, values: Sequence[float], *, least: float | None = None, most: float | None = None
    ) -> None:
        """Records whether the median of `values` meets the target; without values it was not measured."""
        wanted = f">= {least:g}" if least is not None else f"<= {most:g}"
        found = statistics.median(values) if values else None
        met = None
        if found is not None:
            met = found >= least if least is not None else most is not None and found <= most
        self._targets.append({"what": what, "wanted": wanted, "found": found, "met": met})

    def save(self, whole: bool | None = None) -> None:
        """Prints the targets, and writes `results/DATE-NAME.md` and, outside git, `raw/DATE-NAME.json`.

        `whole` overrides the rule that a result takes KEPT_ROUNDS rounds.
        """
        if self._targets:
            self._say("\n| target | | found | met |\n|---|---|---|---|")
            for t in self._targets:
                found = "not measured" if t["found"] is None else number(t["found"], 4)
                met = {True: "yes", False: "NO", None: "-"}[t["met"]]
                self._say(f"| {t['what']} | {t['wanted']} | {found} | {met} |")
        if not (self._options.rounds >= KEPT_ROUNDS if whole is None else whole):
            print(
                "\nnot saved: a result needs all of it"
                if whole is False
                else f"\nnot saved: a result needs {KEPT_ROUNDS} rounds"
            )
            return
        flags = f"--{self._part} " if self._part else ""
        flags += f"--rounds {self._options.rounds}"
        flags += f" --seconds {self._options.seconds}" if self._options.seconds else ""
        flags += f" --peers {','.join(self._options.peers)}" if self._options.peers else ""
        self._lines.append(f"\nRepeat with `python benchmarks/{self._name}.py {flags}`.")
        name = "-".join(filter(None, (datetime.date.today().isoformat(), self._name, self._part)))
        tables, raw = HERE / "results" / f"{name}.md", HERE / "raw" / f"{name}.json"
        for path in (tables, raw):
            path.parent.mkdir(exist_ok=True)
        tables.write_text("\n".join(self._lines) + "\n")
        kept = {
            "question": self._question,
            "machine": self._machine,
            "versions": self._versions,
            "options": {"rounds": self._options.rounds, "seconds": self._options.seconds},
            "targets": self._targets,
            "results": self._results,
        }
        raw.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"\ntables saved in {tables}, every run in {raw}")
