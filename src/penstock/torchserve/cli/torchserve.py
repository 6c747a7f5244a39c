"""The command `torchserve`, also `penstock torchserve`: starts and stops a server with TorchServe's flags."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import click

from penstock._version import __version__
from penstock.errors import Conflict, PenstockError
from penstock.torchserve.cli.flags import parser, resolve_options
from penstock.torchserve.cli.pid_file import ALREADY_RUNNING, PidFile, pid_path, running_pid, stop

TORCHSERVE_VERSION: Final = "0.12.0"
SERVER_MODULE: Final = "penstock.torchserve.cli.server"


def main(words: Sequence[str] | None = None) -> NoReturn:
    """The console script."""
    given = list(sys.argv[1:] if words is None else words)
    try:
        code = _run(parser().parse_args(given), given)
    except PenstockError as error:
        print(error.message)  # on stdout, where scripts look for it
        code = 1
    sys.exit(code)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def torchserve(words: tuple[str, ...]) -> None:
    """Start or stop a drop-in TorchServe server; see `penstock torchserve --help`."""
    main(words)


def _run(args: argparse.Namespace, words: list[str]) -> int:
    if args.version:
        print(f"TorchServe Version is {TORCHSERVE_VERSION}")
        print(f"Penstock {__version__}")
        return 0
    path = pid_path()
    if args.stop:
        print(stop(path))
        return 0
    if running_pid(path) is not None:
        raise Conflict(ALREADY_RUNNING)
    logging.disable(logging.WARNING)  # the server logs these warnings again, to its files
    try:
        resolve_options(args, os.environ)
    finally:
        logging.disable(logging.NOTSET)
    pid_file = PidFile(path)
    if not args.foreground:
        pid_file.start_in_background(SERVER_MODULE, words)
        return 0
    from penstock.torchserve.cli.server import serve

    try:
        return serve(args)
    finally:
        pid_file.remove()


if __name__ == "__main__":
    main()
