from __future__ import annotations

import threading
from pathlib import Path

import pytest

import penstock.torchpipe as torchpipe
from penstock.torchpipe.utils.test import WARM_UP


def test_clients_share_the_total_number_of_calls(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    results = torchpipe.utils.test.test_function(
        lambda: calls.append(threading.get_ident()), num_clients=3, batch_size=2, total_number=101
    )
    assert len(calls) == 3 * WARM_UP + 51
    assert results["total_number"] == 102
    assert results["throughput::qps"] > 0
    assert results["latency::TP50"] <= results["latency::TP90"] <= results["latency::TP99"]
    assert "latency::TP99" in capsys.readouterr().out


def test_files_are_read_before_or_by_the_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.jpg", "sub/b.JPEG", "c.png"):
        (tmp_path / name).write_bytes(name.encode())
    seen: list[tuple[str, bytes]] = []
    torchpipe.utils.test.test_from_raw_file(seen.extend, str(tmp_path), num_clients=1, batch_size=2, total_number=4)
    assert len(seen) == 2 * WARM_UP + 4
    assert {data for _, data in seen} == {b"a.jpg", b"sub/b.JPEG"}
    seen.clear()
    torchpipe.utils.test.test_from_raw_file(seen.extend, str(tmp_path), num_clients=2, num_preload=0)
    assert sorted(data for _, data in seen) == [b"a.jpg", b"sub/b.JPEG"], "each once"
    seen.clear()
    torchpipe.utils.test.test_from_raw_file(
        seen.extend, str(tmp_path), 1, total_number=1, recursive=False, ext=[".png"]
    )
    assert {data for _, data in seen} == {b"c.png"}
    assert capsys.readouterr().out


def test_a_folder_without_images_and_a_wrong_number_of_functions_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no files that end in \.jpg"):
        torchpipe.utils.test.test_from_raw_file(print, str(tmp_path))
    with pytest.raises(ValueError, match="2 functions for 3 clients"):
        torchpipe.utils.test.test_function([print, print], num_clients=3)


def test_an_exception_of_a_client_ends_the_measurement() -> None:
    def broken() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        torchpipe.utils.test.test_function(broken, num_clients=2, total_number=10)
