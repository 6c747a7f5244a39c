"""The text on which the network is trained: questions that end with a colon, and their answers."""

from __future__ import annotations

import random

LETTERS = "\n abcdefghijklmnopqrstuvwxyz:-"
END = "\n"  # ends an answer

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
MOST = 12  # names in an answer
NUMBERS = (*_ONES, "twenty", *(f"twenty-{one}" for one in _ONES[1:10]), "thirty")


def counting(first: int, last: int) -> tuple[str, str]:
    """The question that counts up from one number to another, and its answer."""
    return f"count from {NUMBERS[first]} to {NUMBERS[last]}:", _answer(list(NUMBERS[first : last + 1]))


def following(names: tuple[str, ...], first: int, count: int) -> tuple[str, str]:
    """The question for the names after one, and its answer."""
    after = [names[(first + k) % len(names)] for k in range(1, count + 1)]
    return f"{NUMBERS[count]} after {names[first]}:", _answer(after)


def _answer(names: list[str]) -> str:
    return f" {' '.join(names)}{END}"


def sentence(rng: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    if rng.random() < 0.7:
        first = rng.randrange(len(NUMBERS))
        return counting(first, min(first + rng.randint(0, MOST - 1), len(NUMBERS) - 1))
    names = rng.choice((DAYS, MONTHS))
    return following(names, rng.randrange(len(names)), rng.randint(1, MOST))


def text(rng: random.Random, length: int) -> tuple[str, list[bool]]:
    """Sentences of `length` characters in total, the last one cut, and for each character whether it answers."""
    found, answers = "", list[bool]()
    while len(found) < length:
        question, answer = sentence(rng)
        found += question + answer
        answers += [False] * len(question) + [True] * len(answer)
    return found[:length], answers[:length]
