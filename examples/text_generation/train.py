"""Trains the network on generated sentences and writes weights.pt: `python train.py`, about three minutes on two cores.

An interrupted training goes on with the next call. `--check` measures how many answers of the written file are right,
on questions from another seed.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from network import CharacterModel, Transformer
from sentences import END, LETTERS, sentence, text
from torch.nn import functional

HERE = Path(__file__).parent
LENGTH, ROWS, STEPS, WARM = 128, 24, 2_000, 100
RATE = 4e-3
SEED = 7


def batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of sentences as tokens, and as targets with -100 where no answer is, both `[ROWS, LENGTH]`."""
    tokens, targets = [], []
    for _ in range(ROWS):
        letters, answers = text(rng, LENGTH + 1)
        row = [LETTERS.index(letter) for letter in letters]
        tokens.append(row[:-1])
        targets.append([token if answer else -100 for token, answer in zip(row[1:], answers[1:], strict=True)])
    return torch.tensor(tokens), torch.tensor(targets)


def train(steps: int, path: Path) -> None:
    """Trains for so many steps and writes the weights as 16-bit floats. Goes on where an interrupted call stopped."""
    torch.manual_seed(SEED)
    network, state = Transformer(), path.with_name("training.pt")
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=WARM / STEPS)
    parts = {"network": network, "optimizer": optimizer, "schedule": schedule}
    if state.exists():
        for name, found in torch.load(state, weights_only=True).items():
            parts[name].load_state_dict(found)
    first, begun = schedule.last_epoch, time.monotonic()
    rng, positions = random.Random(SEED + first), torch.arange(LENGTH).expand(ROWS, -1)
    for step in range(first, steps):
        tokens, targets = batch(rng)
        logits, _ = network(tokens, positions)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.monotonic() - begun:.0f} s", flush=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, state)
    torch.save({name: value.half() for name, value in network.state_dict().items()}, path)
    state.unlink(missing_ok=True)


def check(path: Path, questions: int = 200) -> float:
    """The share of right answers."""
    from generator import Generator

    rng, generator = random.Random(SEED + 1), Generator()
    generator.load("cpu")
    generator.model = CharacterModel(path)
    asked = [sentence(rng) for _ in range(questions)]
    texts = [generator.admit(question) for question, _ in asked]
    active = texts
    while active:
        steps = generator.step(active)
        active = [text for text, step in zip(active, steps, strict=True) if not step.done]
    return sum(text.sent + END == answer for text, (_, answer) in zip(texts, asked, strict=True)) / questions


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    if not options.check:
        train(options.steps, HERE / "weights.pt")
    print(f"{check(HERE / 'weights.pt'):.1%} of the answers are right")
