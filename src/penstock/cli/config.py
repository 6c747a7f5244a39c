"""`penstock config check FILE`: checks a configuration without starting anything."""

import os
import sys

import click


@click.group()
def config() -> None:
    """Check configuration files."""


@config.command()
@click.argument("file", type=click.Path())
def check(file: str) -> None:
    """Check FILE together with the current PENSTOCK_* variables.

    Prints "ok" and the models, or prints all errors and exits with 1. Pipeline files are checked too.
    """
    from penstock.config.checks import check_bind
    from penstock.config.load import load_config
    from penstock.config.toml import describes_model
    from penstock.core.engine.rules import check_rules
    from penstock.errors import ConfigError, ErrorList, PenstockError
    from penstock.pipeline.cli import check_pipelines, pipelines_of
    from penstock.plugins import resolve

    try:
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
    except ConfigError as error:
        click.echo(f"penstock: {error.message}", err=True)
        sys.exit(error.exit_status)
    models = ", ".join(f"{name} ({model.target})" for name, model in found.models.items())
    click.echo(f"ok: {models or 'no models'}")
