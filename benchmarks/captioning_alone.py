"""Frames/s of a BLIP-2 model for frames in memory, in batches: captioning_alone.py FOLDER CLIP FRAMES

Prints one JSON object: frames per second, and CPU milliseconds per frame, with the fastest batch size.

Frames are uint8 in the size that the model expects. The measurement includes normalisation, generation and decoding
to text.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import av
import numpy as np
import torch
from transformers import AutoTokenizer, Blip2ForConditionalGeneration
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

BATCHES = (64, 128, 256)
TRIAL_S, RUN_S = 1.0, 4.0


def main() -> None:
    folder, clip, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    model = Blip2ForConditionalGeneration.from_pretrained(folder).eval()
    processor, tokenizer = BlipImageProcessorPil.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    side = processor.size["height"]
    with av.open(clip) as video:
        wanted = itertools.islice(video.decode(video=0), count)
        decoded = [frame.to_ndarray(format="rgb24", width=side, height=side) for frame in wanted]
    frames = torch.from_numpy(np.stack(decoded))
    mean, std = (torch.tensor(v)[:, None, None] for v in (processor.image_mean, processor.image_std))

    @torch.inference_mode()
    def captions(batch: torch.Tensor) -> list[str]:
        pixels = (batch.permute(0, 3, 1, 2).float() / 255 - mean) / std
        return tokenizer.batch_decode(model.generate(pixel_values=pixels, max_new_tokens=30), skip_special_tokens=True)

    def run(size: int, seconds: float) -> dict[str, float]:
        done, began, busy_s = 0, time.perf_counter(), time.process_time()
        while (spent := time.perf_counter() - began) < seconds:
            done += len(captions(frames[done % (len(frames) - size) :][:size]))
        return {"rate": done / spent, "total_ms": (time.process_time() - busy_s) / done * 1e3}

    sizes = [size for size in BATCHES if size < len(frames)]
    captions(frames[: sizes[0]])
    best = max(sizes, key=lambda size: run(size, TRIAL_S)["rate"])
    print(json.dumps(run(best, RUN_S)))


if __name__ == "__main__":
    main()
