"""Runs the guide for TorchPipe's users block by block, in order, with other ports."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

cv2 = pytest.importorskip("cv2")
for _needed in ("onnxruntime", "thriftpy2", "transformers"):
    pytest.importorskip(_needed)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "migrate-from-torchpipe.md").read_text()
EXAMPLE = ROOT / "examples" / "resnet50_pipeline"
PRINTS = {
    "label.py": r"dog\.jpg \d+\nbroken\.jpg error decode: .*no known image format; expected .*WebP\n",
    "unchanged.py": r"",
    "call.py": r"\d+ [01]\.\d+\n",
    "later.py": r"all done\n\[0, 1, 2\]\n",
    "thresholds.py": r"\[False, True\]\n",
    "measure.py": r"(?s).*total_number +20\n.*latency::TP99 +\d.*",
}


def blocks() -> list[tuple[str, str]]:
    """Language and text of each block of the page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.S | re.M)


@pytest.fixture
def folder(tmp_path: Path, mobilenet: Path) -> Path:
    """The files that the page requires: a model, images, the Thrift interface, and its own blocks."""
    from sklearn.datasets import load_sample_image

    (tmp_path / "resnet50.onnx").symlink_to(mobilenet)
    shutil.copy(EXAMPLE / "service.thrift", tmp_path / "serve.thrift")
    photo = cv2.imencode(".jpg", load_sample_image("flower.jpg")[:, :, ::-1])[1].tobytes()
    (tmp_path / "images").mkdir()
    for name in ("dog.jpg", "images/1.jpg"):
        (tmp_path / name).write_bytes(photo)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    for language, text in blocks():
        if language:
            named = re.match(r"# ([\w.]+)\n", text)
            assert named is not None, text
            (tmp_path / named[1]).write_text(text)
    return tmp_path


def test_every_command_of_the_guide_does_what_it_says(folder: Path, serve: Callable[..., Any]) -> None:
    programs = {name[1] for _, text in blocks() if (name := re.match(r"# (\w+\.py)\n", text))}
    assert programs == PRINTS.keys()
    thrift_port, ran = 0, set()
    for line in [line for language, text in blocks() if not language for line in text.splitlines()]:
        words = line.split()
        if line.startswith("pip install"):
            known = importlib.metadata.metadata("penstock").get_all("Provides-Extra") or []
            assert set(re.findall(r"\w+", line.split("[")[1])) <= set(known)
        elif words[:2] == ["penstock", "serve"]:
            assert "server.thrift_port=8888" in words
            server = serve(None, *[word.replace("=8888", "=0") for word in words[2:]], cwd=folder)
            thrift_port = int(server.urls["thrift"].rpartition(":")[2])
        elif words[0] == "curl":
            asked = line.replace("http://127.0.0.1:8080", server.url) + " -s -f"
            (logits,) = json.loads(run(folder, "bash", "-c", asked))
            assert len(logits) == 1000
        elif words[0] == "python":
            (folder / words[1]).write_text((folder / words[1]).read_text().replace("8888", str(thrift_port)))
            assert re.fullmatch(PRINTS[words[1]], run(folder, sys.executable, *words[1:])), line
            ran.add(words[1])
        else:
            said = run(folder, str(Path(sys.executable).parent / words[0]), *words[1:])
            assert "3 nodes, from cpu_decoder to resnet50" in said or words[2] == "convert"
    server.stop()
    for name in programs - ran:
        assert re.fullmatch(PRINTS[name], run(folder, sys.executable, name)), name


def run(folder: Path, *command: str) -> str:
    """The standard output of a command."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
