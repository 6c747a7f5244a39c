"""`penstock config check FILE`: says whether a configuration would be accepted, and starts nothing."""

from __future__ import annotations

import os
import sys

import click


@click.group()
def config() -> None:
    """Looks at configuration files."""


@config.command()
@click.argument("file", type=click.Path())
def check(file: str) -> None:
    """Check FILE, together with the PENSTOCK_* variables that are set now.

    Prints "ok" and the models found, or what is wrong and exits with 1. The files of pipelines are checked, too.
    """
    from penstock.config.checks import check_bind
    from penstock.config.load import load_config
    from penstock.config.toml import describes_pipeline
    from penstock.core.engine.rules import check_rules
    from penstock.errors import ConfigError, PenstockError
    from penstock.pipeline.preflight import check_pipelines, pipelines_of
    from penstock.plugins import resolve

    try:
        if describes_pipeline(file):
            raise ConfigError(f"{file}: tells a pipeline, which is checked by: penstock pipeline check {file}")
        found = load_config(file, env=os.environ)
        check_bind(found)
        for name, model in found.models.items():
            try:
                check_rules(model.batching)
                resolve("transport", model.transport)
            except PenstockError as error:
                raise ConfigError(f"models.{name}: {error.message}") from None
        check_pipelines(pipelines_of(found))
    except ConfigError as error:
        click.echo(f"penstock: {error.message}", err=True)
        sys.exit(1)
    models = ", ".join(f"{name} ({model.target})" for name, model in found.models.items())
    click.echo(f"ok: {models or 'no models'}")
