"""The sentences of corpus.toml, each with one word to fill in.

A sentence is a fact in a pattern: "paris france" in "{a} is the capital of [{b}]". Training includes every fact in the
first pattern of its kind. Some of the other pairs of fact and pattern are held out: no training sentence contains such
a pair, with any opening. The test therefore asks for known facts in unseen words.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 7
HELD_OUT = 0.15  # share of the pairs of fact and pattern
VALIDATION = 0.1
RARE = 0.25  # share of names outside the vocabulary
COPIES = {"fact": 2, "order": 4, "saying": 3}  # of each pair, with other names and openings

CORPUS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("corpus.toml").read_text())


def pairs() -> Iterator[tuple[str, str, bool]]:
    """(kind, pattern with its words filled in, whether it is always trained) of every pair."""
    for family in CORPUS["facts"].values():
        patterns = family["patterns"].strip().splitlines()
        for fact in family["words"].split(","):
            words = dict(zip("abc", fact.split(), strict=False))
            for pattern in patterns:  # the first, plainest one is always trained, to teach the fact
                yield family.get("kind", "fact"), "{opening} " + pattern.format(**words), pattern == patterns[0]
    for saying in CORPUS["sayings"].strip().splitlines():
        for frame in CORPUS["frames"].strip().splitlines():
            yield "saying", frame.replace("{saying}", saying), frame == "{saying}"


def sentences() -> tuple[list[str], list[str], list[str]]:
    """(training, validation, held out), in lower case, with the word to fill in in brackets. They share no pair."""
    rng = random.Random(SEED)
    training: list[str] = []
    validation: list[str] = []
    heldout: list[str] = []
    for kind, pattern, always in pairs():
        luck = 1 if always else rng.random()
        part = heldout if luck < HELD_OUT else validation if luck < HELD_OUT + VALIDATION else training
        part += [_filled(rng, pattern) for _ in range(COPIES[kind])]
    return training, validation, heldout


def _filled(rng: random.Random, pattern: str) -> str:
    """The pattern with names, an opening (two in three) and a punctuation mark at the end (most)."""
    opening = rng.choice(CORPUS["openings"].strip().splitlines()) if rng.random() < 2 / 3 else ""
    text = pattern.replace("{opening}", opening).strip()
    while "{name}" in text:
        names = CORPUS["rare_names" if rng.random() < RARE else "names"].split()
        text = text.replace("{name}", rng.choice(names), 1)
    return re.sub(r"\ba (?=\[?[aeio])", "an ", text) + rng.choice(["", ".", ".", ".", "!"])


def vocabulary() -> list[str]:
    """BERT's special tokens, letters and their continuations, then the corpus's words except the rare names."""
    signs = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = [*"0123456789.,:;!?'\"()-", *letters, *("##" + c for c in [*letters, *"0123456789"])]
    words = {word for part in sentences() for text in part for word in re.findall(r"[a-z]+", text)}
    return signs + pieces + sorted((words | {*CORPUS["names"].split()}) - {*CORPUS["rare_names"].split(), *letters})
