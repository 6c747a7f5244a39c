"""How many instances, where, and what may wait for them."""

from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.core.engine import rules
from penstock.core.engine.rules import check_devices, file_stamps
from penstock.core.worker import devices as devices_of_machine
from penstock.errors import ConfigError


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(target="a:b", **keys)


@pytest.mark.parametrize(
    ("keys", "devices"),
    [
        ({}, ["cpu"]),
        ({"instances": 3}, ["cpu"] * 3),
        ({"instances": 3, "devices": ("cuda:0", "cuda:1")}, ["cuda:0", "cuda:1", "cuda:0"]),
        ({"instances": 1, "devices": ("cuda:0", "cuda:1")}, ["cuda:0"]),
        ({"instances": "auto", "devices": ("cuda:0", "cuda:1")}, ["cuda:0", "cuda:1"]),
        ({"instances": "auto"}, ["cpu"] * 4),
        ({"instances": "auto", "transport": "inline"}, ["cpu"]),
        ({"instances": "auto", "transport": "inline", "devices": ("cuda:0", "cuda:1")}, ["cuda:0"]),
        ({"devices": ()}, ["cpu"]),
        ({"instances": "auto", "devices": ("cuda",)}, ["cuda:0", "cuda:1", "cuda:2"]),
        ({"instances": 4, "devices": ("cuda",)}, ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]),
    ],
)
def test_instances_are_dealt_out_over_the_devices_in_turn(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], devices: list[str]
) -> None:
    monkeypatch.setattr(rules, "physical_cores", lambda: 8)
    monkeypatch.setattr(devices_of_machine, "visible_gpus", lambda: 3)
    assert list(rules.devices_of(config(**keys))) == devices


def test_new_instances_go_where_there_are_fewest() -> None:
    keys = config(devices=("cuda:0", "cuda:0", "cuda:1"))
    used: list[str] = []
    for _ in range(6):
        used.append(rules.next_device(keys, used))
    assert (used.count("cuda:0"), used.count("cuda:1")) == (4, 2)


def test_new_instances_on_cuda_go_over_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_of_machine, "visible_gpus", lambda: 2)
    assert rules.next_device(config(devices=("cuda",)), ["cuda:0"]) == "cuda:1"


def test_the_bound_of_the_queue_follows_the_instances_unless_it_is_given() -> None:
    assert [rules.queue_bound(BatchingConfig(), n, 8) for n in (0, 1, 3)] == [128, 128, 384]
    assert rules.queue_bound(BatchingConfig(max_queue=5), 3, 8) == 5
    assert rules.queue_bound(BatchingConfig(rows="none"), 2, 1) == rules.queue_bound(BatchingConfig(), 2, 64)


def test_batches_of_a_model_without_rows_are_refused():
    rules.check_rules(BatchingConfig(rows="none", max_batch_size=1))
    with pytest.raises(ConfigError, match=r'max_batch_size: found 8 with rows = "none", which runs one request at a'):
        rules.check_rules(BatchingConfig(rows="none", max_batch_size=8))


def test_a_gpu_that_the_machine_does_not_have_is_refused_with_the_devices_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gpus(count: int) -> None:
        monkeypatch.setattr(rules, "visible_gpus", lambda: count)
        monkeypatch.setattr(devices_of_machine, "visible_gpus", lambda: count)

    gpus(2)
    for devices in (["cuda:0", "cuda:1"], ["cpu"], ["mps"]):
        check_devices(ModelConfig(target="m", instances="auto", devices=tuple(devices)))
    with pytest.raises(ConfigError, match=r"^at\.devices: found cuda:2, but this machine has cpu, cuda:0, cuda:1$"):
        check_devices(ModelConfig(target="m", instances="auto", devices=("cuda:0", "cuda:2")), "at.")
    gpus(0)
    for device in ("cuda:0", "cuda"):
        with pytest.raises(ConfigError, match=rf"^devices: found {device}, but this machine has cpu$"):
            check_devices(ModelConfig(target="m", devices=(device,)))


def unreadable(path: Path, **_: Any) -> str:
    raise PermissionError(13, "Permission denied", str(path))


def test_the_stamps_of_a_model_cover_the_modules_of_its_folder_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "app.py": "import os\nimport helper, other as o\nfrom parts import first\nif 1:\n    from parts.third import x",
        "helper.py": "from deeper import (\n    a,\n)\nimport app",
        "deeper.py": "import missing",
        "other.py": "not python (",
        "parts/__init__.py": "from .second import *",
        "parts/first.py": "from . import (\n    fourth,  # the last one\n    fifth as f,\n)\nimport helper",
        "parts/second.py": "",
        "parts/third.py": "",
        "parts/fourth.py": "",
        "parts/fifth.py": "",
        "unrelated.py": "",
        "parts/unrelated.py": "",
    }
    (tmp_path / "parts").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    expected = {f"{tmp_path}/{name}" for name in files if "unrelated" not in name}
    assert set(file_stamps(ModelConfig(target=f"{tmp_path}/app.py:f"), [])) == expected
    assert set(file_stamps(ModelConfig(target="app:f"), [str(tmp_path)])) == expected
    monkeypatch.setattr(Path, "read_text", unreadable)
    assert set(file_stamps(ModelConfig(target="app:f"), [str(tmp_path)])) == {f"{tmp_path}/app.py"}


def test_the_stamps_of_a_model_cover_all_files_that_it_names_and_those_of_its_pipeline(
    tmp_path: Path,
) -> None:
    for name in ("app.py", "w.pt", "data.npz", "mod.py"):
        (tmp_path / name).write_text("1")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("1")
    at = str(tmp_path)
    options = {"path": f"{at}/data.npz", "folder": at, "n": 3, "text": "a\0b"}
    config = ModelConfig(target=f"{at}/app.py:Model", weights=f"{at}/w.pt", options=options)
    before = file_stamps(config, [])
    assert set(before) == {f"{at}/app.py", f"{at}/w.pt", f"{at}/data.npz"}
    assert set(file_stamps(ModelConfig(target="mod:f"), [at])) == {f"{at}/mod.py"}
    assert set(file_stamps(ModelConfig(target="pkg:f"), [at])) == {f"{at}/pkg/__init__.py"}
    assert set(file_stamps(ModelConfig(target=f"{at}/w.pt"), [])) == {f"{at}/w.pt"}
    (tmp_path / "nets").mkdir()
    for name in ("nets/net.onnx", "nets/steps.py", "nets/engine.trt"):
        (tmp_path / name).write_text("1")
    toml = tmp_path / "nets" / "pipe.toml"
    nodes = (
        '[a]\nbackend = "S[DecodeMat,Python[steps.py:shout]]"\n'
        f'[b]\nops = [{{op = "OnnxTensor", model = "net.onnx"}}, "Python[mod:f]"]\n[c]\nmodel = "{at}/w.pt"\n'
        '"model::cache" = "engine.trt"\n'  # the server writes this one itself
    )
    toml.write_text(nodes)
    named = {f"{at}/{name}" for name in ("nets/pipe.toml", "nets/net.onnx", "nets/steps.py", "w.pt", "mod.py")}
    assert set(file_stamps(ModelConfig(target=str(toml)), [at])) == named
    toml.write_text("[broken")
    assert set(file_stamps(ModelConfig(target=str(toml)), [at])) == {str(toml)}
    (tmp_path / "data.npz").write_text("22")
    after = file_stamps(config, [])
    assert {path for path in after if after[path] != before[path]} == {f"{at}/data.npz"}
