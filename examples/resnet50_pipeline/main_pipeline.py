"""The same service as a pipeline: `python main_pipeline.py`, on port 8888.

It runs `penstock serve resnet50.toml` with a Thrift listener, and passes unknown options to `penstock serve`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from service import HERE, MODELS, PORT, exported


def command(port: int, toml: Path, more: list[str]) -> list[str]:
    """Runs `penstock serve` for the pipeline, with its command-line options."""
    listeners = [f"server.thrift_port={port}", *(f"server.{name}=0" for name in ("management_port", "metrics_port"))]
    sets = [word for setting in listeners for word in ("--set", setting)]
    return [sys.executable, "-m", "penstock.cli.main", "serve", str(toml), *sets, *more]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=PORT, help="of the Thrift listener")
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    given, more = parser.parse_known_args()
    exported(given.model)
    words = command(given.port, HERE / f"{given.model}.toml", more)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
