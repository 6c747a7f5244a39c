"""PyTorch files: their kinds, refused files, precision and optimization."""

from __future__ import annotations

import builtins
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError, LoadFailed
from penstock.runtimes import torch as loaders
from support.files import scores

torch = pytest.importorskip("torch")
X = [[1.0, 2, 3, 4], [0, 0, 1, 0]]


def near(found, expected, tolerance=1e-6):
    return np.allclose(found.float().detach().numpy(), expected, atol=tolerance)


@pytest.fixture
def net(model_files):
    namespace = {"__name__": "net_of_a_test"}
    exec((model_files / "net.py").read_text(), namespace)
    return namespace["Net"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("net.ts", "script"), ("net.pt", "script"), ("net.pt2", "exported"), ("weights.pt", "pickled")],
)
def test_the_content_of_a_file_decides_its_kind(model_files, tmp_path, name, kind):
    shutil.copy(model_files / name, tmp_path / "renamed.bin")
    assert loaders.kind_of(str(tmp_path / "renamed.bin")) == kind


@pytest.mark.parametrize("name", ["net.ts", "net.pt", "net.pt2"])
def test_programs_are_loaded(model_files, name):
    module = loaders.load_module(str(model_files / name))
    with torch.inference_mode():
        assert near(module(torch.tensor(X)), scores(X))


@pytest.mark.parametrize("made", [False, True], ids=["class", "instance"])
def test_weights_are_loaded_into_a_class_or_an_instance(model_files, net, made):
    module = loaders.load_weights(net() if made else net, str(model_files / "weights.pt"))
    assert near(module(torch.tensor(X)), scores(X))
    assert not module.training


def test_weights_are_loaded_from_safetensors(model_files, net, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    file = str(tmp_path / "weights.safetensors")
    safetensors.save_file(torch.load(model_files / "weights.pt"), file)
    assert near(loaders.load_weights(net, file)(torch.tensor(X)), scores(X))
    (tmp_path / "bad.safetensors").write_bytes(b"{}")
    with pytest.raises(LoadFailed, match="damaged"):
        loaders.load_weights(net, str(tmp_path / "bad.safetensors"))


def test_a_pickle_that_runs_code_is_refused_unless_it_is_trusted(model_files, tmp_path):
    with pytest.raises(LoadFailed, match=r'may run any code: save the state dict .* trust = "pickle"'):
        loaders.load_module(str(model_files / "whole.pt"))
    assert loaders.load_module(str(model_files / "whole.pt"), trust="pickle")(torch.zeros(1, 4)).shape == (1, 3)
    evil = tmp_path / "evil.pt"
    with evil.open("wb") as file:
        pickle.dump(Evil(str(tmp_path / "ran")), file)
    for load in (loaders.load_module, loaders.load_pickled):
        with pytest.raises(LoadFailed):
            load(str(evil))
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_a_state_dict_alone_is_refused(model_files):
    with pytest.raises(LoadFailed, match=r"holds a state dict, not a program: .* target = 'net.py:Net' with weights"):
        loaders.load_module(str(model_files / "weights.pt"))


def test_weights_of_another_module_are_named(model_files):
    with pytest.raises(LoadFailed, match=r"do not fit Linear: .*Missing key\(s\) in state_dict: \"weight\""):
        loaders.load_weights(torch.nn.Linear(4, 3), str(model_files / "weights.pt"))
    with pytest.raises(LoadFailed, match="Linear cannot be instantiated without arguments"):
        loaders.load_weights(torch.nn.Linear, str(model_files / "weights.pt"))


def test_a_file_without_a_state_dict_is_refused(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    with pytest.raises(LoadFailed, match="holds a Tensor, expected a state dict"):
        loaders.load_weights(torch.nn.Linear(4, 3), str(tmp_path / "tensor.pt"))
    with pytest.raises(LoadFailed, match="holds a Tensor, not a program"):
        loaders.load_module(str(tmp_path / "tensor.pt"))


@pytest.mark.parametrize("name", ["net.ts", "net.pt2", "weights.pt"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "empty"])
def test_a_damaged_file_is_reported(model_files, tmp_path, name, damage):
    data = (model_files / name).read_bytes()
    middle = len(data) // 2
    bad = {
        "cut": data[:middle],
        "flipped": data[:100] + bytes(b ^ 0xFF for b in data[100:-400]) + data[-400:],
        "garbage": b"this is no model",
        "empty": b"",
    }[damage]
    file = tmp_path / name
    file.write_bytes(bad)
    with pytest.raises(LoadFailed, match=str(file)):
        loaders.load_module(str(file))


def test_a_missing_file_is_named():
    for load in (loaders.load_module, loaders.load_pickled, loaders.kind_of):
        with pytest.raises(LoadFailed, match=r"there is no file nowhere\.pt"):
            load("nowhere.pt")


def test_any_other_archive_is_refused(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(LoadFailed, match=r"a\.pt"):
        loaders.load_module(str(tmp_path / "a.pt"))


def test_without_pytorch_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(LoadFailed, match=r"pip install 'torch"):
        loaders.import_torch()


# ---- precision and optimisation


@pytest.mark.parametrize("name", ["net.ts", "eager"])
@pytest.mark.parametrize("optimize", ["none", "optimize_for_inference"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("fp16", 1e-2), ("bf16", 4e-2)])
def test_modules_run_in_each_precision(model_files, name, optimize, precision, tolerance):
    if name == "eager":
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(-1))
        state = torch.load(model_files / "weights.pt")
        module.load_state_dict({k.replace("linear.", "0."): v for k, v in state.items()})
    else:
        module = loaders.load_module(str(model_files / name))
    ready = loaders.prepare(module, precision=precision, optimize=optimize)
    dtype = loaders.dtype_of(precision)
    with torch.inference_mode():
        found = ready(torch.tensor(X, dtype=dtype))
    assert found.dtype == dtype
    assert near(found, scores(X), tolerance)


def test_a_module_that_cannot_be_scripted_is_reported():
    class Free(torch.nn.Module):
        def forward(self, x, **kwargs):
            return x

    with pytest.raises(LoadFailed, match=r"Free cannot be scripted: .*; use optimize = 'compile'"):
        loaders.prepare(Free(), optimize="optimize_for_inference")


def test_compile_takes_any_batch_size(monkeypatch, model_files):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: asked.append(options) or module)
    loaders.prepare(torch.nn.Linear(4, 3), optimize="compile")
    loaders.prepare(loaders.load_module(str(model_files / "net.pt2")), optimize="compile")
    assert asked == [{"dynamic": True}] * 2


@pytest.mark.parametrize(
    ("name", "keys", "error"),
    [
        ("net.ts", {"optimize": "compile"}, "found compile, which TorchScript does not support"),
        ("net.pt2", {"optimize": "optimize_for_inference"}, "which exported programs do not support"),
        ("net.pt2", {"precision": "fp16"}, "precision: found fp16, but the graph of an exported program"),
        ("net.ts", {"precision": "fp8"}, "precision: found 'fp8', expected one of fp32, fp16, bf16"),
        ("net.ts", {"optimize": "fast"}, "optimize: found 'fast', expected one of none, optimize_for_inference"),
    ],
)
def test_settings_that_a_kind_does_not_support_are_refused(model_files, name, keys, error):
    with pytest.raises(ConfigError, match=error):
        loaders.prepare(loaders.load_module(str(model_files / name)), **keys)


def test_torchscript_is_loaded_without_a_warning_of_its_age(model_files):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = loaders.load_module(str(model_files / "net.ts"))
        loaders.prepare(module, optimize="optimize_for_inference")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["net.ts", "net.pt2"])
def test_programs_run_on_the_gpu(model_files, name):
    module = loaders.prepare(loaders.load_module(str(model_files / name), "cuda:0"), "cuda:0")
    assert near(module(torch.tensor(X, device="cuda:0")).cpu(), scores(X), 1e-4)
