"""`penstock caption --ray` on a real cluster: rows that no lost node doubles, in the file of an undisturbed run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.bulk.cli import caption
from support.captioner import FakeCaptioner, Incoming
from support.captioner import caption as answered
from support.videos import make_clip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets that Ray leaves open
]
CLIPS, FRAMES = 6, 120
HEAD_CPUS = 0  # tasks run on other nodes


def slow(request: Incoming, server: FakeCaptioner) -> None:
    time.sleep(0.02)
    answered(request, server)


def test_two_of_three_nodes_are_lost_and_each_frame_is_captioned_once(ray_cluster: Any, tmp_path: Path) -> None:
    one, many = tmp_path / "one", tmp_path / "many"
    for folder in (one, many):
        folder.mkdir()
        (folder / "videos").symlink_to(tmp_path / "videos")
    (tmp_path / "videos").mkdir()
    for i in range(CLIPS):
        make_clip(tmp_path / "videos" / f"{i}.mp4", FRAMES)
    with pytest.MonkeyPatch.context() as patch, FakeCaptioner() as server:
        patch.chdir(one)
        CliRunner().invoke(caption, ["videos", "--server", server.url])
        expected = (one / "captions.jsonl").read_bytes()
        once = Counter(frame for request in server.seen for frame in request.frames)
        assert set(once.values()) == {CLIPS}
        server.seen.clear()
        server.script_next(*[slow] * 10_000)
        nodes = [ray_cluster.add_node(num_cpus=2) for _ in range(3)]
        lost: list[Any] = []

        def lose() -> None:
            for node in nodes[:2]:
                before = len(server.seen)
                while len(server.seen) < before + 20:
                    time.sleep(0.01)
                ray_cluster.remove_node(node, allow_graceful=False)
                lost.append(node)

        losing = threading.Thread(target=lose)
        losing.start()
        patch.chdir(many)
        done = CliRunner().invoke(caption, ["videos", "--server", server.url, "--ray"])
        losing.join()
        assert done.exit_code == 0, done.output
        assert (many / "captions.jsonl").read_bytes() == expected
        asked = sum(len(request.frames) for request in server.seen)
        assert len(lost) == 2
        assert CLIPS * FRAMES <= asked <= 1.1 * CLIPS * FRAMES, "what was in flight on the lost nodes is asked again"


def test_a_cluster_without_processors_and_a_wrong_address_are_refused(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_clip(tmp_path / "a.mp4", 5)
    monkeypatch.chdir(tmp_path)
    for node in [node for node in ray_cluster.worker_nodes]:
        ray_cluster.remove_node(node, allow_graceful=False)
    with FakeCaptioner() as server:
        # soon after the loss of the last node it is found at the start, before that by a task that waits
        done = CliRunner().invoke(caption, ["a.mp4", "--server", server.url, "--ray=auto", "--progress", "none"])
        assert done.exit_code in (2, 3), done.output
        assert "the Ray cluster has no CPU" in done.output
        done = CliRunner().invoke(caption, ["--server", server.url, "--ray", "a.mp4"])
        assert (done.exit_code, "write --ray=auto" in done.output) == (2, True)
        assert not server.seen
