"""Loading networks and generating with them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.bulk.captioner import networks
from penstock.bulk.captioner.networks import ARCHITECTURES, ModelSource, Network, NetworkOptions, open_network
from penstock.errors import LoadFailed

Folder = Callable[[str], Path]


def opened(folder: Path, **settings: Any) -> Network:
    return open_network(ModelSource("net", folder), "cpu", NetworkOptions(**{"tokens": (0, 6), **settings}))


def pixels(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def edited(captioner_folder: Folder, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a captioner's folder with some keys of a file changed."""

    def edit(file: str, kind: str = "blip-2", **keys: Any) -> Path:
        folder = tmp_path / "net"
        shutil.copytree(captioner_folder(kind), folder)
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
        return folder

    return edit


def test_an_unsupported_network_is_rejected_with_the_supported_kinds(edited: Callable[..., Path]) -> None:
    with pytest.raises(LoadFailed, match="net is of the type 'bert'; expected one of blip-2, blip, vision-encoder-dec"):
        opened(edited("config.json", model_type="bert"))


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"size": {"shortest_edge": 32}}, "net crops images; expected a preprocessor that resizes to height and width"),
        ({"do_center_crop": True}, "net crops images"),
        ({"resample": 0}, "net resamples by 0; expected 2 or 3"),
    ],
)
def test_an_unsupported_preprocessor_is_rejected(keys: dict[str, Any], error: str, edited: Callable[..., Path]) -> None:
    with pytest.raises(LoadFailed, match=error):
        opened(edited("preprocessor_config.json", **keys))


@pytest.mark.parametrize(
    ("missing", "message"),
    [("preprocessor_config.json", "net cannot be loaded: OSError"), ("tokenizer*", "net has no tokenizer")],
)
def test_an_incomplete_folder_is_rejected(missing: str, message: str, edited: Callable[..., Path]) -> None:
    folder = edited("config.json")
    for path in folder.glob(missing):
        path.unlink()
    with pytest.raises(LoadFailed, match=message):
        opened(folder)


def test_damaged_weights_are_rejected(edited: Callable[..., Path]) -> None:
    folder = edited("config.json")
    (folder / "model.safetensors").write_bytes(b"\x80\x04\x95 a pickle")
    with pytest.raises(LoadFailed, match="net cannot be loaded"):
        opened(folder)


def test_pickled_weights_load_without_running_anything(edited: Callable[..., Path]) -> None:
    folder = edited("config.json")
    network = opened(folder)
    torch.save(network.model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    expected = network.tokens(pixels(3))
    assert opened(folder, trust="pickle").tokens(pixels(3)) == expected
    with pytest.raises(LoadFailed, match="net cannot be loaded"):
        opened(folder)


def test_a_checkpoints_sampling_is_disabled_and_its_beams_are_kept(edited: Callable[..., Path]) -> None:
    keys = {"do_sample": True, "temperature": 2.0, "top_k": 5, "num_beams": 3, "max_length": 9}
    network = opened(edited("generation_config.json", "vision-encoder-decoder", **keys))
    assert network.settings.num_beams == 3
    assert network.tokens(pixels(4)) == network.tokens(pixels(4))


@pytest.mark.parametrize("kind", ["blip-2", "vision-encoder-decoder"])
@pytest.mark.parametrize(("rows", "runs"), [(1, [1]), (5, [8]), (9, [32]), (64, [64]), (70, [64, 8])])
def test_buckets_of_a_compiled_network_change_no_caption(
    kind: str, rows: int, runs: list[int], captioner_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = opened(captioner_folder(kind))
    compiled = opened(captioner_folder(kind), compiled=True)
    seen = []
    generate = compiled.model.generate

    def spy(**arguments: Any) -> Any:
        seen.append(len(arguments["pixel_values"]))
        return generate(**arguments)

    monkeypatch.setattr(compiled.model, "generate", spy)
    assert compiled.tokens(pixels(rows)) == plain.tokens(pixels(rows))
    assert seen == runs
    if rows == 1:  # once is enough
        seen.clear()
        compiled.compile()
        assert seen == [1, 8, 32, 64]


def test_a_network_that_cannot_be_compiled_is_rejected(captioner_folder: Folder) -> None:
    with pytest.raises(LoadFailed, match="net is of the type 'blip', which cannot be compiled"):
        opened(captioner_folder("blip"), compiled=True)


def test_a_network_without_a_padding_token_pads_with_its_end_token(edited: Callable[..., Path]) -> None:
    folder = edited("generation_config.json", "vision-encoder-decoder", pad_token_id=None)
    config = json.loads((folder / "config.json").read_text())
    config["pad_token_id"] = config["decoder"]["pad_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    network = opened(folder)
    assert network.settings.pad_token_id == 2
    assert len(network.tokens(pixels(3))) == 3


def test_the_published_architecture_has_its_published_size() -> None:
    import transformers

    keys = dict(ARCHITECTURES["blip2-opt-2.7b"])
    config = transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)
    with torch.device("meta"):
        network = transformers.Blip2ForConditionalGeneration(config)
    assert sum(p.numel() for p in network.parameters()) == pytest.approx(3.745e9, rel=2e-3)
    assert config.use_decoder_only_language_model
    assert (config.vision_config.image_size, config.text_config.max_position_embeddings) == (224, 2048)


ROWS = 24


def opened_greedy(folder: Path, **settings: Any) -> Network:
    return open_network(ModelSource("net", folder), "cpu", NetworkOptions(**{"tokens": (0, 12), **settings}))


def random_pixels(seed: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def ending(network: Network, token: int) -> Network:
    """The network with another end token, which it writes in some captions and not in others."""
    network.settings.eos_token_id = token
    return network


def both(network: Network, shown: torch.Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of our own loop and of the library's."""
    assert network.greedy
    ours = network.tokens(shown)
    network.greedy = False
    try:
        return ours, network.tokens(shown)
    finally:
        network.greedy = True


@pytest.fixture(scope="module")
def network_of(captioner_folder: Callable[[str], Path]) -> Callable[[str, tuple[int, int]], Network]:
    """A network for a prompt and length limits, loaded once."""
    return functools.cache(
        lambda prompt, tokens: opened_greedy(captioner_folder("blip-2"), prompt=prompt, tokens=tokens)
    )


@pytest.mark.parametrize("prompt", ["", "the red dog"])
@pytest.mark.parametrize("tokens", [(0, 1), (0, 12), (5, 12), (12, 12)])
@pytest.mark.parametrize("end", range(2, 10))
def test_greedy_generation_equals_the_librarys(
    end: int, tokens: tuple[int, int], prompt: str, network_of: Callable[[str, tuple[int, int]], Network]
) -> None:
    network = ending(network_of(prompt, tokens), end)
    ours, expected = both(network, random_pixels(end))
    assert ours == expected


def test_captions_end_at_different_steps_and_are_padded(captioner_folder: Callable[[str], Path]) -> None:
    """Without this the test above would prove nothing."""
    lengths = set()
    for end in range(2, 10):
        for caption in ending(opened_greedy(captioner_folder("blip-2")), end).tokens(random_pixels(end)):
            lengths.add(caption.index(end) if end in caption else 12)
            assert end not in caption or set(caption[caption.index(end) + 1 :]) <= {0}
    assert len(lengths) >= 5


def test_checking_seldom_only_adds_padding(
    captioner_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = opened_greedy(captioner_folder("blip-2"), tokens=(0, 11))
    settings, ends = network.settings, [4, 5, 6, 7, 8, 9, 10]
    settings.eos_token_id = ends
    often = network.tokens(random_pixels())
    assert len(often[0]) < 11
    monkeypatch.setattr(networks, "check_interval", lambda device: 4)
    seldom = network.tokens(random_pixels())
    assert 0 <= len(seldom[0]) - len(often[0]) < 4
    assert [caption[: len(often[0])] for caption in seldom] == often
    assert all(set(caption[len(often[0]) :]) <= {0} for caption in seldom)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_generation_equals_the_librarys(precision: str, captioner_folder: Callable[[str], Path]) -> None:
    network = opened_greedy(captioner_folder("blip-2"), precision=precision)
    ours, expected = both(network, random_pixels().to(network.dtype))
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
    settings = opened_greedy(captioner_folder("blip-2")).settings
    assert networks.is_plainly_greedy(settings)
    settings.update(**keys)
    assert not networks.is_plainly_greedy(settings)


@pytest.mark.parametrize("kind", ["blip", "vision-encoder-decoder"])
def test_other_networks_are_left_to_the_library(kind: str, captioner_folder: Callable[[str], Path]) -> None:
    assert not opened_greedy(captioner_folder(kind)).greedy
