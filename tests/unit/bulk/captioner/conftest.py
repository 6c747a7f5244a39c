from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_WORDS = ["a", "the", "man", "dog", "red", "blue", "car", "street", "walks", "on", "in", "with", "night", "sea", "sun"]
_SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
CAPTIONER_SIDE = 32


@pytest.fixture(scope="session")
def captioner_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small captioner ("blip-2", "blip", "git", "idefics3", "florence2" ...), untrained."""
    root = tmp_path_factory.mktemp("captioners")

    def make(kind: str) -> Path:
        folder = root / kind
        if not folder.is_dir():
            _write_captioner(kind, folder)
        return folder

    return make


BLOCK = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**BLOCK, "intermediate_size": 64, "image_size": CAPTIONER_SIDE, "patch_size": 8}
CHAT = """{% for m in messages %}User: {% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE{% else %} \
{{c['text']}}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %} Assistant:{% endif %}"""


def _write_processed(kind: str, folder: Path) -> None:
    """A captioner whose own processor prepares its input: the classes of SmolVLM, Qwen2-VL and Florence-2."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    transformers.logging.disable_progress_bar()
    named = {
        "idefics3": {
            "image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
        },
        "qwen2_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        "florence2": {"image_token": "<image>"},
    }[kind]  # fmt: skip
    extra = [*named.values(), "<|vision_start|>", "<|vision_end|>", "User:", "Assistant:"]
    words = {word: number for number, word in enumerate(dict.fromkeys([*_SPECIAL, *extra, *_WORDS]))}
    spelling = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    spelling.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=spelling, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=extra, extra_special_tokens=named,
    )  # fmt: skip
    text = {**BLOCK, **ENDS, "intermediate_size": 64, "vocab_size": len(words), "num_key_value_heads": 2}
    text["max_position_embeddings"] = 128
    square = {"height": CAPTIONER_SIDE, "width": CAPTIONER_SIDE}
    torch.manual_seed(0)
    if kind == "idefics3":
        longest = {"longest_edge": CAPTIONER_SIDE}
        chat = CHAT.replace("IMAGE", " <image> ")
        processor = transformers.Idefics3Processor(
            Idefics3ImageProcessorPil(size=longest, max_image_size=longest), tokenizer, image_seq_len=4,
            chat_template=chat,
        )  # fmt: skip
        config = transformers.Idefics3Config(
            image_token_id=words["<image>"], pad_token_id=0, scale_factor=2, vision_config=VISION,
            text_config={"model_type": "llama", **text},
        )  # fmt: skip
        model = transformers.Idefics3ForConditionalGeneration(config)
    elif kind == "qwen2_vl":
        chat = CHAT.replace("IMAGE", " <|vision_start|> <|image_pad|> <|vision_end|> ")
        processor = transformers.Qwen2VLProcessor(
            Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 64), tokenizer, chat_template=chat
        )
        config = transformers.Qwen2VLConfig(
            image_token_id=words["<|image_pad|>"], video_token_id=words["<|video_pad|>"],
            vision_start_token_id=words["<|vision_start|>"], vision_end_token_id=words["<|vision_end|>"],
            vision_config={
                "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14,
                "spatial_merge_size": 2, "temporal_patch_size": 2,
            },
            text_config={
                **text, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
        )  # fmt: skip
        model = transformers.Qwen2VLForConditionalGeneration(config)
    else:
        images = CLIPImageProcessorPil(size=square, crop_size=square, do_center_crop=False)
        images.image_seq_length = 17
        processor = transformers.Florence2Processor(images, tokenizer)
        config = transformers.Florence2Config(
            image_token_id=words["<image>"],
            vision_config={
                "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
                "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 2], "num_groups": [2, 2],
                "window_size": 4, "projection_dim": 32,
            },
            text_config={
                "model_type": "bart", **ENDS, "vocab_size": len(words), "d_model": 32, "encoder_layers": 1,
                "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128,
                "decoder_start_token_id": 2,
            },
        )  # fmt: skip
        model = transformers.Florence2ForConditionalGeneration(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _write_captioner(kind: str, folder: Path) -> None:
    if kind in ("idefics3", "qwen2_vl", "florence2"):
        _write_processed(kind, folder)
        return
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    transformers.logging.disable_progress_bar()
    words = {word: number for number, word in enumerate(_SPECIAL + _WORDS)}
    block, ends, vision = BLOCK, ENDS, VISION
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
    elif kind == "git":
        text = {**block, **ends, "intermediate_size": 64, "vocab_size": len(words), "max_position_embeddings": 64}
        model = transformers.GitForCausalLM(transformers.GitConfig(vision_config=vision, **text))
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
    square = {"height": CAPTIONER_SIDE, "width": CAPTIONER_SIDE}
    if kind == "git":
        CLIPImageProcessorPil(size={"shortest_edge": CAPTIONER_SIDE}, crop_size=square).save_pretrained(folder)
    else:
        BlipImageProcessorPil(size=square).save_pretrained(folder)
