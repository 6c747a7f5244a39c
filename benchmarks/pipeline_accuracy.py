"""The effect of a scaled decode on the client's images and on a network's answers, using the pipeline's ops."""

import tomllib

import numpy as np
from pipeline_servers import IMAGES, SCALED, variant

from penstock.pipeline.load import parse_graph
from penstock.pipeline.local import LocalPipeline
from penstock.pipeline.ops.decode import DecodeMat
from penstock.pipeline.ops.geometry import sized

HEADER = ("net", "pixels differ by, of 255", "99 % of them by at most", "same best class")


def agreement(net: str) -> list[str]:
    """Differences of the resized pixels, and how many images keep their best class. One row below HEADER."""
    data = [file.read_bytes() for file in sorted(IMAGES.glob("*.jpg"))]
    side = SCALED[net]
    full, scaled = DecodeMat(), DecodeMat(scale_h=side, scale_w=side)
    levels = [
        np.abs(sized(full.decode(one), side, side).astype(np.int16) - sized(scaled.decode(one), side, side))
        for one in data
    ]
    found = np.concatenate([one.ravel() for one in levels])
    same = (_best(variant(net), data) == _best(variant(net, scaled=True), data)).mean()
    return [net, f"{found.mean():.1f}", f"{np.quantile(found, 0.99):.0f}", f"{100 * float(same):.0f} %"]


def _best(text: str, data: list[bytes]) -> np.ndarray:
    graph = parse_graph(tomllib.loads(text), name="accuracy", folder=".", compat=False)
    with LocalPipeline(graph) as pipeline:
        outcomes = pipeline.infer_many([{"data": one} for one in data])
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return np.concatenate([outcome.fields["result"] for outcome in outcomes]).argmax(1)
