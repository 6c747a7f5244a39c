"""PyTorch files: their kinds, weights, and refused files."""

import io
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import LoadFailed
from penstock.runtimes import torch_files
from support.files import scores

torch = pytest.importorskip("torch")
X = np.array([[1, 2, 3, 4], [0, 0, 1, 0]], np.float32)


def near(found, expected):
    return np.allclose(found.float().detach().numpy(), expected, atol=1e-6)


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
    assert torch_files.kind_of(str(tmp_path / "renamed.bin")) == kind


@pytest.mark.parametrize("made", [False, True], ids=["class", "instance"])
def test_weights_are_loaded_into_a_class_or_an_instance(model_files, net, made):
    module = torch_files.load_weights(net() if made else net, str(model_files / "weights.pt"))
    assert near(module(torch.tensor(X)), scores(X))
    assert not module.training


def test_weights_are_loaded_from_safetensors(model_files, net, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    file = str(tmp_path / "weights.safetensors")
    safetensors.save_file(torch.load(model_files / "weights.pt"), file)
    assert near(torch_files.load_weights(net, file)(torch.tensor(X)), scores(X))
    (tmp_path / "bad.safetensors").write_bytes(b"{}")
    with pytest.raises(LoadFailed, match="damaged"):
        torch_files.load_weights(net, str(tmp_path / "bad.safetensors"))


def test_a_pickle_that_runs_code_is_refused_unless_it_is_trusted(model_files, tmp_path):
    with pytest.raises(LoadFailed, match=r'may run any code: save the state dict .* trust = "pickle"'):
        torch_files.load_module(str(model_files / "whole.pt"))
    assert torch_files.load_module(str(model_files / "whole.pt"), trust="pickle")(torch.zeros(1, 4)).shape == (1, 3)
    evil = tmp_path / "evil.pt"
    with evil.open("wb") as file:
        pickle.dump(Evil(str(tmp_path / "ran")), file)
    for load in (torch_files.load_module, torch_files.load_pickled):
        with pytest.raises(LoadFailed):
            load(str(evil))
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_weights_of_another_module_are_named(model_files):
    with pytest.raises(LoadFailed, match=r"do not fit Linear: .*Missing key\(s\) in state_dict: \"weight\""):
        torch_files.load_weights(torch.nn.Linear(4, 3), str(model_files / "weights.pt"))
    with pytest.raises(LoadFailed, match="Linear cannot be instantiated without arguments"):
        torch_files.load_weights(torch.nn.Linear, str(model_files / "weights.pt"))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model"])
def test_weights_are_found_under_the_prefixes_and_keys_that_training_adds(tmp_path, prefix, key):
    plain = torch.nn.Linear(4, 3).state_dict()
    state = {f"{prefix}{name}": value for name, value in plain.items()}
    torch.save(state if key is None else {"epoch": 3, key: state}, tmp_path / "checkpoint.pt")
    found = torch_files.load_weights(torch.nn.Linear(4, 3), str(tmp_path / "checkpoint.pt"))
    assert torch.equal(found.weight, plain["weight"])


def test_a_module_that_has_such_a_name_itself_keeps_it(tmp_path):
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.model = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    plain = Wrapped().state_dict()
    torch.save(plain, tmp_path / "weights.pt")
    assert torch.equal(
        torch_files.load_weights(Wrapped, str(tmp_path / "weights.pt")).module.weight, plain["module.weight"]
    )


def test_a_file_without_a_state_dict_is_refused(tmp_path):
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    with pytest.raises(LoadFailed, match="holds a Tensor, expected a state dict"):
        torch_files.load_weights(torch.nn.Linear(4, 3), str(tmp_path / "tensor.pt"))
    with pytest.raises(LoadFailed, match="holds a Tensor, not a program"):
        torch_files.load_module(str(tmp_path / "tensor.pt"))
    torch.save(torch.nn.Linear(4, 3).state_dict(), tmp_path / "state.pt")
    with pytest.raises(LoadFailed, match=r"holds a state dict, not a program: .* target = 'net.py:Net' with weights"):
        torch_files.load_module(str(tmp_path / "state.pt"))


@pytest.mark.parametrize("name", ["net.ts", "net.pt2", "weights.pt"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "empty", "another archive", "missing"])
def test_a_file_that_cannot_be_read_is_named(model_files, tmp_path, name, damage):
    data, other = (model_files / name).read_bytes(), io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme", "hello")
    bad = {
        "cut": data[: len(data) // 2],
        "flipped": data[:100] + bytes(b ^ 0xFF for b in data[100:-400]) + data[-400:],
        "garbage": b"this is no model",
        "empty": b"",
        "another archive": other.getvalue(),
    }
    file = tmp_path / name
    if damage in bad:
        file.write_bytes(bad[damage])
    for load in (torch_files.load_module, torch_files.load_pickled):
        with pytest.raises(LoadFailed, match=str(file)):
            load(str(file))


def test_without_pytorch_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(LoadFailed, match=r"pip install 'torch"):
        torch_files.import_torch()
