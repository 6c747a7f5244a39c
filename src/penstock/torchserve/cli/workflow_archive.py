"""The command `torch-workflow-archiver`: writes a workflow archive."""

import logging
import os
from pathlib import Path

import click

from penstock.torchserve.cli.archive import Abbreviating, exit_on_error, warn_of_namesake


@click.command(cls=Abbreviating, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--workflow-name", required=True, help="The workflow's name; the archive is WORKFLOW_NAME.war.")
@click.option("--spec-file", required=True, help="The YAML file with the workflow's models and graph.")
@click.option("--handler", default="", help="The Python file with the workflow's functions.")
@click.option("--extra-files", default="", help="Comma list of files, folders and globs to add; folders are flattened.")
@click.option("--export-path", default="", help="The output folder; default: the working directory.")
@click.option("-f", "--force", is_flag=True, help="Overwrite an existing archive.")
def archive(workflow_name: str, spec_file: str, handler: str, extra_files: str, export_path: str, force: bool) -> None:
    """Pack a workflow's specification, its functions and their files into one archive, like torch-workflow-archiver.

    Exits with 1 if a file is missing or the archive exists, and with 2 if a flag is wrong.
    """
    from penstock.torchserve.archive.pack import WorkflowContents, pack_workflow

    warn_of_namesake()
    logging.basicConfig(format="%(levelname)s - %(message)s")
    with exit_on_error():
        contents = WorkflowContents(workflow_name, spec_file, handler, extra_files)
        pack_workflow(contents, Path(export_path or os.getcwd()), force=force)


if __name__ == "__main__":
    archive()
