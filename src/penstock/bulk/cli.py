"""`penstock caption`: parses flags, runs one bulk job, and exits with its status."""

import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast, get_args

import click
import msgspec

from penstock.bulk.engine import engine_url
from penstock.bulk.job import BulkJob, dry_run
from penstock.bulk.options import JobOptions
from penstock.bulk.outputs import OutputPaths, check_outputs
from penstock.bulk.progress import INCOMPLETE, ProgressReporter, WarningHandler, make_reporter
from penstock.bulk.servers import NOT_UP, Asked, Backend
from penstock.bulk.shards import Shard, shard_of
from penstock.bulk.types import PixelMode, Sampling
from penstock.client.endpoint import read_token
from penstock.config.targets import number_or_auto
from penstock.errors import INTERRUPTED, USAGE, ConfigError, PenstockError
from penstock.plugins import resolve
from penstock.values import quantity

WAIT_S, GIVE_UP_S = 60.0, 600.0  # for a server that starts, and for one that is away
ENGINE_WAIT_S = 1800.0  # for both, because an engine loads its model first
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
SCENE_THRESHOLD = 27.0  # PySceneDetect's default
PATH = click.Path(path_type=Path)


# The types of options: click adds the name of the option to the errors that they raise.


def size_bytes(text: str) -> int:
    """The bytes of a size: `64Mi`, `500M`, `1000000`."""
    size = int(quantity(text.lower().removesuffix("b"), UNITS) or 0)
    if size < 1:
        raise click.BadParameter(f"expected a size such as 64Mi, 500M or 1000000, found '{text}'")
    return size


def seconds(text: str) -> float:
    """The seconds of a time: `90`, `1:30`, `1:02:03.5`."""
    if not re.fullmatch(r"(\d+:){0,2}\d+(\.\d+)?", text):
        raise click.BadParameter(f"expected seconds or [HOURS:]MINUTES:SECONDS, found '{text}'")
    total = 0.0
    for part in text.split(":"):
        total = total * 60 + float(part)
    return total


def some_seconds(text: str) -> float:
    """The seconds of a time, more than 0."""
    if not (found := seconds(text)):
        raise click.BadParameter("expected more than 0 seconds")
    return found


def interval(text: str) -> int | float:
    """The frames of an interval as an integer, `30` or `30f`, or its seconds as a float, `2s` or `0.5s`."""
    found = re.fullmatch(r"(?:(\d+)f?|(\d+(?:\.\d+)?)s)", text)
    number = found and (int(found[1]) if found[1] else float(found[2]))
    if not number:
        raise click.BadParameter(f"expected frames such as 30f or seconds such as 2s, found '{text}'")
    return number


def text_or_file(text: str) -> str:
    """The text itself, or the content of the file whose name follows an @."""
    try:
        return Path(text[1:]).read_text() if text.startswith("@") else text
    except (OSError, ValueError) as e:
        raise click.BadParameter(f"{text[1:]} cannot be read: {e}") from None


def json_object(text: str) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        return msgspec.json.decode(Path(text).read_bytes(), type=dict[str, Any])
    except (OSError, ValueError) as e:
        raise click.BadParameter(f"{text} is not a file with a JSON object: {e}") from None


def prices(text: str) -> tuple[float, float]:
    """Two prices such as 0.25,1.5."""
    found = [quantity(part, {"": 1.0}) for part in text.split(",")]
    if len(found) != 2 or found[0] is None or found[1] is None:
        raise click.BadParameter(f"expected two prices such as 0.25,1.5, found '{text}'")
    return found[0], found[1]


def cluster(text: str) -> str:
    """The address of a Ray cluster."""
    if text != "auto" and not re.fullmatch(r"[^/]+:\d+", text):
        raise click.BadParameter(
            f"expected auto or an address such as 10.0.0.1:6379, found '{text}'; before INPUT write --ray=auto"
        )
    return text


def suffixes(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> frozenset[str]:
    """The suffixes of a list such as `mp4,.MKV`, in lower case and with a dot."""
    names = [name.strip().lower().removeprefix(".") for value in values for name in value.split(",")]
    if not all(names):
        raise click.BadParameter("expected extensions such as mp4,mkv", param=parameter)
    return frozenset(f".{name}" for name in names)


def make_backend(flags: dict[str, Any]) -> Backend:
    """The backend with the flags that say what to ask. Raises ConfigError."""
    asked = {name: flags[name] for name in ("prompt", "system", "max_tokens", "max_pixels", "schema", "request")}
    given = {name: value for name, value in asked.items() if value is not None}
    return cast(Backend, resolve("caption-backend", flags["backend"])(Asked(**given)))


def make_options(flags: dict[str, Any]) -> JobOptions:
    """The job that the flags describe. Raises ConfigError."""
    chosen = [f"--{name}" for name in ("every", "fps", "keyframes", "scene", "clip") if flags[name]]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other; give one")
    for option, needed in (("clip", "frames"), ("frames", "clip"), ("scene_threshold", "scene")):
        if flags[option] and not flags[needed]:
            raise ConfigError(f"--{option.replace('_', '-')} needs --{needed}")
    for option in ("dedupe", "max_frames"):
        if flags["clip"] and flags[option] is not None:
            raise ConfigError(f"--clip and --{option.replace('_', '-')} exclude each other; --end shortens a video")
    if flags["decoder"] == "auto":
        flags["decoder"] = "pyav"
    for option in ("keyframes", "tone_map", "deinterlace"):
        if flags["decoder"] == "torchcodec" and flags[option]:
            raise ConfigError(f"--{option.replace('_', '-')} needs --decoder pyav")
    if flags["ray"] and (flags["rpm"] or flags["tpm"]):  # each task has its own sender
        raise ConfigError("--rpm and --tpm need one process that sends: leave out --ray, or limit the servers")
    if flags["carry"] and flags["dedupe"] is None:
        raise ConfigError("--carry-captions needs --dedupe, which finds the frames to carry captions to")
    if flags["end"] is not None and flags["end"] <= (flags["start"] or 0.0):
        raise ConfigError("--end must be later than --start")
    backend = make_backend(flags)
    if flags["engine"] and flags["dry_run"]:
        raise ConfigError("--engine starts no server for a --dry-run; start it, and name it by --server")
    if flags["engine"] and not flags["servers"]:
        flags["servers"] = (engine_url(flags["engine"]),)
    if flags["engine"] and flags["ray"]:
        raise ConfigError("--engine starts a server on this machine; for the nodes of --ray, name one by --server")
    for name, seconds_of_servers in (("wait_s", WAIT_S), ("give_up_s", GIVE_UP_S)):
        if flags[name] is None:
            flags[name] = ENGINE_WAIT_S if flags["engine"] else seconds_of_servers
    if not flags["servers"] and (flags["retry_failed"] or flags["restart"] or flags["dry_run"] or flags["inputs"]):
        raise ConfigError("name a server: --server http://HOST:PORT (only writing outputs again needs none, nor INPUT)")
    if flags["dry_run"] and not flags["inputs"]:
        raise ConfigError("name the videos of the dry run")
    prebatch = flags["prebatch_size"]
    shard = None if flags["shard"] is None else shard_of(flags["shard"], os.environ)
    outputs, work, failures = make_paths(flags, shard)
    made: dict[str, Any] = {
        "outputs": outputs,
        "work": work,
        "failures": failures,
        "shard": shard,
        "token": read_token(flags["token_file"]),
        "sampling": make_sampling(flags),
        "backend": backend,
        "model": flags["model"] or backend.model,
        "pixels": flags["pixels"] or backend.pixels,
        "prebatch_size": None if prebatch == "auto" else prebatch,
    }
    return JobOptions(**{name: flags[name] for name in JobOptions.__struct_fields__ if name in flags} | made)


def make_paths(flags: dict[str, Any], shard: Shard | None = None) -> tuple[OutputPaths, Path, Path]:
    """The outputs, the work folder and the list of failures. A shard leaves the outputs to the merge."""
    output: Path = flags["output"]
    outputs = OutputPaths((output, *flags["also"]), flags["vtt"], flags["srt"])
    failures: Path | None = flags["failures"]
    if shard is None:
        return outputs, output.with_name(output.name + ".work"), failures or output.with_name("failures.jsonl")
    if given := [f"--{name}" for name in ("also", "vtt", "srt", "failures") if flags[name]]:
        raise ConfigError(f"--shard: give {' and '.join(given)} to penstock caption merge, which writes the outputs")
    work = shard.folder(output)
    check_outputs(outputs, work / "failures.jsonl")
    return OutputPaths(()), work, work / "failures.jsonl"


def make_sampling(flags: dict[str, Any]) -> Sampling:
    """The choice of frames."""
    every, fps = flags["every"] or 1, flags["fps"]
    if isinstance(every, float):
        every, fps = 1, 1 / every
    if flags["clip"]:
        fps = flags["frames"] / flags["clip"]
    return Sampling(
        every=every,
        fps=fps,
        start_s=flags["start"] or 0.0,
        end_s=flags["end"],
        scene=(flags["scene_threshold"] or SCENE_THRESHOLD) if flags["scene"] else None,
        clip_frames=flags["frames"],
        **{name: flags[name] for name in ("max_frames", "stream", "keyframes", "dedupe", "carry")},
    )


class SignalHandlers:
    """Handles SIGINT and SIGTERM: the first drains the job, the second ends the process; committed rows stay."""

    def __init__(self, job: BulkJob, reporter: ProgressReporter) -> None:
        self._job, self._reporter = job, reporter
        self._interrupted = False
        self._previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted or not self._job.running:
            self._reporter.abandon()
            os._exit(INTERRUPTED)
        self._interrupted = True
        self._job.interrupt()

    def close(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that name the files of captions and failures."""
    for option in reversed((
        click.option("-o", "--output", type=PATH, default="captions.jsonl", show_default=True,
                     help="A .jsonl, .csv or .parquet file."),
        click.option("--also", type=PATH, multiple=True, help="Also write this file, in another format; repeatable."),
        click.option("--vtt", type=PATH, metavar="FOLDER", help="Write WebVTT subtitles, one file for each video."),
        click.option("--srt", type=PATH, metavar="FOLDER", help="Write SRT subtitles, one file for each video."),
        click.option("--failures", type=PATH, help="List of failed videos [failures.jsonl next to the output]."),
    )):  # fmt: skip
        command = option(command)
    return command


@click.command()
@output_options
def merge(**flags: Any) -> None:
    """Write the outputs of all shards of a job.

    -o names the same file as in the shards; their folders OUTPUT.shard-I-of-N.work are beside it. The outputs are, byte
    for byte, the ones of a job on one machine.

    Exit status: 0 all captioned, 2 a shard is missing or has not ended, 3 some videos failed.
    """
    try:
        outputs, work, failures = make_paths(flags)
        reporter = make_reporter("none")
        job = BulkJob(JobOptions(inputs=(), outputs=outputs, work=work, failures=failures), reporter)
        summary = job.merge()
        reporter.end(summary)
        code = summary.exit_code
    except PenstockError as e:
        click.echo(f"penstock: {e}", err=True)
        code = USAGE
    sys.exit(code)


class _Caption(click.Command):
    """A command with an INPUT in front of which `merge` is a command of its own. A folder of that name is ./merge."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["merge"]:
            return merge.make_context(f"{info_name} merge", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(cls=_Caption)
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@click.option("--server", "servers", multiple=True, metavar="URL", help="A server with the captioner; repeatable.")
@click.option("--model", metavar="NAME", help="Model on the server [captioner; of openai, the only one].")
@click.option(
    "--backend", default="penstock", show_default=True, metavar="NAME",
    help="API of the servers: penstock; openai for vLLM, SGLang and others; or pkg.mod:Class.",
)  # fmt: skip
@click.option("--prompt", type=text_or_file, metavar="TEXT|@FILE", help="Question about each image.")
@click.option("--system", type=text_or_file, metavar="TEXT|@FILE", help="System message.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Limit of an answer [128].")
@click.option(
    "--max-pixels", type=click.IntRange(1), metavar="N", help="Scale images down to so many pixels [1003520]."
)
@click.option("--schema", type=json_object, metavar="FILE", help="JSON schema that answers must fulfil.")
@click.option("--request", type=json_object, metavar="FILE", help="JSON with further fields of each request.")
@click.option("--rpm", type=click.FloatRange(0, min_open=True), metavar="N", help="Send at most N requests a minute.")
@click.option("--tpm", type=click.FloatRange(0, min_open=True), metavar="N", help="Spend at most N tokens a minute.")
@click.option("--engine", metavar="COMMAND", help="Start this server, such as 'vllm serve MODEL', and keep it running.")
@click.option("--price", type=prices, metavar="IN,OUT", help="Prices of a million tokens, for the summary.")
@output_options
@click.option(
    "--every", type=interval, metavar="Nf|Ss", help="Caption every Nth frame (30, 30f), or one every S seconds (2s)."
)
@click.option("--fps", type=click.FloatRange(0, min_open=True), metavar="F", help="Caption F frames per second.")
@click.option("--keyframes", is_flag=True, help="Caption keyframes only; most files need no other frame decoded.")
@click.option("--scene", is_flag=True, help="Caption the first frame of each scene; needs PySceneDetect.")
@click.option(
    "--scene-threshold", type=click.FloatRange(0, 255, min_open=True), metavar="T",
    help="Change of hue, saturation and brightness, of 255, that begins a scene [27].",
)  # fmt: skip
@click.option("--clip", type=some_seconds, metavar="S", help="Divide videos into clips of S seconds; needs --frames.")
@click.option("--frames", type=click.IntRange(1), metavar="N", help="Caption N evenly spaced frames of each clip.")
@click.option(
    "--dedupe", type=click.IntRange(0, 255), metavar="BITS",
    help="Skip frames whose perceptual hash differs by at most BITS of 256 from the last captioned one.",
)  # fmt: skip
@click.option("--carry-captions", "carry", is_flag=True, help="Give skipped near-duplicates the caption they repeat.")
@click.option("--start", type=seconds, metavar="TIME", help="Start at this time: seconds or [H:]M:S.")
@click.option("--end", type=seconds, metavar="TIME", help="Stop before this time.")
@click.option("--max-frames", type=click.IntRange(1), metavar="N", help="Caption at most N frames of each video.")
@click.option(
    "--stream", type=click.IntRange(0), metavar="N", help="Read stream N of each file, as ffprobe counts [the best]."
)
@click.option(
    "--pixels", type=click.Choice(get_args(PixelMode)),
    help="How frames travel: scaled, unscaled, scaled and compressed, or images by their address [server-size; jpeg].",
)  # fmt: skip
@click.option(
    "--kernel", type=click.Choice(["fast", "exact"]), default="fast", show_default=True,
    help="How frames are scaled: exact matches the model's own processor and needs torch.",
)  # fmt: skip
@click.option(
    "--decoder", type=click.Choice(["auto", "pyav", "torchcodec"]), default="auto", show_default=True,
    help="What decodes: torchcodec decodes only chosen frames and those that they depend on; auto is pyav.",
)  # fmt: skip
@click.option("--tone-map", is_flag=True, help="Convert HDR to the colours of ordinary video.")
@click.option("--deinterlace", is_flag=True, help="Send one field of interlaced frames.")
@click.option(
    "--mode", type=click.Choice(["stream-prebatch", "stream-single", "single"]), default="stream-prebatch",
    show_default=True, help="How frames are sent; the last two are for comparison.",
)  # fmt: skip
@click.option("--prebatch-size", callback=number_or_auto, metavar="N|auto", help="Frames in a request.")
@click.option("--decoders", type=click.IntRange(1, 256), metavar="N", help="Videos decoded concurrently.")
@click.option(
    "--memory", "memory_bytes", type=size_bytes, metavar="SIZE",
    help="Memory for pixels [64Mi to 512Mi, depending on the servers].",
)  # fmt: skip
@click.option("--token-file", type=click.Path(), help="File with the server's token; or set PENSTOCK_TOKEN.")
@click.option("--ca", type=click.Path(), help="PEM file of the certificate authority of the server.")
@click.option(
    "--wait", "wait_s", type=click.FloatRange(0), metavar="S",
    help="Seconds to wait for a server at the beginning [60; 1800 with --engine].",
)  # fmt: skip
@click.option(
    "--give-up", "give_up_s", type=click.FloatRange(0), metavar="S",
    help="Stop after this many seconds without a response from any server [600; 1800 with --engine].",
)  # fmt: skip
@click.option(
    "--request-timeout", "request_timeout_s", type=click.FloatRange(0, min_open=True), default=300.0,
    show_default=True, metavar="S", help="Seconds for a request. A server that answers none for so long hangs.",
)  # fmt: skip
@click.option("--from0", is_flag=True, help="Separate the list on standard input (INPUT -) by NUL instead of newline.")
@click.option(
    "--allow-url", "allowed_urls", multiple=True, metavar="URL",
    help="Also read videos at URLs that begin with this, such as https://bucket.example/videos/; repeatable.",
)  # fmt: skip
@click.option(
    "--extensions", multiple=True, callback=suffixes, metavar="E,E",
    help="Take only files of folders and patterns that end in these; repeatable [every video].",
)  # fmt: skip
@click.option(
    "--on-damage", type=click.Choice(["skip", "stop"]), default="skip", show_default=True,
    help="Continue a damaged video at the next decodable frame, or end it.",
)  # fmt: skip
@click.option(
    "--shard", metavar="I/N",
    help="Caption part I of N, on one of N machines: 2/8, or auto/8 in a Slurm array or an indexed Job of Kubernetes.",
)  # fmt: skip
@click.option(
    "--ray", is_flag=False, flag_value="auto", type=cluster, metavar="[HOST:PORT]",
    help="Decode and send on the nodes of a Ray cluster [the one of RAY_ADDRESS or of this machine].",
)  # fmt: skip
@click.option("--retry-failed", is_flag=True, help="Retry failed videos.")
@click.option("--restart", is_flag=True, help="Discard the captions of earlier runs.")
@click.option("--dry-run", is_flag=True, help="List the work and send no frames.")
@click.option(
    "--progress", type=click.Choice(["auto", "bar", "plain", "json", "none"]), default="auto", show_default=True,
    help="Progress on standard error; notes and the summary are always printed.",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def caption(**flags: Any) -> None:
    """Caption the frames of videos.

    INPUT is a file, a folder, a quoted pattern such as 'disk/**/*.mp4', a URL (with --allow-url), or - for a list on
    standard input. Without INPUT, the job continues with the videos of the last run into the same output. An
    interrupted run continues where it stopped. After runs with --shard, `penstock caption merge` writes the outputs.

    Exit status: 0 all captioned, 2 wrong usage, 3 some videos failed or the job had to stop, 130 interrupted.
    """
    try:
        options = make_options(flags)
        if flags["dry_run"]:
            for line in dry_run(options):
                click.echo(line)
            return
        code = run(options, make_reporter("quiet" if flags["quiet"] else flags["progress"]))
    except NOT_UP as e:
        click.echo(f"penstock: {e}", err=True)
        code = INCOMPLETE
    except PenstockError as e:
        click.echo(f"penstock: {e}", err=True)
        code = USAGE
    sys.exit(code)


def run(options: JobOptions, reporter: ProgressReporter) -> int:
    """The exit status of the job. Raises PenstockError if it cannot begin."""
    logger, warnings = logging.getLogger("penstock"), WarningHandler(reporter)
    logger.addHandler(warnings)
    parts = None
    if options.ray is not None:
        cluster = resolve("cluster", "ray")("" if options.ray == "auto" else options.ray)
        parts = cluster.parts()
        options = msgspec.structs.replace(options, decoders=options.decoders or cluster.cpus)
    job = BulkJob(options, reporter, parts)
    handlers = SignalHandlers(job, reporter)
    try:
        summary = job.run()
    finally:
        logger.removeHandler(warnings)
        handlers.close()
        reporter.close()
    reporter.end(summary)
    return summary.exit_code
