"""`penstock serve` and `penstock config check`: read flags, files and environment into one Config."""

import os
import sys
from functools import partial
from typing import Any

import click

from penstock.config.checks import check_bind
from penstock.config.load import load_config
from penstock.config.schema import Config
from penstock.config.targets import devices_list, errors_end_the_command, number_or_auto, read_options, split_targets
from penstock.errors import ConfigError, PenstockError
from penstock.platforms import vertex_targets, with_platform
from penstock.plugins import is_pipeline_file

_FLAGS = {"batching": "max-batch-size", "options": "option"}  # flags whose name differs from their key

_INSTEAD = {
    "--model-store": "Write --set server.model_store=FOLDER, or penstock torchserve.",
    **dict.fromkeys(("--log-level", "--debug", "--verbose"), "Write --set logging.level=debug."),
}


def build_config(targets: tuple[str, ...], flags: dict[str, Any], sets: tuple[str, ...]) -> Config:
    """The Config from TARGETs, flags, `--set` and the environment. Raises ConfigError."""
    if not targets:
        if flags.get("platform") != "vertex":
            raise ConfigError("nothing to serve: name a TARGET such as app.py:Model, model.onnx or penstock.toml")
        targets = vertex_targets(os.environ)
    toml, models = split_targets(targets)
    per_model = {k: v for k in ("instances", "devices") if (v := flags[k]) is not None}
    if len(flags["devices"] or ()) > 1 and flags["instances"] is None:
        on_gpu = any(device.startswith("cuda") for device in flags["devices"])
        per_model["instances"] = "auto" if on_gpu else len(flags["devices"])  # one per device
    options = {**({} if flags["model"] is None else {"model": flags["model"]}), **read_options(flags["options"])}
    if options:
        per_model["options"] = options
    if flags["max_batch_size"] is not None:
        per_model["batching"] = {"max_batch_size": flags["max_batch_size"]}
    if per_model and not models:
        raise ConfigError(
            f"--{_FLAGS.get(key := next(iter(per_model)), key)} is for models named on the command line; "
            f"for those of {toml} use --set models.NAME.KEY=..."
        )
    server = {k: v for k in ("host", "port", "tls_cert", "tls_key", "tls_password_file") if (v := flags[k]) is not None}
    if (platform := flags.get("platform")) is not None:
        if server.keys() & {"host", "port"}:
            raise ConfigError(f"--platform {platform} sets the address; leave out --host and --port")
        server["platform"] = platform
    server |= {key: True for key in ("insecure", "keep_going") if flags[key]}
    if flags["reload"]:
        server["keep_going"] = True  # a model that does not load waits for its file to change
    base: dict[str, Any] = {"models": {name: {**keys, **per_model} for name, keys in models.items()}}
    base["server"] = server
    if flags["token_file"] is not None:
        base["auth"] = {"token_file": flags["token_file"]}
    pipelines = [model for model in base["models"].values() if is_pipeline_file(model["target"])]
    if flags["compat"]:
        _set_compat(pipelines)
    files = [] if toml else [model["target"] for model in pipelines]
    config = load_config(toml, env=os.environ, sets=sets, base=base, pipelines=files)
    if _has_pipelines(config):
        from penstock.pipeline.cli import warn_of_sections

        warn_of_sections(config, frozenset(files))
    if not config.models:
        raise ConfigError(
            "nothing to serve: name a TARGET such as app.py:Model, or a TOML with a [models.NAME] section"
        )
    config = with_platform(config, os.environ)
    check_bind(config)
    return config


def _has_pipelines(config: Config) -> bool:
    return any(is_pipeline_file(model.target) for model in config.models.values())


def _set_compat(pipelines: list[dict[str, Any]]) -> None:
    """Reads pipelines in TorchPipe's dialect. Raises ConfigError if there are none."""
    if not pipelines:
        raise ConfigError(
            "--compat applies to pipeline files named on the command line; in a configuration set"
            " models.NAME.options.compat"
        )
    for model in pipelines:
        model["options"] = {**model.get("options", {}), "compat": True}


class _Serve(click.Command):
    """A command that says what to write instead of options that other servers have."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as e:
            if e.option_name not in _INSTEAD:
                raise
            raise click.NoSuchOption(e.option_name, f"{e.message} {_INSTEAD[e.option_name]}", ctx=ctx) from None


@click.command(cls=_Serve)
@click.argument("targets", nargs=-1, metavar="TARGET...")
@click.option(
    "--instances",
    "--workers",
    "instances",
    callback=number_or_auto,
    metavar="N|auto",
    help="Loaded copies of each model or whole pipeline, one process each.",
)
@click.option(
    "--devices", callback=devices_list, metavar="D,D", help="Devices, such as cuda:0,cuda:1; one instance on each."
)
@click.option(
    "--compat", type=click.Choice(["torchpipe"]), help="Pipeline dialect: unknown keys cause warnings, not errors."
)
@click.option("--max-batch-size", callback=number_or_auto, metavar="N|auto", help="Maximum rows per batch.")
@click.option("--model", metavar="ID", help="The same as --option model=ID.")
@click.option("--option", "options", multiple=True, metavar="A=B", help="An argument of each model's class.")
@click.option("--host", help="Address of the inference listener, or unix:PATH [127.0.0.1].")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the inference listener [8080]; 0 takes a free one."
)
@click.option("--token-file", type=click.Path(), help="File with bearer tokens, one per line, for every listener.")
@click.option("--tls-cert", type=click.Path(), help="PEM file of the certificate chain.")
@click.option("--tls-key", type=click.Path(), help="PEM file of the private key.")
@click.option("--tls-password-file", type=click.Path(), help="File with the password of the private key.")
@click.option(
    "--platform",
    type=click.Choice(["sagemaker", "vertex"]),
    help="Managed platform whose environment variables set the address and the routes.",
)
@click.option("--insecure", is_flag=True, help="Allow a non-loopback address without a token.")
@click.option("--keep-going", is_flag=True, help="Serve the other models if one does not load.")
@click.option("--reload", is_flag=True, help="Reload models when their files change, for development.")
@click.option("--record", type=click.Path(), metavar="FILE", help="Write times and sizes of requests as JSON lines.")
@click.option("--set", "sets", multiple=True, metavar="A.B=C", help="Set any configuration key.")
def serve(targets: tuple[str, ...], sets: tuple[str, ...], record: str | None, **flags: Any) -> None:
    """Serve models over HTTP.

    TARGET is app.py:obj, app.py if it has only one model, pkg.mod:obj, a model file such as model.onnx or model.pt, or
    the TOML file of a pipeline or a configuration. NAME=TARGET chooses a model's name. Without a TARGET, --platform
    vertex serves the folder AIP_STORAGE_URI.
    """
    with errors_end_the_command():
        config = build_config(targets, flags, sets)
        check = None
        if _has_pipelines(config) and not config.server.keep_going:  # else the load of a wrong one fails
            from penstock.pipeline.cli import PipelineCheck, pipelines_of

            check = PipelineCheck(pipelines_of(config))
        from penstock.cli.server import run  # while the child process checks

        if check is not None:
            check.result()
        toml, _ = split_targets(targets)
        watched = [toml] if toml else []
        reread = partial(build_config, targets, flags, sets)
        sys.exit(run(config, record=record, reread=reread, watched=watched if flags["reload"] else None))


# ---- penstock config


@click.group()
def config() -> None:
    """Check configuration files."""


@config.command()
@click.argument("file", type=click.Path())
def check(file: str) -> None:
    """Check FILE together with the current PENSTOCK_* variables.

    Prints "ok" and the models, or prints all errors and exits with 1. Pipeline files are checked too.
    """
    from penstock.config.load import describes_model
    from penstock.core.engine.rules import check_rules
    from penstock.errors import ErrorList
    from penstock.pipeline.cli import check_pipelines, pipelines_of
    from penstock.plugins import resolve

    with errors_end_the_command():
        if describes_model(file):
            raise ConfigError(f"{file} is a pipeline; check it with: penstock pipeline check {file}")
        found = load_config(file, env=os.environ)
        errors = ErrorList()
        with errors:
            check_bind(found)
        for name, model in found.models.items():
            with errors:
                try:
                    check_rules(model.batching)
                    resolve("transport", model.transport)
                except PenstockError as error:
                    raise ConfigError(f"models.{name}: {error.message}") from None
        with errors:
            check_pipelines(pipelines_of(found))
        errors.check()
    models = ", ".join(f"{name} ({model.target})" for name, model in found.models.items())
    click.echo(f"ok: {models or 'no models'}")
