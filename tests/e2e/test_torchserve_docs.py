"""Runs every command of the TorchServe migration guide in order, on free ports."""

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "migrate-from-torchserve.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
PORTS = {"8080": "Inference", "8081": "Management", "8082": "Metrics"}


class Shell:
    """Runs the commands of a page in a folder; shell variables carry over to later commands."""

    def __init__(self, torchserve: Any) -> None:
        self._server = torchserve
        self._set: list[str] = []
        self.answers: list[tuple[str, Any]] = []  # (path, answer) of each curl
        torchserve.env["PATH"] = f"{Path(sys.executable).parent}:{torchserve.env['PATH']}"

    def run(self, line: str) -> None:
        if line.startswith("pip uninstall"):
            return
        if line.startswith("pip install"):
            known = importlib.metadata.metadata("penstock").get_all("Provides-Extra") or []
            named = re.search(r"\[(.*)\]", line)
            assert named is not None
            assert set(named[1].split(",")) <= set(known)
        elif line.startswith("torchserve --start"):
            self._server.start(*line.split()[2:])
        elif re.match(r"\w+=", line):
            self._set.append(line)
        else:
            self._bash(line)

    def _bash(self, line: str) -> None:
        asked = re.search(r'127\.0\.0\.1:(\d+)(/[^"\s]*)', line)
        for port, api in PORTS.items() if asked else ():
            line = line.replace(f"http://127.0.0.1:{port}", self._server.url(api))
        archiver = "from penstock.torchserve.cli.archive import archive_workflow as run; run()"
        line = line.replace("torch-workflow-archiver", f"{sys.executable} -c '{archiver}'")
        script = "\n".join(["set -e", *self._set, line + (" -s -f" if asked else "")])
        done = subprocess.run(
            ["bash", "-c", script], cwd=self._server.folder, env=self._server.env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if asked:
            try:
                answer = json.loads(done.stdout)
            except ValueError:
                answer = done.stdout
            self.answers.append((asked[2], answer))


def test_every_command_of_the_guide_does_what_it_says(torchserve: Any) -> None:
    shell = Shell(torchserve)
    found = BLOCK.findall(PAGE.read_text())
    assert {language for language, _ in found} == {"", "python", "properties", "yaml"}
    for language, text in found:
        if language in ("python", "yaml"):
            name = re.match(r"# (\w+\.\w+)\n", text)
            assert name is not None
            (torchserve.folder / name[1]).write_text(text)
        elif language == "properties":
            torchserve.configure_like(text)
        else:
            for line in text.splitlines():
                shell.run(line)
    (metrics,) = [answer for path, answer in shell.answers if path.startswith("/metrics")]
    rest = [answer for answer in shell.answers if not answer[0].startswith("/metrics")]
    described = rest.pop(2)
    assert described[0] == "/models/echo"
    assert [worker["status"] for worker in described[1][0]["workers"]] == ["READY"]
    assert rest == [
        ("/ping", {"status": "Healthy"}),
        ("/predictions/echo", "1.0: hello"),
        (
            "/models?url=echo-2.mar&initial_workers=1",
            {"status": 'Model "echo" Version: 2.0 registered with 1 initial workers'},
        ),
        ("/models/echo/traffic", {"status": 'Traffic successfully updated for model "echo"'}),
        ("/predictions/echo/2.0", "2.0: hello"),
        ("/models/echo/2.0/set-default", {"status": 'Default version successfully updated for model "echo" to "2.0"'}),
        ("/models/echo/1.0", {"status": 'Model "echo" unregistered'}),
        ("/predictions/echo", "2.0: hello"),
        ("/workflows?url=pair.war", {"status": "Workflow pair has been registered and scaled successfully."}),
        ("/wfpredict/pair", "2.0: HELLO"),
    ]
    assert re.search(r'^ts_inference_requests_total\{.*model_name="echo".*\} \d', metrics, re.M)
    assert "penstock_request_seconds_count{" in metrics
    assert not torchserve.pids(), "the last command stops it"
    assert not (torchserve.folder / "key_file.json").exists()
