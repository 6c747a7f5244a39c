"""The flags of TorchServe, and the options of a server from flags, file and environment."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from penstock.errors import ConfigError
from penstock.torchserve.admin.snapshots import last_snapshot
from penstock.torchserve.config import Properties, load_properties


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
