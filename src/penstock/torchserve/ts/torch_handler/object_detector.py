"""The built-in handler `object_detector`."""

from __future__ import annotations

from typing import Any

from penstock.torchserve.ts.torch_handler.transforms import to_tensor_only
from penstock.torchserve.ts.torch_handler.vision_handler import VisionHandler
from penstock.torchserve.ts.utils.util import map_class_to_label


class ObjectDetector(VisionHandler):
    """Images to lists of {label: [x1, y1, x2, y2], "score": s}, of what scores at least `threshold`."""

    image_processing = to_tensor_only()
    threshold = 0.5

    def postprocess(self, data: Any) -> Any:
        """`data` are the model's dicts of `boxes` `[n, 4]`, `labels` `[n]` and `scores` `[n]`, one an image."""
        return [self._objects(found) for found in data]

    def _objects(self, found: Any) -> list[dict[str, Any]]:
        seen = found["scores"] >= self.threshold
        boxes, labels, scores = (found[key][seen].tolist() for key in ("boxes", "labels", "scores"))
        return [
            map_class_to_label([[box]], self.mapping, [[label]])[0] | {"score": score}
            for box, label, score in zip(boxes, labels, scores, strict=True)
        ]
