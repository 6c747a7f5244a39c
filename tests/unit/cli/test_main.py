from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import main

MODELS = """
m:
    eager_mode:
        url: http://127.0.0.1:1/m.mar
        input: cat.jpg
"""


def test_the_benchmark_suite_downloads_archives_through_the_model_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    Path("models.yaml").write_text(MODELS)
    Path("cat.jpg").write_bytes(b"x")
    result = CliRunner().invoke(main, ["benchmark-suite", "models.yaml"])
    assert (result.exit_code, list(tmp_path.glob("benchmark-suite-*"))) == (1, [])
    assert "Failed to download archive from: http://127.0.0.1:1/m.mar" in result.stderr
