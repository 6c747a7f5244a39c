import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock.torchpipe as torchpipe
from penstock.torchpipe import utils
from penstock.torchpipe.utils.test import WARM_UP
from support.files import write_onnx


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


def test_the_older_name_of_the_batch_size_works(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    seen: list[int] = []
    utils.test.test_from_raw_file(
        lambda files: seen.append(len(files)), str(tmp_path), 1, request_batch=3, total_number=3
    )
    assert set(seen) == {3}


def test_a_sampler_gets_its_items_in_order(tmp_path: Path) -> None:
    class Pairs(utils.test.SequentialSampler):
        def forward(self, data: Any) -> None:
            seen.append(tuple(data))

    class Files(utils.test.FileSampler):
        def handle_data(self, raw_bytes: list[tuple[str, bytes]]) -> None:
            seen.extend(data for _, data in raw_bytes)

    seen: list[Any] = []
    assert utils.test.test(Pairs(range(5), 2), 5)["total_number"] == 6
    assert seen[WARM_UP:] == [(0, 1), (2, 3), (4,)]
    seen.clear()
    (tmp_path / "a.jpg").write_bytes(b"a")
    ((path, content),) = utils.test.preload(str(tmp_path))
    utils.test.test([Files([path]), Files([path])], 2)
    assert set(seen) == {content}
    assert utils.test.preload(str(tmp_path), num_preload=0) == [(path, None)]
    with pytest.raises(ValueError, match="found 5 items for batches of 6"):
        Pairs(range(5), 6)
    with pytest.raises(NotImplementedError, match="needs a method forward"):
        utils.test.RandomSampler([1])(0)


def test_throughput_measures_a_model_by_its_path(tmp_path: Path) -> None:
    path = str(tmp_path / "net.onnx")
    write_onnx(Path(path), ["n", 4], np.ones((3, 4), np.float32), np.zeros(3, np.float32))
    results = utils.test.throughput({"model": path, "precision": "fp32"}, num_clients=2, total_number=6)
    assert (results["total_number"], results["model"], results["instance_num"]) == (6, path, 2)
    assert torchpipe.infer_shape(path) == [[-1, 4]]
    write_onnx(Path(path), ["n", "m"], np.ones((3, 4), np.float32), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="takes inputs of any shape"):
        utils.test.throughput(path)
    with pytest.raises(ValueError, match="expected 'model'"):
        utils.test.throughput({})
    with pytest.raises(RuntimeError, match="there is no file"):
        torchpipe.infer_shape("nowhere.onnx")


class TwoOutputs(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.sum(1)


@pytest.mark.parametrize("example", [(2, 3), torch.ones(1, 3)])
def test_an_exported_network_runs_with_any_number_of_rows(tmp_path: Path, example: Any) -> None:
    path = utils.models.onnx_export(TwoOutputs(), str(tmp_path / "two.onnx"), example)
    item: dict[str, Any] = {"data": torch.ones(4, 3)}
    with torchpipe.pipe({"backend": "TensorrtTensor", "model": path, "max": 4}) as model:
        model(item)
    assert torch.equal(item["result"][0], torch.full((4, 3), 2.0))
    assert item["result"][1].tolist() == [3.0] * 4
    with pytest.raises(ValueError, match="expected a tensor or its shape"):
        utils.models.onnx_export(TwoOutputs(), path, "1x3")


def test_networks_are_registered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils.models, "_makers", {})

    @utils.models.register_model
    def small(width: int = 1) -> int:
        return width

    utils.models.register_model("large")(lambda: 9)
    assert utils.models.list_models() == ["small", "large"]
    assert utils.models.create_model("small", width=4) == 4
    assert utils.models.create_model("large") == 9
    with pytest.raises(KeyError, match="there is already a model 'large'"):
        utils.models.register_model("large")(small)
    with pytest.raises(KeyError, match="there is no model 'none'; there are: small, large"):
        utils.models.create_model("none")
    with pytest.raises(TypeError, match="expected a function"):
        utils.models.register_model(3)


def test_a_network_of_timm_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    timm: Any = types.ModuleType("timm")
    timm.list_models = lambda: ["resnet10t"]
    timm.create_model = lambda name, **keys: (name, keys)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setattr(utils.models, "_makers", {})
    utils.models.register_model_from_timm("resnet10t")
    assert utils.models.create_model("resnet10t", num_classes=3) == ("resnet10t", {"num_classes": 3})
    with pytest.raises(ValueError, match="timm has no model 'resnet10u'"):
        utils.models.register_model_from_timm("resnet10u")


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
