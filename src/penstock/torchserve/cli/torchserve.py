"""The command `torchserve`, also `penstock torchserve`: its flags, its options, and starting and stopping a server.

argparse parses the flags because scripts rely on its behavior (`--models a b`, abbreviated flags). This module loads
neither the engine nor numpy, so that `--stop` and `--version` return at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import click

from penstock._version import __version__
from penstock.core.os_threads import keep_standard_files
from penstock.errors import Conflict, PenstockError
from penstock.torchserve.cli.archive import warn_of_namesake
from penstock.torchserve.cli.options import parser, resolve_options
from penstock.torchserve.cli.pid_file import ALREADY_RUNNING, NOT_RUNNING, PidFile, pid_path, running_pid, stop

TORCHSERVE_VERSION: Final = "0.12.0"
CONTAINER_INITS: Final = ("catatonit", "docker-init", "dumb-init", "tini")


def main(words: Sequence[str] | None = None) -> NoReturn:
    keep_standard_files()  # before anything opens a descriptor: the log would be the PID file
    given = list(sys.argv[1:] if words is None else words)
    warn_of_namesake()
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
        print(said := stop(path))
        if said == NOT_RUNNING:
            print(f"No server has {path}. Stop a server with the TMPDIR with which it was started.", file=sys.stderr)
        return 0
    if running_pid(path) is not None:
        raise Conflict(ALREADY_RUNNING)
    logging.disable(logging.WARNING)  # the server logs these warnings again, to its files
    try:
        resolve_options(args, os.environ)
    finally:
        logging.disable(logging.NOTSET)
    pid_file = PidFile(path)
    if not args.foreground and not is_main_process():
        pid_file.start_in_background(words)
        return 0
    from penstock.torchserve.cli.server import serve

    try:
        return serve(args)
    finally:
        pid_file.remove()


def is_main_process() -> bool:
    """Whether a container ends with this process: it is process 1, or the child of a container's init."""
    if os.getpid() == 1:
        return True
    try:
        return os.getppid() == 1 and Path("/proc/1/comm").read_text().strip() in CONTAINER_INITS
    except OSError:  # no Linux
        return False
