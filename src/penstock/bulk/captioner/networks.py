"""The networks of `transformers` that caption: how each is loaded, prompted, and made to write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
import transformers
from msgspec import Struct

from penstock.bulk.captioner.feed import Looks
from penstock.bulk.captioner.files import Source
from penstock.bulk.captioner.greedy import is_plain, write
from penstock.errors import LoadFailed, describe

_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_KERNELS: Final = {2: "bilinear", 3: "bicubic"}  # by Pillow's numbers
_BUCKETS: Final = (1, 8, 32, 64)  # rows that a network is compiled for; batches are filled up to one of them

# Architectures that benchmarks fill with random weights, by name: https://huggingface.co/Salesforce/blip2-opt-2.7b
ARCHITECTURES: Final[dict[str, dict[str, Any]]] = {
    "blip2-opt-2.7b": {
        "model_type": "blip-2",
        "vision_config": {
            "hidden_size": 1408,
            "intermediate_size": 6144,
            "num_hidden_layers": 39,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 14,
        },
        "qformer_config": {"encoder_hidden_size": 1408},
        "text_config": {
            "model_type": "opt",
            "vocab_size": 50304,
            "hidden_size": 2560,
            "ffn_dim": 10240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "word_embed_proj_dim": 2560,
        },
        "num_query_tokens": 32,
        "image_token_index": 50265,
    }
}


class Prompt(Struct):
    """What a network is given besides the pixels: arguments of `generate` for one row, and how many tokens of its
    answer are no caption."""

    arguments: dict[str, list[int]]
    written: int
    greedy: list[int] = []  # where `captioner_greedy.write` can do it: the words behind the image


class Kind(Struct, frozen=True):
    """How a class of networks is used. `writer` is the path of the part whose settings say how it writes; `static`:
    it can write with a cache of fixed size, which compiling needs."""

    class_name: str
    prompt: Callable[[Any, Any, str], Prompt]
    writer: str = ""
    static: bool = True


def _blip2(config: Any, tokenizer: Any, prompt: str) -> Prompt:
    text = config.text_config
    words = tokenizer(prompt).input_ids if prompt else [text.bos_token_id]
    ids = [config.image_token_index] * config.num_query_tokens + words
    if config.use_decoder_only_language_model:
        return Prompt({"input_ids": ids}, len(ids), words if text.model_type == "opt" else [])
    return Prompt({"input_ids": ids} if prompt else {}, 1)


def _blip(config: Any, tokenizer: Any, prompt: str) -> Prompt:
    if not prompt:
        return Prompt({}, 1)
    ids = tokenizer(prompt).input_ids
    return Prompt({"input_ids": ids}, len(ids) - 1)  # the network drops the last one, which ends a text


def _encoder_decoder(config: Any, tokenizer: Any, prompt: str) -> Prompt:
    start = config.decoder_start_token_id
    start = config.decoder.bos_token_id if start is None else start
    ids = [start, *tokenizer(prompt, add_special_tokens=False).input_ids] if prompt else [start]
    return Prompt({"decoder_input_ids": ids}, len(ids))


KINDS: Final = {
    "blip-2": Kind("Blip2ForConditionalGeneration", _blip2, "language_model"),
    "blip": Kind("BlipForConditionalGeneration", _blip, "text_decoder", static=False),
    "vision-encoder-decoder": Kind("VisionEncoderDecoderModel", _encoder_decoder),
}


class Network:
    """A loaded network. Captions are greedy: the same pixels give the same caption."""

    def __init__(
        self,
        model: Any,
        kind: Kind,
        tokenizer: Any,
        looks: Looks,
        *,
        dtype: torch.dtype,
        prompt: str,
        tokens: tuple[int, int],
        compiled: bool,
    ) -> None:
        self.looks, self.dtype, self.device = looks, dtype, model.device
        self._model, self._tokenizer, self._compiled = model, tokenizer, compiled
        self._prompt = kind.prompt(model.config, tokenizer, prompt)
        writer = model.get_submodule(kind.writer) if kind.writer else model
        self._settings = _settings(writer.generation_config, *tokens, compiled)
        self._greedy = bool(self._prompt.greedy) and is_plain(self._settings)

    def tokens(self, pixels: torch.Tensor) -> list[list[int]]:
        """What it writes for each row of floats `[rows, 3, height, width]`, behind the prompt."""
        if not self._compiled:
            return self._written(pixels)
        found: list[list[int]] = []
        for part in torch.split(pixels, _BUCKETS[-1]):
            missing = next(size for size in _BUCKETS if size >= len(part)) - len(part)
            found += self._written(torch.cat([part, part[-1:].expand(missing, -1, -1, -1)]))[: len(part)]
        return found

    def compile(self) -> None:
        """Runs what is compiled at its first call, which takes longer than a batch may."""
        for rows in _BUCKETS:
            self.tokens(torch.zeros(rows, 3, self.looks.height, self.looks.width, dtype=self.dtype, device=self.device))

    def _written(self, pixels: torch.Tensor) -> list[list[int]]:
        with torch.inference_mode():
            if self._greedy:
                ends = _listed(self._settings.eos_token_id)
                return write(self._model, pixels, self._prompt.greedy, self._settings, ends).tolist()
            return self._generated(pixels).tolist()

    def _generated(self, pixels: torch.Tensor) -> torch.Tensor:
        arguments = {
            name: torch.tensor([ids], device=self.device).repeat(len(pixels), 1)
            for name, ids in self._prompt.arguments.items()
        }
        if "input_ids" in arguments:
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
        written: torch.Tensor = self._model.generate(pixel_values=pixels, generation_config=self._settings, **arguments)
        return written[:, self._prompt.written :]

    def texts(self, tokens: list[list[int]]) -> list[str]:
        """The captions in words."""
        if self._tokenizer is None:
            return [" ".join(map(str, ids)) for ids in tokens]
        return [text.strip() for text in self._tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def open_network(
    source: Source,
    device: str,
    *,
    precision: str = "fp32",
    prompt: str = "",
    tokens: tuple[int, int] = (0, 30),
    compiled: bool = False,
    random_weights: bool = False,
    trust: str = "none",
    threads: int = 0,
) -> Network:
    """The network in a folder, on its device, with a caption of at least and at most `tokens`.

    `random_weights` makes it of its configuration alone; then it may have no tokenizer, and captions are numbers.
    Raises LoadFailed.
    """
    if threads:
        torch.set_num_threads(threads)
    logging: Any = transformers.logging
    logging.disable_progress_bar()  # of the weights that are read: a worker's output is no terminal
    try:
        config = _config(source)
        kind = _kind(source, config, compiled)
        looks = _looks(source, config, needed=not random_weights)
        tokenizer = _tokenizer(source, needed=bool(prompt) or not random_weights)
        cls = getattr(transformers, kind.class_name)
        dtype = _DTYPES[precision]
        model = _random(cls, config, device, dtype) if random_weights else _weights(cls, source, dtype, trust)
    except LoadFailed:
        raise
    except Exception as e:  # of files of anybody's making
        raise LoadFailed(f"model: {source.name} cannot be loaded: {describe(e)}") from e
    model = model.to(device).train(False).requires_grad_(False)
    network = Network(model, kind, tokenizer, looks, dtype=dtype, prompt=prompt, tokens=tokens, compiled=compiled)
    if compiled and network.device.type == "cuda":
        network.compile()
    return network


# ---- parts of a folder


def _config(source: Source) -> Any:
    if source.folder is None:
        found = copy.deepcopy(ARCHITECTURES[source.name])
        return transformers.AutoConfig.for_model(found.pop("model_type"), **found)
    return transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True)


def _kind(source: Source, config: Any, compiled: bool) -> Kind:
    kind = KINDS.get(config.model_type)
    if kind is None:
        raise LoadFailed(
            f"model: {source.name} is of the type '{config.model_type}'; expected one of {', '.join(KINDS)}"
        )
    if compiled and not kind.static:
        raise LoadFailed(f"model: {source.name} is of the type '{config.model_type}', which cannot be compiled")
    return kind


def _weights(cls: Any, source: Source, dtype: torch.dtype, trust: str) -> Any:
    safe = any(source.folder.glob("*.safetensors")) if source.folder is not None else True
    return cls.from_pretrained(
        source.folder,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=safe or trust != "pickle",
        weights_only=True,
    )


def _random(cls: Any, config: Any, device: str, dtype: torch.dtype) -> Any:
    """Always the same weights on the same kind of device, made there: a processor would take minutes for billions."""
    torch.manual_seed(0)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype  # else of what the folder's weights are
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return cls(config)
    finally:
        torch.set_default_dtype(before)


def _tokenizer(source: Source, needed: bool) -> Any:
    if source.folder is not None and any(source.folder.glob("tokenizer*")):
        return transformers.AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    if needed:
        raise LoadFailed(f"model: {source.name} has no tokenizer")
    return None


def _looks(source: Source, config: Any, needed: bool) -> Looks:
    """What the preprocessor's file says. Where it is missing, and not `needed`, the network's own size is taken."""
    processors: Any = transformers.AutoImageProcessor
    try:
        found = None if source.folder is None else processors.from_pretrained(source.folder, local_files_only=True)
    except OSError:
        if needed:
            raise
        found = None
    if found is None:
        side = (getattr(config, "vision_config", None) or config.encoder).image_size
        return Looks(side, side, _CLIP_MEAN, _CLIP_STD, "bicubic")
    size = found.size
    if not size.get("height") or not size.get("width") or getattr(found, "do_center_crop", False):
        raise LoadFailed(f"model: {source.name} crops images; expected a preprocessor that resizes to height and width")
    kernel = _KERNELS.get(int(found.resample))
    if kernel is None:
        raise LoadFailed(f"model: the preprocessor of {source.name} resamples by {found.resample}; expected 2 or 3")
    return Looks(size["height"], size["width"], tuple(found.image_mean), tuple(found.image_std), kernel)


_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)


def _settings(own: Any, least: int, most: int, compiled: bool) -> Any:
    """How a network writes, as its files say, but greedily, and with a length of our own."""
    found = copy.deepcopy(own)
    found.update(
        do_sample=False, temperature=None, top_p=None, top_k=None, max_length=None, min_length=None,
        max_new_tokens=most, min_new_tokens=least or None,
    )  # fmt: skip
    if compiled:
        found.cache_implementation = "static"
    if found.pad_token_id is None:
        found.pad_token_id = next(iter(_listed(found.eos_token_id)), 0)
    return found


def _listed(ids: Any) -> list[int]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, (list, tuple)) else [ids]
