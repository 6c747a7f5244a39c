"""BERT infilling without a web server: thousands of concurrent futures. `python future_example.py --workers 2`.

Prints the texts per second of the streamer, and of the model alone in a loop over batches.
"""

from __future__ import annotations

import argparse
import time

from bert_model import SMALL, ManagedBertModel, TextInfillingModel

from penstock import Streamer

TEXTS = [
    "Happy birthday to [MASK].",
    "Paris is the capital of [MASK].",
    "The day after Monday is [MASK].",
    "The cow [MASK].",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMALL, help="a folder, or a name such as bert-base-uncased")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--devices", type=lambda text: text.split(","), help="such as 0,1; workers are assigned in turn"
    )
    parser.add_argument("--texts", type=int, default=6400)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    texts = [TEXTS[i % len(TEXTS)] for i in range(options.texts)]

    with Streamer(
        ManagedBertModel,
        batch_size=options.batch_size,
        worker_num=options.workers,
        cuda_devices=options.devices,
        model_init_kwargs={"model": options.model},
        wait_for_worker_ready=True,
        worker_timeout=60,
    ) as streamer:
        started = time.perf_counter()
        futures = [streamer.submit([text]) for text in texts]
        words = [word for future in futures for word in future.result(timeout=600)]
        streamed_s = time.perf_counter() - started

    model = TextInfillingModel(options.model)
    size = options.batch_size
    model.predict(texts[:size])
    started = time.perf_counter()
    plain = [word for i in range(0, len(texts), size) for word in model.predict(texts[i : i + size])]
    plain_s = time.perf_counter() - started
    for text, word in zip(TEXTS, words, strict=False):
        print(f"{text} -> {word}")
    print(f"streamer, workers {options.workers}: {len(texts) / streamed_s:.0f} texts/s")
    print(f"model alone, plain loop: {len(texts) / plain_s:.0f} texts/s")
    print(f"same words: {words == plain}")


if __name__ == "__main__":
    main()
