"""The models and commands of docs/migrate.md run as written."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.pages import ROOT, blocks, write

PAGE = (ROOT / "docs" / "migrate.md").read_text()
SECTIONS = dict(re.findall(r"^## From ([\w ]+)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))


@pytest.mark.parametrize("system", SECTIONS)
def test_the_model_answers_as_the_section_shows(serve: Callable[..., Any], tmp_path: Path, system: str) -> None:
    for language, block in blocks(SECTIONS[system]):
        if language == "python":
            write(block, tmp_path)
    (commands,) = (block for language, block in blocks(SECTIONS[system]) if not language)
    start, *lines = commands.splitlines()
    server = serve(None, *start.removeprefix("penstock serve ").split(), cwd=tmp_path)
    for line in lines:
        command, _, shown = line.partition(" # ")
        command = command.replace("http://127.0.0.1:8080", server.url) + " -s -f"
        assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout == shown
    client = tmp_path / "client.py"
    if client.exists():
        client.write_text(client.read_text().replace("127.0.0.1:8080", server.url.removeprefix("http://")))
        done = subprocess.run([sys.executable, client], capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("[[2. 4.]]\n", 0), done.stderr
    else:
        assert lines


def test_every_system_of_the_table_has_a_section_or_a_page() -> None:
    rows = set(re.findall(r"^\| ([\w ]+) \|", PAGE.partition("## From")[0], re.M)) - {"from"}
    assert rows == {"TorchServe", "service_streamer", "TorchPipe", *SECTIONS}


def test_the_models_and_the_ensemble_of_tritons_page_answer(serve: Callable[..., Any], tmp_path: Path) -> None:
    for language, block in blocks((ROOT / "docs" / "migrate-from-triton.md").read_text()):
        if language in ("python", "toml"):
            write(block, tmp_path)
    (tmp_path / "labels.txt").write_text("cat\ndog\nbird")
    server = serve(None, "penstock.toml", cwd=tmp_path)

    def ask(model: str, outputs: list[Any], **inputs: tuple[str, list[Any]]) -> Any:
        given = [
            {"name": name, "datatype": datatype, "shape": [1, len(data)], "data": data}
            for name, (datatype, data) in inputs.items()
        ]
        status, body = server.post(
            f"/v2/models/{model}/infer", json.dumps({"inputs": given, "outputs": outputs}).encode()
        )
        assert status == 200, body
        return json.loads(body)["outputs"][0]

    best = {"name": "y", "parameters": {"classification": 1}}
    assert ask("scores", [best], x=("FP32", [1, 2, 1]))["data"] == ["0.500000:1:dog"]
    server = serve(None, "chain.toml", cwd=tmp_path)
    total = ask("chain", [], A=("INT32", [1, 2]), B=("INT32", [3, 4]))
    assert (total["name"], total["data"]) == ("SUM", [4, 6])
