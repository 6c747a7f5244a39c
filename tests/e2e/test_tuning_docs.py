"""Runs the page on tuning from top to bottom with short durations: it writes its files and runs its commands."""

import re
import shutil
import subprocess
from pathlib import Path

import psutil

from support.pages import ROOT, PageShell, blocks, write

# Replaces whatever makes a command long or depends on the machine's speed.
SHORT = {
    r"--duration \S+": "--duration 0.3 --warmup 0",
    r"--budget \S+": "--budget 3s --effort quick --warmup 0.2 --space batch=8,instances=1",
    r"(benchmark-suite .*)": r"\1 --requests 60 --warmup 0",
    r"--arrivals \S+": r"\g<0> --seconds 2",
    r"(penstock tune .*)p99<=100ms": r"\1p50<=200ms",  # runs of a search get longer with the latency of its SLO
    r"p99<=100ms(,error<=0.1%)?": "p50<=60s",
}


class TuningShell(PageShell):
    """Runs one command after the other."""

    def output(self, script: str) -> str:
        printed = super().output(script)
        if "--write" in script and not (self.folder / "penstock.toml").exists():  # too busy to prove a choice
            (self.folder / "penstock.toml").write_text('[models.ranker]\ntarget = "app.py:Ranker"\n')
        return printed

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """A launcher ends with its server, but ignores signals itself."""
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        commands = [(each, " ".join(each.cmdline())) for each in family]
        next(each for each, line in commands if "run_cpu" not in line and "serve" in line).terminate()
        for each in psutil.wait_procs(family, 30)[1]:
            each.kill()


def test_every_file_and_command_of_the_tuning_page_works(tmp_path: Path) -> None:
    shell = TuningShell(tmp_path, shorter=SHORT)
    found = blocks((ROOT / "docs/tuning.md").read_text())
    assert {language for language, _ in found} == {"", "python", "yaml", "gpu"}
    outputs = {}
    for language, text in found:
        if language == "python":
            write(text, tmp_path)
        elif language == "yaml":
            (tmp_path / "models.yaml").write_text(text)
        elif language == "":
            outputs |= block(shell, text.splitlines())
        else:  # commands that change the machine are not run
            assert all(line.startswith("nvidia-smi ") for line in text.splitlines())
    curve = next(text for line, text in outputs.items() if line == "python curve.py")
    assert [line.split()[:2] for line in curve.splitlines()] == [
        [model, rows] for model in ("Ranker", "Edges") for rows in ("1", "4", "16", "32")
    ]
    loads = [text for line, text in outputs.items() if line.startswith("penstock bench ")]
    assert all("throughput/s" in text or "INVALID" in text for text in loads)
    assert len([text for text in loads if "32 clients" in text]) >= 3
    assert (tmp_path / "tune-ranker" / "report.html").is_file()
    assert (tmp_path / "penstock.toml").is_file()
    assert (tmp_path / "suite" / "ab_report.csv").read_text().count("ranker,") == 4


def launchable() -> bool:
    """Whether Intel's launcher can query this machine."""
    if shutil.which("lscpu") is None or shutil.which("taskset") is None:
        return False
    output = subprocess.run(["lscpu", "--parse=CPU,Core,Socket,Node"], capture_output=True, text=True).stdout
    return re.search(r"^\d+,\d+,\d+,\d+", output, re.M) is not None


def block(shell: TuningShell, lines: list[str]) -> dict[str, str]:
    """The output of each command of a block; a server runs until the block ends."""
    for number, line in enumerate(lines):
        if "run_cpu" in line and not launchable():
            return {}
        if re.search(r"\bpenstock serve ", line):
            before = {each: shell.output(each) for each in lines[:number]}
            with shell.serving(line):
                return before | {each: shell.output(each) for each in lines[number + 1 :]}
    return {line: shell.output(line) for line in lines}
