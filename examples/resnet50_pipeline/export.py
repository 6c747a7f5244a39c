"""Writes resnet50.onnx, mobilenet.onnx and small.onnx next to this file: `python export.py [FOLDER]`.

Input "input" float32 `[N, 3, 224, 224]` (128 for the small one), RGB, normalized by the mean and standard deviation
in the TOML files; output "output" float32 `[N, 1000]`, logits. N is free.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

import networks
import torch
from torch import nn


def export_resnet50(path: str | Path) -> None:
    """Writes ResNet-50 (98 MiB)."""
    export(networks.resnet50(), path)


def export_mobilenet(path: str | Path) -> None:
    """Writes MobileNetV2 (14 MiB)."""
    export(networks.mobilenet(), path)


def export_small(path: str | Path) -> None:
    """Writes the small MobileNetV1 (2 MiB)."""
    export(networks.small(), path, networks.SMALL_SIDE)


def export(network: nn.Module, path: str | Path, side: int = networks.SIDE) -> None:
    """Writes a network for images of `side` pixels to `path`, atomically."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{id(network)}")
    example = torch.zeros(2, 3, side, side)
    with warnings.catch_warnings():
        # the older exporter needs no further package, but warns about its age
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            network,
            (example,),
            partial,
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": {0: "N"}, "output": {0: "N"}},
            opset_version=17,
            dynamo=False,
        )
    partial.replace(path)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for write in (export_resnet50, export_mobilenet, export_small):
        name = write.__name__.removeprefix("export_") + ".onnx"
        write(folder / name)
        print(f"{folder / name}  {(folder / name).stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
