"""The published pipeline's model side: unpickles, prepares every frame on the CPU, generates, all in one thread.

BENCH_WORKLOAD names a folder with a BLIP-2 model, or none: then the frames are prepared (224 x 224) and no model
runs. It is a TorchServe handler, which the Flask server calls too.
"""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Blip2ForConditionalGeneration
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

FOLDER = json.loads(os.environ["BENCH_WORKLOAD"])["folder"]
MAX_NEW_TOKENS = 100


class Captioner:
    def __init__(self) -> None:
        if FOLDER is None:
            self.processor = BlipImageProcessorPil(size={"height": 224, "width": 224})
            return
        self.processor = BlipImageProcessorPil.from_pretrained(FOLDER)
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        self.model = Blip2ForConditionalGeneration.from_pretrained(FOLDER).eval()

    def captions(self, bodies: list[bytes]) -> list[list[str]]:
        """The captions of each body, which is one frame [height, width, 3] or an array of frames."""
        frames: list[np.ndarray] = []
        counts = []
        for body in bodies:
            array = pickle.loads(body)
            found = [array] if array.ndim == 3 else list(array)
            frames += found
            counts.append(len(found))
        inputs = self.processor(np.array(frames), return_tensors="pt")
        texts = ["no model"] * len(frames) if FOLDER is None else self._generate(inputs["pixel_values"])
        ends = np.cumsum(counts).tolist()
        return [texts[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _generate(self, pixels: torch.Tensor) -> list[str]:
        with torch.inference_mode():
            ids = self.model.generate(pixel_values=pixels, max_new_tokens=MAX_NEW_TOKENS)
        return [text.strip() for text in self.tokenizer.batch_decode(ids, skip_special_tokens=True)]


captioner = Captioner()


def handle(data: list[dict[str, Any]] | None, context: object) -> list[list[str]] | None:
    return None if data is None else captioner.captions([row["body"] for row in data])
