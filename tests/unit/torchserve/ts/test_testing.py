import json
from pathlib import Path

import pytest

from penstock.torchserve.ts.testing import ModelLoaderFactory, download_model

pytestmark = pytest.mark.usefixtures("forget_modules")


def test_a_handler_is_loaded_without_a_server(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"handler_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "class H:\n"
        "    def initialize(self, context): self.factor = context.model_yaml_config['factor']\n"
        "    def handle(self, data, context): return [n * self.factor for n in data]\n"
    )
    (tmp_path / "c.yaml").write_text("factor: 3")
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": {"configFile": "c.yaml"}}))
    service = ModelLoaderFactory.get_model_loader().load("net", str(tmp_path), f"{name}.py", None, 1)
    assert service.handle([1, 2], service.context) == [3, 6]
    assert service.context.system_properties["gpu_id"] is None


def test_no_manifest_is_needed(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"function_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("def run(data, context):\n    return data\n")
    service = ModelLoaderFactory.get_model_loader().load("net", str(tmp_path), f"{name}:run", None, 1)
    assert service.handle(["x"], service.context) == ["x"]
    assert service.context.manifest is None


def test_a_model_is_downloaded_once(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "net.pt").write_bytes(b"weights")
    url = (tmp_path / "net.pt").as_uri()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        download_model(url, tmp_path / name)
        assert (tmp_path / name / "model.pt").read_bytes() == b"weights"
        (tmp_path / "net.pt").unlink(missing_ok=True)
    assert len(list((tmp_path / "home").rglob("*"))) == 3  # .cache/penstock and one file
