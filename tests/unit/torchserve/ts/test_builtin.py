import base64
import io
import math
import sys
import types
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penstock.errors import DecodeError, LoadFailed
from penstock.torchserve.ts import builtin
from penstock.torchserve.ts.builtin import (
    MEAN,
    STD,
    ImageClassifier,
    ImageSegmenter,
    ObjectDetector,
    TextClassifier,
    TextHandler,
)
from penstock.torchserve.ts.util import CONTRACTION_MAP, get_tokenizer, ngrams_iterator

pytestmark = [
    pytest.mark.usefixtures("forget_modules"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


class Means(torch.nn.Module):
    """Scores of six classes: the means of the channels, and 0, -1, -2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = x.mean(dim=[2, 3])
        return torch.cat([means, torch.tensor([[0.0, -1.0, -2.0]]).repeat(x.shape[0], 1)], dim=1)


class Halves(torch.nn.Module):
    """Class 1 on the left half of an image and class 0 on the right one, both with a score of 2 to 0."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        left = torch.zeros(x.shape[0], 224, 224)
        left[:, :, :112] = 2.0
        return {"out": torch.stack([2.0 - left, left], 1)}


class Boxes(torch.nn.Module):
    """Three objects an image, of falling scores."""

    def forward(self, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        height, width = float(x.shape[2]), float(x.shape[3])
        boxes = torch.tensor([[0.0, 0.0, width, height], [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
        found = {"boxes": boxes, "labels": torch.tensor([1, 2, 1]), "scores": torch.tensor([0.75, 0.5, 0.25])}
        return [found for _ in range(x.shape[0])]


@pytest.fixture
def load(tmp_path: Path, make_context):
    """A handler with a scripted model, and its context."""

    def load(handler: type, model: torch.nn.Module, *headers: Any, **more: Any) -> tuple[Any, Any]:
        torch.jit.script(model).save(str(tmp_path / "net.pt"))
        context = make_context({"serializedFile": "net.pt"}, *headers, **more)
        made = handler()
        made.initialize(context)
        return made, context

    return load


def expected_probabilities(color: tuple[int, int, int]) -> list[float]:
    scores = [(c / 255 - m) / s for c, m, s in zip(color, MEAN, STD, strict=True)] + [0.0, -1.0, -2.0]
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def test_the_classifier_returns_the_five_most_probable_classes(load, picture):
    handler, context = load(ImageClassifier, Means())
    (answer,) = handler.handle([{"data": picture(color=(10, 200, 30))}], context)
    probabilities = expected_probabilities((10, 200, 30))
    best = sorted(range(6), key=lambda i: -probabilities[i])[:5]
    assert list(answer) == [str(i) for i in best]
    assert list(answer.values()) == pytest.approx([probabilities[i] for i in best], rel=1e-4)


def test_the_classifier_accepts_bytes_base64_and_numbers_in_one_batch(load, picture, tmp_path: Path):
    (tmp_path / "index_to_name.json").write_text('{"0":"r","1":["n1","g"],"2":"b","3":"x","4":"y","5":"z"}')
    handler, context = load(ImageClassifier, Means())
    handler.set_max_result_classes(1)
    numbers = np.zeros((3, 224, 224))
    numbers[0] = 9
    image = picture(color=(0, 250, 0))
    batch = [{"body": image}, {"data": base64.b64encode(image).decode(), "body": b"no"}, {"body": numbers.tolist()}]
    answers = handler.handle(batch, context)
    assert handler.get_max_result_classes() == 1
    assert [list(a) for a in answers] == [["g"], ["g"], ["r"]]
    assert answers[0] == answers[1]


def test_a_subclass_may_have_its_own_image_processing(load, picture):
    class Grey(ImageClassifier):
        topk = 2

        def image_processing(self, image: Any) -> torch.Tensor:
            assert image.mode == "L"
            return torch.full((3, 4, 4), float(image.getpixel((0, 0))))

    handler, context = load(Grey, Means())
    (answer,) = handler.handle([{"body": picture(mode="L", color=3)}], context)
    assert list(answer.values()) == pytest.approx([1 / (3 + math.exp(-3) + math.exp(-4) + math.exp(-5))] * 2)


def test_a_picture_is_upright_and_of_8_bits(load):
    """A photograph lay on its side, and 16 bits were white."""

    class Seen(ImageClassifier):
        def image_processing(self, image: Any) -> torch.Tensor:
            seen.append(np.asarray(image))
            return torch.zeros(3, 4, 4)

    seen: list[Any] = []
    handler, context = load(Seen, Means())
    marks, photo, deep = Image.Exif(), io.BytesIO(), io.BytesIO()
    marks[0x0112] = 6
    Image.new("RGB", (8, 4), (255, 0, 0)).save(photo, "JPEG", exif=marks)
    Image.fromarray(np.full((2, 3), 90 << 8, np.uint16)).save(deep, "PNG")
    handler.handle([{"data": photo.getvalue()}, {"body": deep.getvalue()}], context)
    assert [pixels.shape for pixels in seen] == [(8, 4, 3), (2, 3)]
    assert (seen[1] == 90).all()


def test_the_classifier_explains_with_integrated_gradients(load, picture):
    handler, context = load(ImageClassifier, Means(), {"explain": "True"})
    image = picture((224 * 2, 224 * 2), (255, 0, 0))
    # the score of a channel is its mean: each of its pixels adds value / (224 * 224), the other channels nothing
    for target, place in ((0, 0), (bytearray(b"1"), 1), ("2", 2)):
        (found,) = handler.handle([{"data": image, "target": target}], context)
        sums = np.array(found).sum(axis=(1, 2))
        expected = [0.0, 0.0, 0.0]
        expected[place] = ((1.0 if place == 0 else 0.0) - MEAN[place]) / STD[place]
        assert sums.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_an_explanation_without_captum_names_the_package(load, picture, monkeypatch):
    handler, context = load(ImageClassifier, Means(), {"explain": "True"})
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(ImportError, match="pip install 'captum"):
        handler.handle([{"data": picture()}], context)


def test_a_handler_may_set_its_own_explainer(load, picture):
    class Own(ImageClassifier):
        def initialize(self, context: Any) -> None:
            super().initialize(context)
            self.ig = type("Zero", (), {"attribute": lambda self, x, **_: x * 0})()

    handler, context = load(Own, Means(), {"explain": "True"})
    assert np.array(handler.handle([{"data": picture()}], context)).sum() == 0


def test_without_pillow_the_error_names_the_package_to_install(load, picture, monkeypatch):
    handler, context = load(ImageClassifier, Means())
    image = picture()
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(LoadFailed, match=r"Pillow cannot be imported.*: pip install"):
        handler.handle([{"data": image}], context)


def test_other_bytes_than_an_image_fail(load):
    handler, context = load(ImageClassifier, Means())
    with pytest.raises(DecodeError, match="found 8 bytes beginning with b'no image'"):
        handler.handle([{"data": bytearray(b"no image")}], context)


def test_images_with_too_many_pixels_are_refused_unless_the_configuration_allows_them(load, picture, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    image = picture((30, 30))
    handler, context = load(ImageClassifier, Means(), limit_max_image_pixels=True)
    with pytest.raises(DecodeError, match=r"found an image that is too large: Image size \(900 pixels\)"):
        handler.handle([{"data": image}], context)
    handler, context = load(ImageClassifier, Means(), limit_max_image_pixels=False)
    assert len(handler.handle([{"data": image}], context)) == 1
    assert Image.MAX_IMAGE_PIXELS is None


def test_the_segmenter_returns_the_class_and_probability_of_each_pixel(load, picture):
    handler, context = load(ImageSegmenter, Halves())
    answers = handler.handle([{"data": picture()}, {"body": picture()}], context)
    found = np.array(answers)
    assert found.shape == (2, 224, 224, 2)
    assert found[0, 0, 0, 0] == 1
    assert found[1, 223, 223, 0] == 0
    assert found[..., 1] == pytest.approx(1 / (1 + math.exp(-2)))


def test_the_detector_returns_objects_above_the_threshold(load, picture, tmp_path: Path):
    handler, context = load(ObjectDetector, Boxes())
    assert handler.handle([{"data": picture((40, 20))}], context) == [
        [{"1": [0.0, 0.0, 40.0, 20.0], "score": 0.75}, {"2": [1.0, 2.0, 3.0, 4.0], "score": 0.5}]
    ]
    (tmp_path / "index_to_name.json").write_text('{"1":"cat","2":"dog"}')
    handler, context = load(ObjectDetector, Boxes())
    handler.threshold = 0.6
    two = handler.handle([{"data": picture((8, 8))}] * 2, context)
    assert two == [[{"cat": [0.0, 0.0, 8.0, 8.0], "score": 0.75}]] * 2


# ---- transforms


@pytest.mark.parametrize(
    ("size", "expected"),
    [((300, 200), (384, 256)), ((200, 301), (256, 385)), ((256, 256), (256, 256)), ((257, 1000), (256, 996))],
)
def test_resizing_sets_the_shorter_side_and_rounds_the_other_down(size, expected):
    assert builtin.resized(Image.new("RGB", size), 256).size == expected


def test_an_image_of_the_right_size_is_not_resized():
    image = Image.new("RGB", (256, 300))
    assert builtin.resized(image, 256) is image


def test_downscaling_uses_a_triangle_filter():
    # a row of 8 pixels to 4: each new pixel has weights 1 3 3 1 over 8, and at the border 3 3 1 over 7
    row = np.array([0, 80, 160, 240, 0, 0, 0, 80], np.uint8)
    image = Image.fromarray(np.repeat(np.repeat(row[None, :, None], 8, 0), 3, 2))
    found = np.asarray(builtin.resized(image, 4))[0, :, 0]
    expected = [(3 * 0 + 3 * 80 + 160) / 7, (80 + 480 + 720 + 0) / 8, (240 + 0 + 0 + 0) / 8, (0 + 0 + 240) / 7]
    assert found.tolist() == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("size", "corner"),
    [
        ((384, 256), (80, 16)),
        ((257, 256), (16, 16)),
        ((259, 256), (18, 16)),
        ((224, 225), (0, 0)),
        ((224, 227), (0, 2)),
    ],
)
def test_the_centre_crop_rounds_halves_to_even(size, corner):
    width, height = size
    columns, rows = np.meshgrid(np.arange(width) % 251, np.arange(height) % 251)
    image = Image.fromarray(np.stack([columns, rows, rows], 2).astype(np.uint8))
    cut = builtin.centre_of(image, 224)
    assert cut.size == (224, 224)
    assert cut.getpixel((0, 0))[:2] == corner


def test_pixels_become_normalized_channels():
    pixels = np.zeros((2, 3, 3), np.uint8)
    pixels[1, 2] = [255, 51, 0]
    found = builtin.to_tensor(Image.fromarray(pixels))
    assert found.dtype is torch.float32
    assert found.shape == (3, 2, 3)
    assert found[:, 1, 2].tolist() == pytest.approx([1.0, 0.2, 0.0])
    assert found.sum().item() == pytest.approx(1.2)
    normal = builtin.normalized(found)
    assert normal[:, 1, 2].tolist() == pytest.approx([0.515 / 0.229, -0.256 / 0.224, -0.406 / 0.225])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "LA"])
def test_images_of_other_modes_become_rgb(mode):
    image = Image.new(mode, (8, 8))
    assert builtin.to_tensor_only()(image).shape == (3, 8, 8)


def test_the_whole_pipeline_returns_the_expected_tensor():
    found = builtin.image_pipeline()(Image.new("RGB", (300, 200), (255, 51, 0)))
    assert found.shape == (3, 224, 224)
    assert found[0].unique().tolist() == pytest.approx([0.515 / 0.229])


def test_torchvisions_transforms_are_used_if_installed(monkeypatch):
    module = types.ModuleType("torchvision.transforms")
    for name in ("Compose", "Resize", "CenterCrop", "ToTensor", "Normalize"):
        setattr(module, name, lambda *args, name=name, **kwargs: (name, args, kwargs))
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.transforms", module)
    name, (steps,), _ = builtin.image_pipeline()
    assert name == "Compose"
    assert steps[1:4] == [("Resize", (256,), {}), ("CenterCrop", (224,), {}), ("ToTensor", (), {})]
    assert steps[4] == ("Normalize", (), {"mean": builtin.MEAN, "std": builtin.STD})


def test_a_torchvision_for_another_torch_is_not_used(monkeypatch, caplog):
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(builtin.importlib, "import_module", broken)
    assert builtin.image_pipeline()(Image.new("RGB", (9, 9))).shape == (3, 224, 224)
    assert "torchvision_unusable" in caplog.text


# ---- texts


NET = """
import torch

class Bag(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(5, 2, mode="sum")

    def forward(self, words, offsets):
        return self.embedding(words, offsets)
"""
WORDS = {"<unk>": 0, "good": 1, "bad": 2, "not": 3, "not good": 4}
WEIGHTS = [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [0.0, 0.5], [-3.0, 1.0]]


@pytest.fixture
def load_text(tmp_path: Path, make_context):
    """A classifier with a vocabulary, and its context."""

    def load(vocabulary: Any, *headers: Any, config: Any = None) -> tuple[TextClassifier, Any]:
        name = f"bag_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(NET)
        torch.save({"embedding.weight": torch.tensor(WEIGHTS)}, tmp_path / "bag.pth")
        torch.save(vocabulary, tmp_path / "source_vocab.pt")
        context = make_context({"modelFile": f"{name}.py", "serializedFile": "bag.pth"}, *headers, config=config)
        made = TextClassifier()
        made.initialize(context)
        return made, context

    return load


def probabilities(scores: list[float]) -> list[float]:
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


@pytest.mark.parametrize("vocabulary", [WORDS, OrderedDict(WORDS), list(WORDS), Counter(WORDS)])
def test_words_pairs_and_unknown_words_are_counted(load_text, vocabulary):
    handler, context = load_text(vocabulary)
    # the, film, isn't -> is not, good; of the pairs only "not good" is known
    (answer,) = handler.handle([{"data": bytearray(b"The <b>film</b> isn't GOOD!")}], context)
    assert list(answer) == ["0", "1"]
    assert list(answer.values()) == pytest.approx(probabilities([2.0 - 3.0, 0.5 + 1.0]))


def test_text_may_be_a_string_and_labels_have_names(load_text, tmp_path: Path):
    (tmp_path / "index_to_name.json").write_text('{"0":"yes","1":"no"}')
    handler, context = load_text(WORDS)
    (answer,) = handler.handle([{"body": "bad"}], context)
    assert answer == pytest.approx(dict(zip(("yes", "no"), probabilities([0.0, 2.0]), strict=True)))


def test_an_explanation_lists_the_words_and_their_importance(load_text):
    handler, context = load_text(WORDS, {"explain": "True"})
    (answer,) = handler.handle([{"data": "good bad", "target": bytearray(b"1")}], context)
    assert answer["words"] == ["good", "bad"]
    # the bag's sum is one row: it adds nothing to score 0 and 2 to score 1, against a text of unknown words
    assert answer["importances"] == [pytest.approx(probabilities([0.0, 2.0]))]


def test_an_archive_without_a_vocabulary_is_refused(load_text, tmp_path: Path, make_context):
    handler, context = load_text(WORDS)
    (tmp_path / "source_vocab.pt").unlink()
    with pytest.raises(Exception, match="source_vocab"):
        handler.initialize(context)


def test_an_old_manifest_may_name_the_vocabulary(load_text, tmp_path: Path):
    handler, context = load_text(WORDS)
    (tmp_path / "source_vocab.pt").rename(tmp_path / "words.pt")
    context.manifest["model"]["sourceVocab"] = str(tmp_path / "words.pt")
    handler.initialize(context)
    assert handler.source_vocab["nowhere"] == 0


def test_a_vocabulary_without_unk_fails_on_an_unknown_word(load_text):
    handler, context = load_text({"good": 1})
    with pytest.raises(KeyError, match="strange"):
        handler.handle([{"data": "strange"}], context)


class Cleaner(TextHandler):
    pass


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I'd say they've won't", "I would say they have will not"),
        ("Can't you?", "Cannot you?"),
        ("can't've", "cannotve"),  # the shorter one is found first
        ("it ain't", "it as not"),  # the first character stays
        ("dogs' bone", "dogs bone"),
    ],
)
def test_contractions_are_expanded(text, expected):
    assert Cleaner()._expand_contractions(text) == expected


def test_the_table_of_contractions_is_complete():
    assert CONTRACTION_MAP["they're"] == "they are"
    assert CONTRACTION_MAP["o'clock"] == "of the clock"
    assert all("'" in short and "'" not in long for short, long in CONTRACTION_MAP.items())


def test_texts_are_cleaned():
    cleaner = Cleaner()
    assert cleaner._remove_html_tags("<p>a&nbsp;b</p>&#12;c") == "abc"
    assert cleaner._remove_accented_characters("Déjà vu – ß") == "Deja vu  "
    assert cleaner._remove_punctuation("a,b.c-d!") == cleaner._remove_puncutation("a,b.c-d!") == "abcd"
    assert cleaner.get_word_token(["Ġgood", "bad"]) == ["good", "bad"]


def test_words_and_punctuation_marks_are_tokens():
    tokens = get_tokenizer("basic_english")('It\'s "good"; well: (very)!\tYes?<br />End. a,b')
    assert tokens == ["it", "'", "s", "good", "well", "(", "very", ")", "!", "yes", "?", "end", ".", "a", ",", "b"]


def test_other_tokenizers():
    assert get_tokenizer(None)("A  b,\nc") == ["A", "b,", "c"]
    assert get_tokenizer(list)("ab") == ["a", "b"]
    with pytest.raises(ValueError, match="expected 'basic_english'"):
        get_tokenizer("spacy")


def test_ngrams_follow_the_words():
    assert list(ngrams_iterator(["here", "we", "are"], 3)) == [
        "here", "we", "are", "here we", "we are", "here we are",
    ]  # fmt: skip
    assert list(ngrams_iterator(["here"], 2)) == ["here"]
