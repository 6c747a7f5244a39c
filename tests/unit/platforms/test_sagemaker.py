from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.platforms import read_sagemaker
from penstock.platforms.sagemaker import properties_of


def test_one_model_is_served_from_the_folder_of_the_platform(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    found = properties_of(read_sagemaker({"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_TS_BATCH_SIZE": "4"}), True)
    assert found.load_models == [f"model={tmp_path}/model"]
    assert found.models == {"model": {"1.0": {"batchSize": 4}}}
    assert found.inference_address == found.management_address == "http://0.0.0.0:8080"
    assert not found.enable_model_api
    assert found.allowed_urls == []
    assert found.default_workers_per_model == 0


def test_a_multi_model_endpoint_starts_without_models_and_may_load_them() -> None:
    found = properties_of(read_sagemaker({"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_MAX_PAYLOAD_IN_MB": "1"}), True)
    assert found.load_models == []
    assert found.enable_model_api
    assert (found.default_workers_per_model, found.max_request_size) == (1, 2**20)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {},
            "SageMaker calls 0.0.0.0:8080 without a token: allow it with --insecure, or with PENSTOCK_SERVER__INSECURE",
        ),
        ({"PENSTOCK_SERVER__INSECURE": "true"}, "found no folder {base}/model; SageMaker unpacks model.tar.gz there"),
        ({"SAGEMAKER_BIND_TO_PORT": "x"}, "SAGEMAKER_BIND_TO_PORT: found the string 'x', expected a whole number"),
    ],
)
def test_an_endpoint_that_cannot_start_says_what_to_do(tmp_path: Path, env: dict[str, str], message: str) -> None:
    done = CliRunner().invoke(main, ["sagemaker", "serve"], env={"SAGEMAKER_BASE_DIR": str(tmp_path), **env})
    assert done.exit_code == 2
    assert f"penstock: {message.format(base=tmp_path)}" in done.output
