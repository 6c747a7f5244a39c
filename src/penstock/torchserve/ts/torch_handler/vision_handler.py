"""What the built-in handlers of images share."""

from __future__ import annotations

import base64
import functools
import io
from abc import ABC
from typing import Any

import torch

from penstock.torchserve.ts.handler_utils.timer import timed
from penstock.torchserve.ts.torch_handler.base_handler import BaseHandler
from penstock.torchserve.ts.torch_handler.explaining import captum, target_of


class VisionHandler(BaseHandler, ABC):
    """A derived handler has `image_processing`: a PIL image to a tensor."""

    image_processing: Any

    def initialize(self, context: Any) -> None:
        """As of BaseHandler; and PIL refuses images of too many pixels, unless limit_max_image_pixels is false."""
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels"):
            _pil().MAX_IMAGE_PIXELS = None

    @functools.cached_property
    def ig(self) -> Any:
        """Captum's IntegratedGradients of the model, made by the first request for an explanation."""
        return captum().IntegratedGradients(self.model)

    @timed
    def preprocess(self, data: Any) -> Any:
        """The images of the batch as one tensor on the device.

        The field "data" or the body of a request is a file as bytes, one in base64, or nested numbers.
        """
        images = []
        for row in data:
            image = row.get("data") or row.get("body")
            if isinstance(image, str):
                image = base64.b64decode(image)
            if isinstance(image, (bytes, bytearray)):
                images.append(self.image_processing(_pil().open(io.BytesIO(image))))
            else:
                images.append(torch.FloatTensor(image))
        return torch.stack(images).to(self.device)

    def get_insights(self, tensor_data: Any, _: Any, target: Any = 0) -> Any:
        """How much each number of the input added to the score of class `target`, `[rows, ...]` as the input."""
        return self.ig.attribute(tensor_data, target=target_of(target), n_steps=15).tolist()


def _pil() -> Any:
    try:
        from PIL import Image
    except ImportError as e:
        raise ImportError("images need Pillow, which is not installed: pip install pillow", name="PIL") from e
    return Image
