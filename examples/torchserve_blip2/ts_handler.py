import logging
import pickle

import numpy as np
import torch
from transformers import Blip2ForConditionalGeneration, Blip2Processor
from ts.torch_handler.base_handler import BaseHandler

logger = logging.getLogger(__name__)

MODEL = "Salesforce/blip2-opt-2.7b"


class CaptionHandler(BaseHandler):
    """Captions video frames: one uint8 array [height, width, 3], or a prebatch [frames, height, width, 3]."""

    def initialize(self, context):
        gpu_id = context.system_properties.get("gpu_id")
        if torch.cuda.is_available() and gpu_id is not None:
            self.device, dtype = torch.device(f"cuda:{gpu_id}"), torch.float16
        else:
            self.device, dtype = torch.device("cpu"), torch.float32
        self.processor = Blip2Processor.from_pretrained(MODEL)
        self.model = Blip2ForConditionalGeneration.from_pretrained(MODEL, torch_dtype=dtype).to(self.device)
        self.model.eval()
        self.initialized = True
        logger.info("captioner is ready on %s", self.device)

    def preprocess(self, data):
        frames, self.counts = [], []
        for input_ in data:
            array = pickle.loads(input_["body"])
            batch = array[np.newaxis] if array.ndim == 3 else array
            frames.extend(batch)
            self.counts.append(len(batch))
        return self.processor(images=frames, return_tensors="pt").to(self.device, self.model.dtype)

    def inference(self, inputs):
        with torch.inference_mode():
            return self.model.generate(**inputs, max_new_tokens=30)

    def postprocess(self, outputs):
        texts = [text.strip() for text in self.processor.batch_decode(outputs, skip_special_tokens=True)]
        answers = []
        for count in self.counts:
            answers.append(texts[:count])
            texts = texts[count:]
        return answers


_service = CaptionHandler()


def handle(data, context):
    if not _service.initialized:
        _service.initialize(context)
    if data is None:
        return None
    return _service.postprocess(_service.inference(_service.preprocess(data)))
