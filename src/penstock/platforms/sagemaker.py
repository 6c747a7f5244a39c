"""`penstock sagemaker serve`: the server of a SageMaker endpoint, for one model or many, without AWS's toolkit."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import click

from penstock.config.targets import errors_end_the_command
from penstock.core.engine.packages import install_requirements as install
from penstock.errors import ConfigError
from penstock.platforms import SageMakerEnvironment, read_sagemaker
from penstock.torchserve.cli.torchserve import ServerOptions
from penstock.torchserve.config import Properties

HANDLER: Final = "penstock.platforms.sagemaker_handler"
MODEL: Final = "model"


@click.group()
def sagemaker() -> None:
    """Serve the models of a SageMaker endpoint."""


@sagemaker.command()
@click.option(
    "--insecure",
    is_flag=True,
    envvar="PENSTOCK_SERVER__INSECURE",
    help="Listen on all addresses, without tokens, as SageMaker requires.",
)
def serve(insecure: bool) -> None:
    """Serve /opt/ml/model, or with SAGEMAKER_MULTI_MODEL=true the models that SageMaker loads.

    A model is a folder with TorchScript in model.pt, or with code/inference.py.
    """
    with errors_end_the_command():
        environment = read_sagemaker(os.environ)
        options = ServerOptions(properties=properties_of(environment, insecure), snapshots=False)
        install_requirements(environment)
        from penstock.torchserve.cli.server import run

        sys.exit(run(lambda: options))


def properties_of(environment: SageMakerEnvironment, insecure: bool) -> Properties:
    """The configuration of the server. Raises ConfigError."""
    if not insecure:
        raise ConfigError(
            f"SageMaker calls 0.0.0.0:{environment.port} without a token: allow it with --insecure, or with"
            " PENSTOCK_SERVER__INSECURE=true in the image"
        )
    folder = Path(environment.model_dir)
    if not environment.multi_model and not folder.is_dir():
        raise ConfigError(
            f"found no folder {folder}; SageMaker unpacks model.tar.gz there, SAGEMAKER_BASE_DIR moves it"
        )
    address = f"http://0.0.0.0:{environment.port}"
    optional: dict[str, Any] = {
        "default_workers_per_model": environment.workers or (1 if environment.multi_model else None),
        "max_request_size": environment.max_request_bytes,
    }
    return Properties(
        inference_address=address,
        management_address=address,
        metrics_address=address,
        grpc_inference_port=0,
        grpc_management_port=0,
        model_store=environment.base_dir,
        allowed_urls=[],
        load_models=[] if environment.multi_model else [f"{MODEL}={folder}"],
        models={MODEL: {"1.0": dict(environment.settings)}},
        default_response_timeout=environment.response_timeout_s,
        default_startup_timeout=environment.startup_timeout_s,
        default_service_handler=HANDLER,
        decode_input_request=False,
        disable_token_authorization=True,
        ready_ping=True,
        enable_model_api=environment.multi_model,
        **{key: value for key, value in optional.items() if value is not None},
    )


def install_requirements(environment: SageMakerEnvironment) -> None:
    """Installs the packages of `code/requirements.txt`, if it exists, for the workers. Raises LoadFailed."""
    file = Path(environment.model_dir, "code", "requirements.txt")
    if not file.is_file():
        return
    folder = Path(tempfile.gettempdir(), f"penstock-{os.getuid()}", "requirements")
    packages = str(install(file, folder, model=MODEL))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
