import numpy as np
import torch
from pictures import answer, decoded, fitted
from ts.torch_handler.base_handler import BaseHandler

try:
    import torchvision  # noqa: F401  # a Mask R-CNN file needs its operators
except ImportError:
    pass


class FigureHandler(BaseHandler):
    """Finds the figures in drawings: {"classes": [...], "scores": [...], "boxes": [...]}.

    The TorchScript model runs in half precision on a GPU. A body that is not a picture gets status 400; the other
    requests of its batch are answered.
    """

    def initialize(self, context):
        super().initialize(context)
        if self.device.type == "cuda" and self.model.halves:
            self.model.half()

    def preprocess(self, data):
        """(pictures [rows, 320, 320, 3] or None, each request's height and width or its error)."""
        pictures, shapes = [], []
        for row in data:
            file = row.get("data") if row.get("data") is not None else row.get("body")
            try:
                pixels = decoded(file)
            except ValueError as e:
                shapes.append(e)
                continue
            pictures.append(fitted(pixels))
            shapes.append(pixels.shape[:2])
        return torch.from_numpy(np.stack(pictures)) if pictures else None, shapes

    def inference(self, data):
        pictures, shapes = data
        if pictures is None:
            return [], shapes
        with torch.inference_mode():
            parts = [part.cpu().numpy() for part in self.model(pictures.to(self.device))]
        return list(zip(*parts, strict=True)), shapes

    def postprocess(self, data):
        found, shapes = iter(data[0]), data[1]
        answers = []
        for place, shape in enumerate(shapes):
            if isinstance(shape, Exception):
                self.context.set_response_status(400, "Bad Request", place)
                answers.append({"code": 400, "type": "BadRequest", "message": str(shape)})
            else:
                answers.append(answer(shape, *next(found)))
        return answers
