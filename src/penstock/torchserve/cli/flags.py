"""The flags of `torchserve`, and what they say together with file and environment.

They are read by argparse, whose ways (`--models a b`, words cut short) are those that scripts rely on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from msgspec import Struct

from penstock.errors import ConfigError
from penstock.torchserve.config.properties import Properties, load_properties


class Settings(Struct, frozen=True, kw_only=True):
    """All that a server is told: the file's keys under those of the command line, and what has no key."""

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
    what.add_argument("--stop", action="store_true", help="stop the server: it answers what it has, and ends")
    add = found.add_argument
    add("--ts-config", metavar="FILE", help="config.properties; the variable TS_CONFIG_FILE is stronger")
    add("--model-store", metavar="FOLDER", help="where model archives are; needed unless the file names it")
    add("--workflow-store", metavar="FOLDER", help="taken and ignored")
    add("--models", nargs="+", metavar="[NAME=]FILE", help="archives of the model store to load, or all")
    add("--log-config", metavar="FILE", help="log4j2 XML, or a .json or .yaml for Python's logging")
    add("--cpp-log-config", metavar="FILE", help="taken and ignored")
    add("--foreground", action="store_true", help="stay, and end with the server")
    add("--no-config-snapshots", "--ncs", action="store_true", help="write no snapshots, and restore none")
    add("--plugins-path", "--ppath", metavar="FOLDER", help="taken and ignored")
    add("--disable-token-auth", "--dt", action="store_true", help="no request needs a token")
    add("--enable-model-api", action="store_true", help="models can be registered and unregistered by requests")
    return found


def settings_of(args: argparse.Namespace, env: Mapping[str, str]) -> Settings:
    """What flags, file and environment say together. Raises ConfigError."""
    named = ("model_store", "workflow_store", "cpp_log_config", "plugins_path")
    flags = {key: found for key in named if (found := getattr(args, key))}
    if args.models:
        flags["load_models"] = ",".join(args.models)
    if args.enable_model_api:
        flags["enable_model_api"] = "true"
    if args.disable_token_auth:
        flags["disable_token_authorization"] = "true"
    _check_paths(args, env)
    file = _file_of(args, env)
    properties = load_properties(file, env=env, flags=flags)
    if properties.model_store is None:
        raise ConfigError("Missing mandatory parameter --model-store")
    if not os.path.isdir(properties.model_store):
        raise ConfigError(f"--model-store directory not found: {properties.model_store}")
    return Settings(
        properties=properties,
        file=file,
        snapshots=not args.no_config_snapshots,
    )


def _file_of(args: argparse.Namespace, env: Mapping[str, str]) -> str | None:
    """The file that is read: the one that is named, else the last snapshot, else that of the working directory."""
    named: str | None = env.get("TS_CONFIG_FILE") or args.ts_config
    if named is not None:
        if not os.path.isfile(named):
            raise ConfigError(f"--ts-config file not found: {named}")
        return named
    if not args.no_config_snapshots:
        from pathlib import Path

        from penstock.torchserve.admin.snapshots import last_snapshot

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
