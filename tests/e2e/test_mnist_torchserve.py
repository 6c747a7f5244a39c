"""The digits example is run by the commands of its README; only the ports are others."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist_torchserve"
COMMANDS = ("python", "torch-model-archiver", "torchserve", "curl")


@pytest.mark.slow
def test_the_commands_of_the_readme_train_archive_serve_predict_and_explain(torchserve: Any) -> None:
    shutil.copytree(EXAMPLE, torchserve.folder, dirs_exist_ok=True)
    torchserve.configure_like((EXAMPLE / "config.properties").read_text())
    lines = [line for line in (EXAMPLE / "README.md").read_text().splitlines() if line.split(" ")[0] in COMMANDS]
    assert [line.split()[0] for line in lines] == [*COMMANDS[:3], "curl", "curl", "torchserve"]

    score = re.search(r"([\d.]+)% of 450", torchserve.bash(lines[0]))
    assert score is not None
    assert float(score[1]) > 97
    torchserve.bash(lines[1])
    torchserve.env["OMP_NUM_THREADS"] = "1"
    torchserve.start(*lines[2].split()[2:])
    predicted, explained = (json.loads(torchserve.bash(line)) for line in lines[3:5])
    assert list(predicted) == ["seven"]
    assert predicted["seven"] > 0.9
    assert [len(explained), *map(len, explained[0])] == [1, *[8] * 8]
    assert max(abs(value) for row in explained[0] for value in row) > 0
    status, said = torchserve.run("torchserve", *lines[5].split()[1:])
    assert (status, said.splitlines()[-1]) == (0, "TorchServe has stopped.")
