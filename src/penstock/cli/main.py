"""The `penstock` command. Subcommands come from their subsystems and are imported only when they are used."""

import importlib
import re
from pathlib import Path

import click

from penstock._version import __version__
from penstock.core.os_threads import keep_standard_files
from penstock.errors import nearest

_COMMANDS = {
    "archive": "penstock.torchserve.cli.archive:archive",
    "benchmark-suite": "penstock.perf.bench.cli:benchmark_suite",
    "bench": "penstock.perf.bench.cli:bench",
    "caption": "penstock.bulk.cli:caption",
    "compare": "penstock.perf.bench.cli:compare",
    "config": "penstock.cli.serve:config",
    "demo": "penstock.cli.demo.command:demo",
    "doctor": "penstock.cli.doctor:doctor",
    "gate": "penstock.perf.bench.cli:gate",
    "plan": "penstock.perf.cli:plan",
    "pipeline": "penstock.pipeline.cli:pipeline",
    "queue": "penstock.streamer.redis.cli:queue",
    "sagemaker": "penstock.platforms.sagemaker:sagemaker",
    "serve": "penstock.cli.serve:serve",
    "simulate": "penstock.perf.cli:simulate",
    "torchserve": "penstock.torchserve.cli.torchserve:torchserve",
    "tune": "penstock.perf.cli:tune",
    "worker": "penstock.streamer.redis.cli:worker",
}


class _LazyGroup(click.Group):
    """A group that imports its commands on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not args[0].startswith("-") and args[0] not in _COMMANDS:
            ctx.fail(f"there is no command '{args[0]}'{nearest(args[0], _COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="penstock")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Serve models: requests are gathered into full batches and run on workers."""
    keep_standard_files()  # before anything opens a descriptor
    ctx.obj = {"download_archive": _download_archive}


def _download_archive(url: str, folder: Path) -> Path:
    """The archive behind an http(s) URL, downloaded into the folder. Raises ArchiveError."""
    from penstock.torchserve.archive.store import ModelStore

    return ModelStore(folder, allowed_urls=[re.escape(url)]).locate(url)


if __name__ == "__main__":
    main()
