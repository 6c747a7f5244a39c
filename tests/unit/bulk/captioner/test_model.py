"""A captioner from requests to captions, on small untrained networks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from transformers import AutoImageProcessor, AutoTokenizer, Blip2ForConditionalGeneration

from penstock.bulk.captioner.model import TransformersCaptioner
from penstock.config.schema import BatchingConfig
from penstock.core.worker.loop import BatchRunner
from penstock.core.worker.python_model import PythonModel
from penstock.errors import BadRequest, ConfigError, DecodeError, LoadFailed
from penstock.types import BatchPart, Item

SIDE = 32
TOKENS = 6
KINDS = ["blip-2", "blip", "vision-encoder-decoder"]

Folder = Callable[[str], Path]


def frames(count: int, height: int = SIDE, width: int = SIDE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), np.uint8)


def loaded(folder: Path, precision: str = "fp32", **options: Any) -> TransformersCaptioner:
    captioner = TransformersCaptioner(str(folder), **{"max_new_tokens": TOKENS, **options})
    captioner.load("cpu", precision=precision)
    return captioner


@pytest.fixture(scope="module")
def captioner(captioner_folder: Folder) -> TransformersCaptioner:
    return loaded(captioner_folder("blip-2"))


def answers(captioner: TransformersCaptioner, values: list[Any]) -> list[Any]:
    """The response to each value, as a worker computes it."""
    results = captioner.predict(captioner.collate(values))
    return [found if isinstance(found, Exception) else captioner.postprocess(found) for found in results]


def captions(captioner: TransformersCaptioner, pixels: np.ndarray) -> list[str]:
    (answer,) = answers(captioner, [{"frames": pixels}])
    return list(answer["caption"])


def test_captions_equal_the_librarys(captioner: TransformersCaptioner, captioner_folder: Folder) -> None:
    folder = captioner_folder("blip-2")
    pixels = np.concatenate([frames(6), frames(2, seed=1) // 8])
    network = Blip2ForConditionalGeneration.from_pretrained(folder)
    inputs = AutoImageProcessor.from_pretrained(folder)(list(pixels), return_tensors="pt")
    ids = network.generate(**inputs, max_new_tokens=TOKENS)
    expected = AutoTokenizer.from_pretrained(folder).batch_decode(ids, skip_special_tokens=True)
    assert captions(captioner, pixels) == [text.strip() for text in expected]
    assert len(set(expected)) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_caption_does_not_depend_on_its_neighbours(kind: str, captioner_folder: Folder) -> None:
    captioner = loaded(captioner_folder(kind))
    pixels = frames(9)
    together = captions(captioner, pixels)
    assert together == [captions(captioner, frame[np.newaxis])[0] for frame in pixels]
    assert len(set(together)) > 1


def test_requests_of_every_kind_share_one_batch(
    captioner: TransformersCaptioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = frames(3), frames(2, 60, 44, seed=1)
    file = simplejpeg.encode_jpeg(large[0], quality=95)
    array = np.empty(2, object)
    array[:] = [file, simplejpeg.encode_jpeg(small[0], quality=95)]
    values = [
        {"frames": small, "frame_index": np.array([5, 6, 7])},
        {"frames": large},
        file,
        {"jpeg": array, "frame_index": np.array([-1, 2**40])},
        small[1],
    ]
    alone = [answers(captioner, [value])[0] for value in values]
    batches = []
    monkeypatch.setattr(captioner.network, "tokens", counted(captioner.network.tokens, batches))
    together = answers(captioner, values)
    assert batches == [9]
    assert [plain(answer) for answer in together] == [plain(answer) for answer in alone]
    assert together[0]["frame_index"].tolist() == [5, 6, 7]
    assert "frame_index" not in together[1]
    assert set(together[2]) == set(together[4]) == {"caption"}
    assert isinstance(together[2]["caption"], str)
    assert together[3]["frame_index"].tolist() == [-1, 2**40]
    assert together[3]["caption"][0] == together[2]["caption"]


def counted(tokens: Callable[..., Any], batches: list[int]) -> Callable[..., Any]:
    def run(pixels: torch.Tensor, numbers: list[int]) -> Any:
        batches.append(len(pixels))
        return tokens(pixels, numbers)

    return run


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in answer.items()}


def test_an_invalid_request_fails_alone(captioner: TransformersCaptioner) -> None:
    damaged = np.empty(2, object)
    damaged[:] = [simplejpeg.encode_jpeg(frames(1)[0]), simplejpeg.encode_jpeg(frames(1, 40, 40)[0])[:-100]]
    good = {"frames": frames(2)}
    found = answers(
        captioner, [damaged_request := {"jpeg": damaged}, good, {"frames": frames(1)[0]}, b"no image", good]
    )
    assert [type(f) for f in found] == [DecodeError, dict, BadRequest, DecodeError, dict]
    assert "input 'jpeg': row 1: found a JPEG that is truncated" in str(found[0])
    assert "'frames': found uint8 of shape" in str(found[2])
    assert "found 8 bytes beginning with b'no image'" in str(found[3])
    assert list(found[1]["caption"]) == list(found[4]["caption"]) == captions(captioner, frames(2))
    assert [type(f) for f in answers(captioner, [damaged_request])] == [DecodeError], "also where nothing is left"


def test_more_rows_than_expected_run_in_parts(
    captioner: TransformersCaptioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a large JSON body are unknown before it is decoded."""
    values = [{"frames": frames(count, seed=count)} for count in (3, 4, 5, 2)] + [b"no image"]
    expected = [plain(answer) for answer in answers(captioner, values)[:4]]
    batches: list[int] = []
    monkeypatch.setattr("penstock.bulk.captioner.model.MAX_ROWS", 7)
    monkeypatch.setattr(captioner.network, "tokens", counted(captioner.network.tokens, batches))
    found = answers(captioner, values)
    assert batches == [7, 7]
    assert [plain(answer) for answer in found[:4]] == expected
    assert type(found[4]) is DecodeError


def test_a_device_error_is_raised_in_the_main_thread(
    captioner: TransformersCaptioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the reading thread ends a worker; its main thread runs the batch again in halves."""
    model = in_a_worker(captioner)
    feed = captioner.feed

    def small(requests: Any) -> Any:
        if len(requests) > 1:
            raise MemoryError("the device is full")
        return feed(requests)

    monkeypatch.setattr(captioner, "feed", small)
    part = run(model, [{"frames": frames(1, seed=i)} for i in range(2)])
    assert part.oom == (2, 1)
    assert [r.body["caption"].tolist() for r in part.results] == [
        captions(captioner, frames(1, seed=i)) for i in range(2)
    ]


def in_a_worker(captioner: TransformersCaptioner) -> PythonModel:
    """The captioner as a worker loads it."""
    model = PythonModel(captioner)
    model.load("cpu")
    return model


def run(model: PythonModel, values: list[Any]) -> BatchPart:
    """The final part of a batch in a worker."""
    runner = BatchRunner(model, model.metadata("m", "1"), BatchingConfig())
    parts: list[BatchPart] = []
    runner.run(1, runner.decode([Item(value) for value in values]), parts.append)
    return parts[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_continued_and_not_repeated(kind: str, captioner_folder: Folder) -> None:
    plain_captioner, prompted = loaded(captioner_folder(kind)), loaded(captioner_folder(kind), prompt="the red dog")
    pixels = frames(8)
    found = captions(prompted, pixels)
    assert found != captions(plain_captioner, pixels)
    assert not all(text.startswith("the red dog") for text in found)
    assert all(len(text.split()) <= TOKENS for text in found)
    assert prompted.parameters["prompt"] == "the red dog"
    assert prompted.parameters["revision"] != plain_captioner.parameters["revision"]


def test_a_prompt_is_encoded_like_the_librarys(captioner_folder: Folder) -> None:
    folder = captioner_folder("blip-2")
    pixels = frames(4)
    network = Blip2ForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = AutoImageProcessor.from_pretrained(folder)(list(pixels), return_tensors="pt")
    ids = torch.tensor([[3] * 4 + tokenizer("the red dog").input_ids] * 4)
    written = network.generate(**inputs, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS)
    expected = [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
    found = captions(loaded(folder, prompt="the red dog"), pixels)
    assert [f"the red dog {text}".strip() for text in found] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_captions(kind: str, precision: str, captioner_folder: Folder) -> None:
    captioner = loaded(captioner_folder(kind), precision)
    assert captioner.parameters["precision"] == precision
    assert captioner.network.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert len(captions(captioner, frames(3))) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_forced_lengths_are_kept(kind: str, captioner_folder: Folder) -> None:
    captioner = loaded(captioner_folder(kind), min_new_tokens=TOKENS)
    batch = captioner.collate([{"frames": frames(1, seed=i)} for i in range(8)])
    lengths = {len(found.tokens[0]) for found in captioner.predict(batch)}
    assert lengths == {TOKENS}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_random_weights_need_only_a_configuration(precision: str, captioner_folder: Folder, tmp_path: Path) -> None:
    config = json.loads((captioner_folder("blip-2") / "config.json").read_text())
    for part in (config, *(value for key, value in config.items() if key.endswith("_config"))):
        part["dtype"] = "float32"  # the dtype of other weights
    (tmp_path / "config.json").write_text(json.dumps(config))
    captioner = loaded(tmp_path, precision, random_weights=True, min_new_tokens=TOKENS)
    found = captions(captioner, frames(2))
    assert all(len(caption.split()) == TOKENS and caption.replace(" ", "").isdigit() for caption in found)
    assert (captioner.parameters["height"], captioner.parameters["width"]) == (SIDE, SIDE)
    with pytest.raises(LoadFailed, match="no weights in safetensors"):
        loaded(tmp_path)


def test_metadata_describes_the_inputs(captioner: TransformersCaptioner) -> None:
    metadata = in_a_worker(captioner).metadata("captioner", "1")
    assert {t.name: (t.datatype, t.shape, t.optional) for t in metadata.inputs} == {
        "frames": ("UINT8", (-1, -1, -1, 3), True),
        "jpeg": ("BYTES", (-1,), True),
        "frame_index": ("INT64", (-1,), True),
    }
    assert {t.name: t.datatype for t in metadata.outputs} == {"caption": "BYTES", "frame_index": "INT64"}
    revision = metadata.parameters.pop("revision")
    assert len(revision) == 16
    assert metadata.parameters == {
        "task": "image-to-text",
        "model": "blip-2",
        "height": SIDE,
        "width": SIDE,
        "layout": "NHWC",
        "kernel": "bicubic",
        "prompt": "",
        "max_new_tokens": TOKENS,
        "precision": "fp32",
    }


def test_the_revision_changes_with_whatever_changes_captions(captioner_folder: Folder, tmp_path: Path) -> None:
    folder = captioner_folder("blip-2")
    found = [
        loaded(folder, **settings).parameters["revision"]
        for settings in ({}, {}, {"max_new_tokens": 5}, {"min_new_tokens": 1}, {"prompt": "a"}, {"precision": "bf16"})
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 5
    shutil.copytree(folder, tmp_path / "other name")
    assert loaded(tmp_path / "other name").parameters["revision"] == found[0], "servers may keep it where they like"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ""}, "option model: found '', expected a folder or a name"),
        ({"model": 5}, "option model: found 5"),
        ({"max_new_tokens": 0}, "option max_new_tokens: found 0, expected a whole number from 1"),
        ({"max_new_tokens": "12"}, "option max_new_tokens: found the string '12'"),
        ({"max_new_tokens": True}, "option max_new_tokens: found true"),
        ({"min_new_tokens": -1}, "option min_new_tokens: found -1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "option min_new_tokens: found 9, more than max_new_tokens"),
        ({"prompt": 1}, "option prompt: found 1"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformersCaptioner(**{"model": "x", **options})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"precision": "int8"}, "precision: found the string 'int8'"),
        ({"optimize": "optimize_for_inference"}, "optimize: found"),
    ],
)
def test_invalid_configuration_keys_are_rejected(keys: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformersCaptioner("x").load("cpu", **keys)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimize", ["none", "compile"])
def test_a_gpu_writes_the_same_captions(
    optimize: str, captioner: TransformersCaptioner, captioner_folder: Folder
) -> None:
    other = TransformersCaptioner(str(captioner_folder("blip-2")), max_new_tokens=TOKENS)
    other.load("cuda:0", optimize=optimize)
    pixels = frames(20)
    same = sum(a == b for a, b in zip(captions(other, pixels), captions(captioner, pixels), strict=True))
    assert same >= 18  # sums are added in another order
