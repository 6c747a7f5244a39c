"""A TorchServe user's captioning server: its files and commands run unchanged, except for the ports."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchserve_blip2"
FULL_HD = (1080, 1920, 3)  # 6.2 MB per frame
LARGE = 32 if os.environ.get("CHAOS") == "full" else 10  # frames: 199 MB, or 62 MB


@pytest.mark.slow
def test_a_torchserve_captioning_server_runs_with_its_files_unchanged(torchserve: Any) -> None:
    folder = torchserve.folder
    shutil.copy(EXAMPLE / "ts_handler.py", folder)
    torchserve.configure_like((EXAMPLE / "config.properties").read_text())
    subprocess.run([sys.executable, EXAMPLE / "stand_in.py", folder / "hub"], env=torchserve.env, check=True)
    torchserve.env |= {"HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}

    status, said = torchserve.run(
        "torch-model-archiver", "--model-name", "blip2", "--version", "1.0", "--handler", "ts_handler.py"
    )
    assert status == 0, said
    assert (folder / "blip2.mar").exists()
    torchserve.start("--ts-config", "config.properties", wait=False)
    assert "Model server started" not in torchserve.said(), "the command leaves the server behind"
    torchserve.wait_for("Model server started")
    assert torchserve.said().count("other_machines_can_reach_them") == 1

    client = SimpleNamespace(**runpy.run_path(str(EXAMPLE / "client.py")))
    url, key = torchserve.url() + "/predictions/blip2", client.inference_key(folder / "key_file.json")
    logged = (folder / "logs" / "ts_log.log").read_text()
    frames = np.random.default_rng(0).integers(0, 256, (4, 90, 160, 3), dtype=np.uint8)
    alone = [client.caption(frame, url, key) for frame in frames]
    assert all(len(captions) == 1 for captions in alone)
    assert len({captions[0] for captions in alone}) > 1, "the captions depend on the frames"
    assert client.caption(frames, url, key) == [captions[0] for captions in alone]
    large = np.zeros((LARGE, *FULL_HD), dtype=np.uint8)
    large[:] = np.arange(LARGE, dtype=np.uint8).reshape(-1, 1, 1, 1) * 5
    assert len(client.caption(large, url, key)) == LARGE
    assert (folder / "logs" / "ts_log.log").read_text() == logged, "no request is logged"
    assert "captioner is ready on cpu" in (folder / "logs" / "model_log.log").read_text()

    bearer = f"Bearer {key}"
    assert torchserve.fetch(torchserve.url() + "/ping", Authorization=bearer)[0] == 200
    assert torchserve.fetch(torchserve.url() + "/ping")[0] == 400, "without the key"
    assert "Metrics API bind to" not in torchserve.said(), "enable_metrics_api=false"

    status, said = torchserve.run("torchserve", "--stop")
    assert (status, said.splitlines()[-1]) == (0, "TorchServe has stopped.")
    assert "Torchserve stopped." in said
    assert not torchserve.pids()
