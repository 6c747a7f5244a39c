from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_WORDS = ["a", "the", "man", "dog", "red", "blue", "car", "street", "walks", "on", "in", "with", "night", "sea", "sun"]
_SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
CAPTIONER_SIDE = 32


@pytest.fixture(scope="session")
def captioner_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small captioner ("blip-2", "blip", "vision-encoder-decoder"), untrained."""
    root = tmp_path_factory.mktemp("captioners")

    def make(kind: str) -> Path:
        folder = root / kind
        if not folder.is_dir():
            _write_captioner(kind, folder)
        return folder

    return make


def _write_captioner(kind: str, folder: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    transformers.logging.disable_progress_bar()
    words = {word: number for number, word in enumerate(_SPECIAL + _WORDS)}
    block = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**block, "intermediate_size": 64, "image_size": CAPTIONER_SIDE, "patch_size": 8}
    torch.manual_seed(0)
    if kind == "blip-2":
        config = transformers.Blip2Config(
            vision_config=vision,
            qformer_config={
                **block, "intermediate_size": 64, "vocab_size": 8, "encoder_hidden_size": 32,
                "cross_attention_frequency": 1,
            },
            text_config={
                "model_type": "opt", **block, **ends, "vocab_size": len(words), "ffn_dim": 64,
                "word_embed_proj_dim": 32, "max_position_embeddings": 64,
            },
            num_query_tokens=4,
            image_token_index=3,
        )  # fmt: skip
        model = transformers.Blip2ForConditionalGeneration(config)
    elif kind == "blip":
        text = {**block, **ends, "intermediate_size": 64, "vocab_size": len(words), "sep_token_id": 2}
        text |= {"encoder_hidden_size": 32, "max_position_embeddings": 64}
        config = transformers.BlipConfig(vision_config=vision, text_config=text, projection_dim=32)
        model = transformers.BlipForConditionalGeneration(config)
    else:
        decoder = transformers.GPT2Config(
            **ends, vocab_size=len(words), n_embd=32, n_layer=1, n_head=2, n_positions=64, is_decoder=True,
            add_cross_attention=True,
        )  # fmt: skip
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.ViTConfig(**vision), decoder, decoder_start_token_id=1, pad_token_id=0, eos_token_id=2
        )
        model = transformers.VisionEncoderDecoderModel(config)
    for weights in model.parameters():
        if weights.dim() > 1:  # with the usual 0.02 the image would hardly matter
            torch.nn.init.normal_(weights, std=0.3)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "blip":  # its tokenizer adds begin and end of text
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    spelling = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    spelling.save_pretrained(folder)
    BlipImageProcessorPil(size={"height": CAPTIONER_SIDE, "width": CAPTIONER_SIDE}).save_pretrained(folder)
