"""The commands `torch-model-archiver`, also `penstock archive`, and `torch-workflow-archiver`."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click


class Abbreviating(click.Command):
    """A command with unambiguous abbreviations of long flags, as in torch-model-archiver."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = [flag for p in self.get_params(ctx) for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]

        def expand(word: str) -> str:
            name, equals, value = word.partition("=")
            matches = [flag for flag in flags if flag.startswith(name)]
            return matches[0] + equals + value if len(name) > 2 and name not in flags and len(matches) == 1 else word

        return super().parse_args(ctx, [expand(word) if word.startswith("--") else word for word in args])


def warn_of_namesake() -> None:
    """Warns that pip replaced the console script of TorchServe's own package, if that is installed too."""
    from importlib.metadata import PackageNotFoundError, version

    name = os.path.basename(sys.argv[0])
    if name.startswith("torch"):  # as a console script
        with suppress(PackageNotFoundError):
            text = f"{name}: this is Penstock's command, which replaced that of {name} {version(name)}: uninstall one"
            click.echo(f"{text} of the two packages, and install the other one again", err=True)


@contextmanager
def packing() -> Iterator[None]:
    """Prints warnings; ends the command with a message and 1 if the archive cannot be written."""
    from penstock.errors import ArchiveError

    warn_of_namesake()
    logging.basicConfig(format="%(levelname)s - %(message)s")
    try:
        yield
    except (ArchiveError, OSError) as error:
        message = error.message if isinstance(error, ArchiveError) else f"the archive cannot be written: {error}"
        click.echo(f"{click.get_current_context().command_path}: error: {message}", err=True)
        sys.exit(1)


@click.command(cls=Abbreviating, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model-name", required=True, help="The model's name; the archive is MODEL_NAME.mar.")
@click.option("-v", "--version", required=True, help="The model's version.")
@click.option(
    "--handler",
    required=True,
    help="A Python file, with :FUNCTION if the function is not named handle, or the name of a built-in handler.",
)
@click.option("--serialized-file", default="", help="Weights (.pt, .pth), TorchScript or an ONNX file.")
@click.option("--model-file", default="", help="The Python file with the model class of an eager model.")
@click.option(
    "--extra-files", default="", help="Comma-separated files, folders and globs to add; folders are flattened."
)
@click.option("--runtime", type=click.Choice(["python", "python3", "LSP"]), default="python", show_default=True)
@click.option("--export-path", default="", help="The output folder; default: the working directory.")
@click.option(
    "--archive-format",
    type=click.Choice(["default", "zip-store", "tgz", "no-archive"]),
    default="default",
    show_default=True,
    help="default: MODEL_NAME.mar; zip-store: the same, uncompressed; tgz: MODEL_NAME.tar.gz; no-archive: a folder.",
)
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing archive.")
@click.option(
    "-r", "--requirements-file", default="", help="The requirements.txt of the packages that the model needs."
)
@click.option("-c", "--config-file", default="", help="The model's configuration as a YAML file.")
def archive(export_path: str, archive_format: Any, force: bool, **contents: str) -> None:
    """Pack a model, its handler and their files into one archive, like torch-model-archiver.

    Exits with 1 if a file is missing or the archive exists, and with 2 if a flag is wrong.
    """
    from penstock.torchserve.archive.pack import ArchiveContents, pack

    with packing():
        pack(ArchiveContents(**contents), Path(export_path or os.getcwd()), archive_format, force=force)


@click.command(cls=Abbreviating, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--workflow-name", required=True, help="The workflow's name; the archive is WORKFLOW_NAME.war.")
@click.option("--spec-file", required=True, help="The YAML file with the workflow's models and graph.")
@click.option("--handler", default="", help="The Python file with the workflow's functions.")
@click.option("--extra-files", default="", help="Comma list of files, folders and globs to add; folders are flattened.")
@click.option("--export-path", default="", help="The output folder; default: the working directory.")
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing archive.")
def archive_workflow(export_path: str, force: bool, **contents: str) -> None:
    """Pack a workflow's specification, its functions and their files into one archive, like torch-workflow-archiver.

    Exits with 1 if a file is missing or the archive exists, and with 2 if a flag is wrong.
    """
    from penstock.torchserve.archive.pack import WorkflowContents, pack_workflow

    with packing():
        pack_workflow(WorkflowContents(**contents), Path(export_path or os.getcwd()), force=force)
