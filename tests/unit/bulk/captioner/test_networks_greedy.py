"""Greedy generation equals the library's `generate`, token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bulk.captioner import networks
from penstock.bulk.captioner.files import ModelSource
from penstock.bulk.captioner.networks import Network, NetworkOptions, open_network

ROWS = 24


def opened(folder: Path, **settings: Any) -> Network:
    return open_network(ModelSource("net", folder), "cpu", NetworkOptions(**{"tokens": (0, 12), **settings}))


def pixels(seed: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def ending(network: Network, token: int) -> Network:
    """The network with another end token, which it writes in some captions and not in others."""
    network._settings.eos_token_id = token
    return network


def both(network: Network, shown: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of our own loop and of the library's."""
    assert network._greedy
    ours = network.tokens(shown)
    network._greedy = False
    try:
        return ours, network.tokens(shown)
    finally:
        network._greedy = True


@pytest.fixture(scope="module")
def network_of(captioner_folder: Callable[[str], Path]) -> Callable[[str, tuple[int, int]], Network]:
    """A network for a prompt and length limits, loaded once."""
    return functools.cache(lambda prompt, tokens: opened(captioner_folder("blip-2"), prompt=prompt, tokens=tokens))


@pytest.mark.parametrize("prompt", ["", "the red dog"])
@pytest.mark.parametrize("tokens", [(0, 1), (0, 12), (5, 12), (12, 12)])
@pytest.mark.parametrize("end", range(2, 10))
def test_greedy_generation_equals_the_librarys(
    end: int, tokens: tuple[int, int], prompt: str, network_of: Callable[[str, tuple[int, int]], Network]
) -> None:
    network = ending(network_of(prompt, tokens), end)
    ours, expected = both(network, pixels(end))
    assert ours == expected


def test_captions_end_at_different_steps_and_are_padded(captioner_folder: Callable[[str], Path]) -> None:
    """Without this the test above would prove nothing."""
    lengths = set()
    for end in range(2, 10):
        for caption in ending(opened(captioner_folder("blip-2")), end).tokens(pixels(end)):
            lengths.add(caption.index(end) if end in caption else 12)
            assert end not in caption or set(caption[caption.index(end) + 1 :]) <= {0}
    assert len(lengths) >= 5


def test_checking_seldom_only_adds_padding(
    captioner_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = opened(captioner_folder("blip-2"), tokens=(0, 11))
    settings, ends = network._settings, [4, 5, 6, 7, 8, 9, 10]
    settings.eos_token_id = ends
    often = network.tokens(pixels())
    assert len(often[0]) < 11
    monkeypatch.setattr(networks, "_check_interval", lambda device: 4)
    seldom = network.tokens(pixels())
    assert 0 <= len(seldom[0]) - len(often[0]) < 4
    assert [caption[: len(often[0])] for caption in seldom] == often
    assert all(set(caption[len(often[0]) :]) <= {0} for caption in seldom)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_generation_equals_the_librarys(precision: str, captioner_folder: Callable[[str], Path]) -> None:
    network = opened(captioner_folder("blip-2"), precision=precision)
    ours, expected = both(network, pixels().to(network.dtype))
    same = sum(a == b for a, b in zip(ours, expected, strict=True))
    assert same >= ROWS - 2  # half-precision sums depend on the order of addition


@pytest.mark.parametrize(
    "keys",
    [
        {"num_beams": 2},
        {"repetition_penalty": 1.3},
        {"suppress_tokens": [5]},
        {"no_repeat_ngram_size": 2},
        {"cache_implementation": "static"},
        {"forced_bos_token_id": 3},
    ],
)
def test_other_generation_settings_are_left_to_the_library(
    keys: dict[str, Any], captioner_folder: Callable[[str], Path]
) -> None:
    settings = opened(captioner_folder("blip-2"))._settings
    assert networks.is_plainly_greedy(settings)
    settings.update(**keys)
    assert not networks.is_plainly_greedy(settings)


@pytest.mark.parametrize("kind", ["blip", "vision-encoder-decoder"])
def test_other_networks_are_left_to_the_library(kind: str, captioner_folder: Callable[[str], Path]) -> None:
    assert not opened(captioner_folder(kind))._greedy
