"""Exports a detector as TorchScript for an archive: `python export.py figures.pt [--network maskrcnn]`."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from networks import NETWORKS, SMALL, load_network


def export(path: Path, network: str = SMALL, weights: str = "") -> None:
    """Writes the file. Raises LoadFailed if a library or the weights are missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch deprecates TorchScript, which such archives contain
        torch.jit.script(load_network(network, weights)).save(str(path))


def main() -> None:
    from penstock.errors import LoadFailed

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--network", choices=NETWORKS, default=SMALL)
    parser.add_argument("--weights", default="", help="a file of weights for this network")
    options = parser.parse_args()
    try:
        export(options.file, options.network, options.weights)
    except LoadFailed as e:
        raise SystemExit(e.message) from None


if __name__ == "__main__":
    main()
