"""Networks whose own processor prepares their input, GIT, and sampling."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.bulk.captioner import networks
from penstock.bulk.captioner.model import TransformersCaptioner
from penstock.bulk.captioner.networks import ModelSource, Network, NetworkOptions, SeededNoise, open_network
from penstock.errors import ConfigError, LoadFailed

Folder = Callable[[str], Path]
PROCESSED = ["idefics3", "florence2", "qwen2_vl"]
SIDE = 32


@pytest.fixture(autouse=True)
def _without_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2-VL's processor has a part for videos, which needs torchvision: left out where that is absent."""
    if importlib.util.find_spec("torchvision") is None:
        parts = classmethod(lambda cls: ["image_processor", "tokenizer"])
        monkeypatch.setattr(transformers.Qwen2VLProcessor, "get_attributes", parts)


def opened(folder: Path, **settings: Any) -> Network:
    if folder.name == "qwen2_vl":
        settings.setdefault("size", (56, 84))
    return open_network(ModelSource("net", folder), "cpu", NetworkOptions(**{"tokens": (4, 8), **settings}))


def frames(rows: int, height: int = SIDE, width: int = SIDE) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, (rows, height, width, 3), np.uint8)


def written(network: Network, rows: int, numbers: list[int] | None = None) -> list[list[int]]:
    """The tokens of random frames of the network's size."""
    spec = network.spec
    pixels = torch.from_numpy(frames(rows, spec.height, spec.width)).permute(0, 3, 1, 2)
    return network.tokens(pixels if not spec.mean else pixels.float() / 255 - 0.5, numbers or [])


@pytest.mark.parametrize("kind", PROCESSED)
def test_a_caption_equals_the_one_of_the_libraries_own_calls(kind: str, captioner_folder: Folder) -> None:
    network = opened(captioner_folder(kind), prompt="the dog")
    processor = transformers.AutoProcessor.from_pretrained(captioner_folder(kind))
    model = transformers.AutoModelForImageTextToText.from_pretrained(captioner_folder(kind)).eval()
    text = "the dog"
    if processor.chat_template:
        content = [{"type": "image"}, {"type": "text", "text": text}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    expected = []
    for frame in frames(3, network.spec.height, network.spec.width):
        how = {"do_image_splitting": False} if kind == "idefics3" else {}
        inputs = processor(text=text, images=[frame], return_tensors="pt", **how)
        tokens = model.generate(**inputs, max_new_tokens=8, min_new_tokens=4, do_sample=False)[0].tolist()
        expected.append(tokens[1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1] :])
    found = written(network, 3)
    for one, other in zip(found, expected, strict=True):
        assert one[: len(other)] == other
        assert set(one[len(other) :]) <= {0}
    assert len({tuple(tokens) for tokens in found}) > 1, "the image matters"
    assert network.texts(found)[0] == processor.tokenizer.decode(expected[0], skip_special_tokens=True).strip()


@pytest.mark.parametrize("kind", [*PROCESSED, "git", "blip-2", "vision-encoder-decoder"])
def test_a_sample_depends_on_the_seed_and_the_number_of_the_frame_alone(kind: str, captioner_folder: Folder) -> None:
    sampling = {"temperature": 1.5, "seed": 3}
    network = opened(captioner_folder(kind), **sampling)
    whole = written(network, 6, [10, 11, 12, 13, 14, 15])
    assert written(network, 6, [10, 11, 12, 13, 14, 15]) == whole
    part = written(network, 2, [10, 11])
    assert [tokens[: len(other)] for tokens, other in zip(whole, part, strict=False)] == part
    assert written(network, 6, [20, 21, 22, 23, 24, 25]) != whole
    assert written(opened(captioner_folder(kind), temperature=1.5, seed=4), 6, [10, 11, 12, 13, 14, 15]) != whole
    assert written(opened(captioner_folder(kind)), 6) != whole


def test_samples_have_the_probabilities_of_the_scores() -> None:
    options = NetworkOptions(tokens=(0, 1), temperature=2.0, top_k=3)
    scores = torch.tensor([[0.0, 2.0, 1.0, -9.0, 3.0]]).repeat(20_000, 1)
    chosen = SeededNoise(options).of_rows(range(20_000))(torch.empty(0), scores).argmax(-1)
    shares = torch.bincount(chosen, minlength=5) / 20_000
    expected = torch.zeros(5)
    expected[[1, 2, 4]] = torch.softmax(torch.tensor([2.0, 1.0, 3.0]) / 2, 0)
    assert torch.allclose(shares, expected, atol=0.015)


@pytest.mark.parametrize("kind", [*PROCESSED, "git"])
def test_beams_find_a_caption_at_least_as_likely(kind: str, captioner_folder: Folder) -> None:
    greedy, beams = opened(captioner_folder(kind)), opened(captioner_folder(kind), beams=4)
    assert (greedy.settings.num_beams or 1, beams.settings.num_beams) == (1, 4)
    assert written(beams, 4) != written(greedy, 4)


def test_git_takes_whole_frames_and_a_prompt(captioner_folder: Folder) -> None:
    network = opened(captioner_folder("git"))
    assert (network.spec.height, network.spec.width) == (SIDE, SIDE)
    plain, prompted = written(network, 3), written(opened(captioner_folder("git"), prompt="the dog"), 3)
    assert all(len(tokens) <= 8 for tokens in [*plain, *prompted])
    assert plain != prompted


def test_the_size_of_frames_is_the_processors_the_encoders_or_a_choice(captioner_folder: Folder) -> None:
    sizes = {kind: opened(captioner_folder(kind)).spec for kind in PROCESSED}
    assert [(spec.height, spec.width) for spec in sizes.values()] == [(32, 32), (32, 32), (56, 84)]
    assert opened(captioner_folder("qwen2_vl"), size=(112, 56)).spec.height == 112
    free = opened(captioner_folder("qwen2_vl"), size=None, tokens=(0, 1)).spec
    assert (free.height, free.width) == (448, 448)


@pytest.mark.parametrize("kind", PROCESSED)
def test_a_captioner_serves_frames_of_any_size(kind: str, captioner_folder: Folder) -> None:
    chosen = {"height": 56, "width": 84} if kind == "qwen2_vl" else {}
    captioner = TransformersCaptioner(str(captioner_folder(kind)), max_new_tokens=6, temperature=1.0, seed=1, **chosen)
    captioner.load("cpu")
    size = captioner.parameters["height"], captioner.parameters["width"]
    batch = captioner.collate([
        {"frames": frames(2, *size), "frame_index": np.array([4, 7])}, {"frames": frames(1, 40, 70)}, {"frames": 1}
    ])  # fmt: skip
    first, second, wrong = captioner.predict(batch)
    assert len(captioner.postprocess(first)["caption"]) == 2
    assert len(captioner.postprocess(second)["caption"]) == 1
    assert "input 'frames'" in str(wrong)
    again = captioner.predict(captioner.collate([{"frames": frames(2, *size)[1:], "frame_index": np.array([7])}]))
    assert captioner.postprocess(again[0])["caption"][0] == captioner.postprocess(first)["caption"][1]
    assert captioner.parameters["prompt"] == {"florence2": "<CAPTION>"}.get(
        kind, "Describe this image in one sentence."
    )


def test_the_revision_changes_with_sampling_but_not_with_its_defaults(captioner_folder: Folder) -> None:
    def revision(**options: Any) -> str:
        captioner = TransformersCaptioner(str(captioner_folder("git")), **options)
        captioner.load("cpu")
        return str(captioner.parameters["revision"])

    plain = revision()
    assert revision(temperature=0.0, seed=0) == plain
    assert len({plain, revision(temperature=1.0), revision(temperature=1.0, seed=2), revision(num_beams=3)}) == 4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1}, "option temperature"),
        ({"temperature": 1.0, "num_beams": 2}, "temperature and num_beams exclude each other"),
        ({"num_beams": 0}, "option num_beams"),
        ({"top_k": 0}, "option top_k"),
        ({"seed": -1}, "option seed"),
        ({"height": 32}, "height and width need each other"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        TransformersCaptioner("net", **options)


def test_a_processor_that_cannot_be_loaded_is_reported(captioner_folder: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "net"
    shutil.copytree(captioner_folder("idefics3"), folder)
    for path in folder.glob("*process*"):
        path.unlink()
    with pytest.raises(LoadFailed, match="the processor of net cannot be used"):
        opened(folder)
    with pytest.raises(LoadFailed, match="which cannot be compiled"):
        opened(captioner_folder("idefics3"), compiled=True)


def test_a_missing_torchvision_is_named(captioner_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ImportError("Qwen2VLVideoProcessor requires the Torchvision library")

    monkeypatch.setattr(networks.transformers.AutoProcessor, "from_pretrained", fail)
    with pytest.raises(LoadFailed, match="pip install torchvision"):
        opened(captioner_folder("qwen2_vl"))


def test_a_template_of_its_own_writes_the_text(captioner_folder: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "net"
    shutil.copytree(captioner_folder("idefics3"), folder)
    (folder / "chat_template.jinja").write_text("sun {% for m in messages %} <image> sea {% endfor %}")
    assert written(opened(folder), 2) != written(opened(captioner_folder("idefics3")), 2)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "idefics3"
