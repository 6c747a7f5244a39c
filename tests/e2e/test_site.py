"""`make docs`: the documentation site builds without warnings, is complete, and loads nothing from other hosts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs; make docs installs it")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs; make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_each_page_is_shipped_as_markdown_and_listed_in_llms_txt(site: Path) -> None:
    pages = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")} - {"404.md"}
    assert {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} <= pages
    assert {"cli.md", "http.md", "contributing.md", "changelog.md", "security.md"} <= pages
    index = (site / "llms.txt").read_text()
    assert set(re.findall(r"\]\(([^)]+)\)", index)) == pages
    for page in pages:
        assert (site / page).read_text().lstrip().startswith(("# ", "<!--")), page


@pytest.mark.slow
def test_the_generated_pages_describe_the_commands_the_routes_and_the_public_api(site: Path) -> None:
    import penstock
    from penstock.cli.main import main

    commands, routes, api = ((site / page).read_text() for page in ("cli.md", "http.md", "api.md"))
    for name in main.list_commands(click.Context(main)):
        assert f"## `penstock {name}`" in commands
    assert "| POST, PUT | `/v2/models/{model}/infer` |" in routes
    assert "| 429 | `queue_full` | yes |" in routes
    for name in penstock.__all__:
        assert re.search(rf"^### `{name}\b", api, re.M), f"docs/api.md lacks {name}"


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"', path.read_text())
        loaded += re.findall(r'<link\b[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="([^"]+)"', path.read_text())
        assert not [url for url in loaded if "//" in url], path
