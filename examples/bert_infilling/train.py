"""Trains the small BERT on the sentences of corpus.py and writes weights/: `python train.py` (some minutes, one core).

`python train.py --check` only tests the shipped weights on the held-out sentences. Sizes, rates and epochs were chosen
on the validation sentences: `--validate` trains without them and tests on them.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import bert_model
import corpus
import torch
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

WEIGHTS = Path(bert_model.SMALL)
SEED = 1
EPOCHS = 40
BATCH = 64
RATE = 1.5e-3
DECAY = 0.05
MASKED = 0.15  # share of masked words, as in BERT's own training, unless only the word in brackets is masked


def small_bert(vocab_size: int) -> BertForMaskedLM:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=384,
            max_position_embeddings=64,
        )
    )


def encode(tokenizer: BertTokenizer, sentences: list[str]) -> list[tuple[list[int], int]]:
    """(tokens, position of the word in brackets) of each sentence; each such word is one token."""
    encoded = []
    for sentence in sentences:
        before, word, after = re.split(r"[\[\]]", sentence)
        ids = tokenizer(f"{before}[MASK]{after}")["input_ids"]
        place = ids.index(tokenizer.mask_token_id)
        ids[place] = tokenizer.convert_tokens_to_ids(word)
        assert ids[place] != tokenizer.unk_token_id, sentence
        encoded.append((ids, place))
    return encoded


def batches(encoded: list[tuple[list[int], int]], rng: random.Random) -> list[list[tuple[list[int], int]]]:
    """Batches of sentences of similar length, in random order."""
    order = sorted(encoded, key=lambda one: len(one[0]) + rng.random() * 3)
    chunks = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
    rng.shuffle(chunks)
    return chunks


def masked(tokenizer: BertTokenizer, chunk: list[tuple[list[int], int]], rng: random.Random) -> list[torch.Tensor]:
    """[tokens, attention, labels], each `[rows, width]`. In six of ten rows, only the word in brackets is masked."""
    width = max(len(ids) for ids, _ in chunk)
    pad, mask = tokenizer.pad_token_id, tokenizer.mask_token_id
    inputs = torch.full((len(chunk), width), pad)
    labels = torch.full((len(chunk), width), -100)
    for row, (ids, place) in enumerate(chunk):
        inputs[row, : len(ids)] = torch.tensor(ids)
        chosen = [place]
        if rng.random() < 0.4:
            chosen = [i for i in range(1, len(ids) - 1) if rng.random() < MASKED] or chosen
        for i in chosen:
            labels[row, i] = ids[i]
            luck = rng.random()
            if len(chosen) == 1 or luck < 0.8:
                inputs[row, i] = mask
            elif luck < 0.9:
                inputs[row, i] = rng.randrange(5, tokenizer.vocab_size)
    return [inputs, (inputs != pad).long(), labels]


def train(tokenizer: BertTokenizer, sentences: list[str]) -> BertForMaskedLM:
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    model = small_bert(tokenizer.vocab_size).train()
    encoded = encode(tokenizer, sentences)
    steps = EPOCHS * -(-len(encoded) // BATCH)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps, pct_start=0.1)
    started = time.perf_counter()
    for epoch in range(EPOCHS):
        total = 0.0
        chunks = batches(encoded, rng)
        for chunk in chunks:
            inputs, attention, labels = masked(tokenizer, chunk, rng)
            loss = model(input_ids=inputs, attention_mask=attention, labels=labels).loss
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}: loss {total / len(chunks):.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    return model.eval()


def accuracy(model: bert_model.TextInfillingModel, sentences: list[str], show: int = 0) -> float:
    """The share of sentences in which the model finds the word in brackets."""
    asked = [re.sub(r"\[.*\]", "[MASK]", sentence) for sentence in sentences]
    words = [re.split(r"[\[\]]", sentence)[1] for sentence in sentences]
    found = [word for i in range(0, len(asked), BATCH) for word in model.predict(asked[i : i + BATCH])]
    wrong = [(sentence, word) for sentence, word, right in zip(sentences, found, words, strict=True) if word != right]
    for sentence, word in wrong[:: max(1, len(wrong) // show)] if show else []:
        print(f"wrong: {sentence} -> {word}")
    return 1 - len(wrong) / len(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only test the shipped weights")
    parser.add_argument("--validate", action="store_true", help="try the settings on a tenth of the training sentences")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder for the weights")
    options = parser.parse_args()
    training, validation, heldout = corpus.sentences()
    asked = validation if options.validate else heldout
    if not options.check:
        options.weights.mkdir(exist_ok=True)
        (options.weights / "vocab.txt").write_text("\n".join(corpus.vocabulary()) + "\n")
        tokenizer = BertTokenizer.from_pretrained(str(options.weights))
        trained = train(tokenizer, training if options.validate else training + validation)
        trained.half().save_pretrained(options.weights)
    model = bert_model.TextInfillingModel(str(options.weights))
    name = "validation" if options.validate else "held-out"
    print(f"{name}: {accuracy(model, asked, 20):.2%} of {len(asked)} words right")
    print("Happy birthday to [MASK]. ->", *model.predict(["Happy birthday to [MASK]."]))


if __name__ == "__main__":
    main()
