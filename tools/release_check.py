"""Checks what a release would publish: `make release-check`.

Builds the source distribution and the wheel, and checks their metadata. Installs each in an empty environment, the
wheel with and without extras. Runs the installed package outside the checkout: demo, model, pipeline, HTTP, gRPC.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# every extra that installs in seconds: torch, transformers, captum and ray take gigabytes, and the test suite has them
EXTRAS = (
    "bench",
    "grpc",
    "grpc-client",
    "image",
    "onnx",
    "parquet",
    "plots",
    "redis",
    "swagger",
    "thrift",
    "tune",
    "video",
    "yaml",
)

MODEL = """
def shout(items: list) -> list:
    return [text.upper() for text in items]


def loud(text: str) -> str:
    return text.upper()
"""
PIPELINE = """
[loud]
ops = ["Python[app.py:loud]"]
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n`{' '.join(map(str, command))}` ended with {done.returncode}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The source distribution and the wheel, built from what git tracks and checked by twine."""
    source = folder / "source"
    source.mkdir()
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=tracked, check=True)
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", source, cwd=folder)
    sdist, wheel = next((folder / "dist").glob("*.tar.gz")), next((folder / "dist").glob("*.whl"))
    print(run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=folder))
    return sdist, wheel


def install(folder: Path, distribution: Path, extras: tuple[str, ...] = ()) -> Path:
    """The `bin` of a new environment with only this distribution and its dependencies."""
    venv.create(folder, with_pip=True)
    what = f"penstock[{','.join(extras)}] @ {distribution.as_uri()}" if extras else str(distribution)
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
    run(*pip, "-c", ROOT / "constraints.txt", what, cwd=folder)
    return folder / "bin"


def smoke(bin_folder: Path, work: Path, target: str, *, grpc: bool) -> None:
    """Serves a model from the installed package, and asks it over every protocol that its extras bring."""
    names = ("port", "metrics_port", "management_port", *(("grpc_port",) if grpc else ()))
    ports = {name: _free_port() for name in names}
    keys = [f"server.{name}={port}" for name, port in ports.items()]
    command = [bin_folder / "penstock", "serve", target, *(part for key in keys for part in ("--set", key))]
    server = subprocess.Popen([str(part) for part in command], cwd=work)
    try:
        name, url = target.partition(":")[2] or Path(target).stem, f"http://127.0.0.1:{ports['port']}"
        _wait(f"{url}/readyz", server)
        request = urllib.request.Request(f"{url}/predictions/{name}", b"hello", {"content-type": "text/plain"})
        assert urllib.request.urlopen(request, timeout=30).read() == b"HELLO"
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics_port']}/metrics", timeout=30)
        assert b"penstock_requests_total" in metrics.read()
        if grpc:
            ask = f"import penstock; print(penstock.Client('grpc://127.0.0.1:{ports['grpc_port']}').ready('{name}'))"
            assert "True" in run(bin_folder / "python", "-c", ask, cwd=work)
    finally:
        server.terminate()
        code = server.wait(timeout=60)
    assert code == 0, f"the server ended with {code}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait(url: str, server: subprocess.Popen[bytes], seconds: float = 60) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    sys.exit(f"{url} does not answer")


def release_notes(tag: str) -> str:
    """The section of the changelog for a tag, which must be the version of the package; no fragment may be left."""
    version, left = PROJECT["version"], sorted(p.name for p in (ROOT / "changes").iterdir() if p.name != "README.md")
    if tag != f"v{version}":
        sys.exit(f"found the tag {tag}, expected v{version}, the version in pyproject.toml")
    if left:
        sys.exit(f"changes/ still has {', '.join(left)}: run `make changelog` and commit before the tag")
    _, found, rest = (ROOT / "CHANGELOG.md").read_text().partition(f"\n## {version} (")
    if not found:
        sys.exit(f"CHANGELOG.md has no section `## {version} (DATE)`")
    return rest.partition("\n")[2].partition("\n## ")[0].strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="only check that this tag, the package and the changelog agree")
    parser.add_argument("--notes", type=Path, help="with --tag: write the section of the changelog to this file")
    options = parser.parse_args()
    if options.tag:
        notes = release_notes(options.tag)
        (options.notes or Path("/dev/stdout")).write_text(notes)
        return
    os.environ.pop("PYTHONPATH", None)
    folder = Path(tempfile.mkdtemp(prefix="penstock-release-"))
    try:
        sdist, wheel = build(folder)
        work = folder / "work"
        work.mkdir()
        (work / "app.py").write_text(MODEL)
        (work / "loud.toml").write_text(PIPELINE)
        for name, distribution, extras in (("wheel", wheel, ()), ("sdist", sdist, ()), ("extras", wheel, EXTRAS)):
            bin_folder = install(folder / name, distribution, extras)
            version = run(bin_folder / "penstock", "--version", cwd=work).split()[-1]
            assert version == PROJECT["version"], (
                f"penstock --version says {version}, pyproject.toml {PROJECT['version']}"
            )
            for script in PROJECT["scripts"]:
                run(bin_folder / script, "--help", cwd=work)
            smoke(bin_folder, work, "app.py:shout", grpc=bool(extras))
            smoke(bin_folder, work, "loud.toml", grpc=bool(extras))
            print(f"{name}: installed, {version}, serves")
        print(run(folder / "wheel/bin/penstock", "demo", cwd=work).splitlines()[-1])
        print(json.dumps({"sdist_bytes": sdist.stat().st_size, "wheel_bytes": wheel.stat().st_size}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
