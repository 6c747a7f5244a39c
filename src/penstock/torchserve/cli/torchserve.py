"""The command `torchserve`, also `penstock torchserve`: its flags, its options, and starting and stopping a server.

argparse parses the flags because scripts rely on its behavior (`--models a b`, abbreviated flags). This module loads
neither the engine nor numpy, so that `--stop` and `--version` return at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import click
from msgspec import Struct

from penstock._version import __version__
from penstock.core.os_threads import keep_standard_files
from penstock.errors import ConfigError, Conflict, PenstockError
from penstock.torchserve.admin.files import last_snapshot
from penstock.torchserve.cli.archive import warn_of_namesake
from penstock.torchserve.cli.pid_file import ALREADY_RUNNING, NOT_RUNNING, PidFile, pid_path, running_pid, stop
from penstock.torchserve.config import Properties, load_properties

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


# ---- options


class ServerOptions(Struct, frozen=True, kw_only=True):
    """The configuration of a server: the properties, in which flags override the file, and options without a key."""

    properties: Properties
    file: str | None = None
    snapshots: bool = True


def parser() -> argparse.ArgumentParser:
    """The flags of TorchServe 0.12.0."""
    found = argparse.ArgumentParser(
        prog="torchserve", description="Serves model archives, with the flags, files and APIs of TorchServe."
    )
    what = found.add_mutually_exclusive_group()
    what.add_argument("-v", "--version", action="store_true", help="print the version")
    what.add_argument("--start", action="store_true", help="start the server (also without this flag)")
    what.add_argument("--stop", action="store_true", help="stop the server after it answers the requests in progress")
    add = found.add_argument
    add("--ts-config", metavar="FILE", help="config.properties; the variable TS_CONFIG_FILE overrides it")
    add("--model-store", metavar="FOLDER", help="folder of the model archives; required unless the file sets it")
    add("--workflow-store", metavar="FOLDER", help="folder of the workflow archives; default: the model store")
    add("--models", nargs="+", metavar="[NAME=]FILE", help="archives of the model store to load, or all")
    add("--log-config", metavar="FILE", help="log4j2 XML file, or a .json or .yaml file for Python's logging")
    add("--cpp-log-config", metavar="FILE", help="accepted and ignored")
    add(
        "--foreground",
        action="store_true",
        help="run in the foreground, as the main process of a container does anyway",
    )
    add("--no-config-snapshots", "--ncs", action="store_true", help="write and restore no snapshots")
    add("--plugins-path", "--ppath", metavar="FOLDER", help="accepted and ignored")
    add("--disable-token-auth", "--dt", action="store_true", help="require no tokens")
    add("--enable-model-api", action="store_true", help="allow requests to register and unregister models")
    return found


def resolve_options(args: argparse.Namespace, env: Mapping[str, str]) -> ServerOptions:
    """The options from flags, file and environment. Raises ConfigError."""
    named = ("model_store", "workflow_store", "cpp_log_config", "plugins_path")
    flags = {key: found for key in named if (found := getattr(args, key))}
    if args.models:
        flags["load_models"] = ",".join(args.models)
    if args.enable_model_api:
        flags["enable_model_api"] = "true"
    if args.disable_token_auth:
        flags["disable_token_authorization"] = "true"
    _check_paths(args, env)
    file = _find_file(args, env)
    properties = load_properties(file, env=env, flags=flags)
    if properties.model_store is None:
        raise ConfigError("Missing mandatory parameter --model-store")
    if not os.path.isdir(properties.model_store):
        raise ConfigError(f"--model-store directory not found: {properties.model_store}")
    return ServerOptions(properties=properties, file=file, snapshots=not args.no_config_snapshots)


def _find_file(args: argparse.Namespace, env: Mapping[str, str]) -> str | None:
    """The named file, else the last snapshot, else config.properties in the working directory."""
    named: str | None = env.get("TS_CONFIG_FILE") or args.ts_config
    if named is not None:
        if not os.path.isfile(named):
            raise ConfigError(f"--ts-config file not found: {named}")
        return named
    if not args.no_config_snapshots:
        last = last_snapshot(Path(env.get("LOG_LOCATION") or "logs"))
        if last is not None:
            return str(last)
    return "config.properties" if os.path.isfile("config.properties") else None


def _check_paths(args: argparse.Namespace, env: Mapping[str, str]) -> None:
    for flag in ("log_config", "cpp_log_config"):
        path = getattr(args, flag)
        if path and not os.path.isfile(path):
            raise ConfigError(f"--{flag.replace('_', '-')} file not found: {os.path.realpath(path)}")
    if args.workflow_store and not os.path.isdir(args.workflow_store):
        raise ConfigError(f"--workflow-store directory not found: {args.workflow_store}")
    folder = env.get("TEMP")
    if folder and not os.path.isdir(folder):
        raise ConfigError(f"Invalid temp directory: {folder}, please check TEMP environment variable.")
