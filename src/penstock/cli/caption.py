"""`penstock caption`: reads flags, runs one bulk job, and ends with what became of it."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import click

from penstock.bulk.job import NOT_THERE, Job
from penstock.bulk.options import Options
from penstock.bulk.outputs import Wanted
from penstock.bulk.progress import Notes, Teller, teller
from penstock.bulk.report import INCOMPLETE, INTERRUPTED, USAGE
from penstock.bulk.survey import dry_run
from penstock.bulk.types import Sampling
from penstock.client.tokens import read_token
from penstock.config.targets import number_or_auto
from penstock.errors import ConfigError, PenstockError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def size_bytes(_: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """What a flag of a size says: `64Mi`, `500M`, `1000000`."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", value.lower())
    if found is None or (size := int(float(found[1]) * UNITS[found[2] or ""])) < 1:
        raise click.BadParameter(f"expected a size such as 64Mi, 500M or 1000000, found '{value}'", param=parameter)
    return size


def seconds(_: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """What a flag of a time says: `90`, `1:30`, `1:02:03.5`."""
    if value is None:
        return None
    if not re.fullmatch(r"(\d+:){0,2}\d+(\.\d+)?", value):
        raise click.BadParameter(f"expected seconds or [HOURS:]MINUTES:SECONDS, found '{value}'", param=parameter)
    found = 0.0
    for part in value.split(":"):
        found = found * 60 + float(part)
    return found


def make_options(flags: dict[str, Any]) -> Options:
    """The job that the flags describe. Raises ConfigError."""
    if flags["every"] is not None and flags["fps"] is not None:
        raise ConfigError("--every and --fps exclude each other; give one")
    if flags["end"] is not None and flags["end"] <= (flags["start"] or 0.0):
        raise ConfigError("--end must be later than --start")
    if flags["quiet"]:
        flags["progress"] = "none"
    if not flags["servers"] and (flags["retry_failed"] or flags["restart"] or flags["dry_run"] or flags["inputs"]):
        raise ConfigError("name a server: --server http://HOST:PORT (outputs alone are written again without INPUT)")
    if flags["dry_run"] and not flags["inputs"]:
        raise ConfigError("name the videos of the dry run")
    output: Path = flags["output"]
    sampling = Sampling(flags["every"] or 1, flags["fps"], flags["start"] or 0.0, flags["end"], flags["max_frames"])
    prebatch = flags["prebatch_size"]
    return Options(
        inputs=flags["inputs"],
        wanted=Wanted((output, *flags["also"]), flags["vtt"], flags["srt"]),
        work=output.with_name(output.name + ".work"),
        failures=flags["failures"] or output.with_name("failures.jsonl"),
        token=read_token(flags["token_file"]),
        sampling=sampling,
        prebatch_size=None if prebatch in (None, "auto") else prebatch,
        **{
            name: flags[name]
            for name in (
                "servers", "model", "ca", "pixels", "kernel", "mode", "decoders", "memory_bytes", "give_up_s", "wait_s",
                "from0", "restart", "retry_failed",
            )
        },
    )  # fmt: skip


class Signals:
    """SIGINT or SIGTERM: the first drains the job, the second ends the process; what is committed stays."""

    def __init__(self, job: Job, show: Teller) -> None:
        self._job, self._show = job, show
        self._told = False
        self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._told or not self._job.running:
            self._show.abandon()
            os._exit(INTERRUPTED)
        self._told = True
        self._job.interrupt()

    def close(self) -> None:
        """The signals mean again what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


PATH = click.Path(path_type=Path)


@click.command()
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--server", "servers", multiple=True, metavar="URL", help="A server with the captioner; repeatable.")
@click.option("--model", default="captioner", show_default=True, metavar="NAME", help="Its name there.")
@click.option(
    "-o", "--output", type=PATH, default="captions.jsonl", show_default=True, help="A .jsonl, .csv or .parquet file."
)
@click.option("--also", type=PATH, multiple=True, help="The same in another format; repeatable.")
@click.option("--vtt", type=PATH, metavar="FOLDER", help="WebVTT subtitles, a file a video.")
@click.option("--srt", type=PATH, metavar="FOLDER", help="SRT subtitles, a file a video.")
@click.option("--failures", type=PATH, help="Where failed videos are listed [failures.jsonl beside the output].")
@click.option("--every", type=click.IntRange(1), metavar="N", help="Every Nth frame [1].")
@click.option("--fps", type=click.FloatRange(0, min_open=True), metavar="F", help="F frames of each second.")
@click.option("--start", callback=seconds, metavar="TIME", help="From this time on: seconds or [H:]M:S.")
@click.option("--end", callback=seconds, metavar="TIME", help="Up to before this time.")
@click.option("--max-frames", type=click.IntRange(1), metavar="N", help="At most so many a video.")
@click.option(
    "--pixels", type=click.Choice(["server-size", "source", "jpeg"]), default="server-size", show_default=True,
    help="How frames travel: scaled, as they are, or scaled and compressed.",
)  # fmt: skip
@click.option(
    "--kernel", type=click.Choice(["fast", "exact"]), default="fast", show_default=True,
    help="How they are scaled: exact is as the model's own processor, and needs torch.",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(["stream-prebatch", "stream-single", "single"]), default="stream-prebatch",
    show_default=True, help="How frames are sent; the others are for comparison.",
)  # fmt: skip
@click.option("--prebatch-size", callback=number_or_auto, metavar="N|auto", help="Frames a request.")
@click.option("--decoders", type=click.IntRange(1, 256), metavar="N", help="Videos read at the same time.")
@click.option(
    "--memory", "memory_bytes", callback=size_bytes, metavar="SIZE",
    help="Most bytes of pixels that wait [64Mi to 512Mi, as the servers need].",
)  # fmt: skip
@click.option("--token-file", type=click.Path(), help="The server's token; or the variable PENSTOCK_TOKEN.")
@click.option("--ca", type=click.Path(), help="PEM file of the authority that signed the server's certificate.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), default=60.0, show_default=True, metavar="S",
    help="Wait so long for a server at the beginning.",
)  # fmt: skip
@click.option(
    "--give-up", "give_up_s", type=click.FloatRange(0), default=600.0, show_default=True, metavar="S",
    help="Stop when no server has answered for so long.",
)  # fmt: skip
@click.option("--from0", is_flag=True, help="The list on standard input (INPUT -) has NULs in place of newlines.")
@click.option("--retry-failed", is_flag=True, help="Try again the videos that failed.")
@click.option("--restart", is_flag=True, help="Discard the captions of earlier runs.")
@click.option("--dry-run", is_flag=True, help="Tell what there is to do, and send nothing.")
@click.option(
    "--progress", type=click.Choice(["auto", "bar", "plain", "json", "none"]), default="auto", show_default=True,
    help="How far the job is, on standard error.",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Nothing but errors.")
def caption(**flags: Any) -> None:
    """Caption the frames of videos.

    INPUT is a file, a folder, a quoted pattern such as 'disk/**/*.mp4', or - for a list on standard input. Without
    any, the videos of the last run into the same output are meant. A run that was ended goes on where it was.

    Exit status: 0 all captioned, 2 wrong usage, 3 some videos failed or the job had to stop, 130 interrupted.
    """
    try:
        options = make_options(flags)
        if flags["dry_run"]:
            for line in dry_run(options):
                click.echo(line)
            return
        code = run(options, teller(flags["progress"]), quiet=flags["quiet"])
    except NOT_THERE as e:
        click.echo(f"penstock: {e}", err=True)
        code = INCOMPLETE
    except PenstockError as e:
        click.echo(f"penstock: {e}", err=True)
        code = USAGE
    sys.exit(code)


def run(options: Options, show: Teller, *, quiet: bool) -> int:
    """The exit status of the job. Raises PenstockError for one that cannot begin."""
    logger, notes = logging.getLogger("penstock"), Notes(show)
    logger.addHandler(notes)
    job = Job(options, show)
    signals = Signals(job, show)
    try:
        summary = job.run()
    finally:
        logger.removeHandler(notes)
        signals.close()
        show.close()
    show.end(summary.lines(), summary.fields())
    if quiet and summary.stopped is not None:
        click.echo(f"penstock: {summary.stopped}", err=True)
    return summary.exit_code
