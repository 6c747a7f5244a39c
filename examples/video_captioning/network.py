"""A BLIP-2 network of 0.77 million parameters: class, calls and files of the large one, for 64x64 pixels.

`new_network(seed)` is untrained, which suffices to test everything around it; the folder `captioner/` holds the
network that `train.py` trained.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

# Set before torch is imported: spinning idle OpenMP threads cost a small network more than its own work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from scenes import words
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
)

WEIGHTS = Path(__file__).parent / "captioner"
SIDE = 64
WIDTH = 96
HEADS = 4
QUERIES = 12
PAD, START, END, IMAGE = range(4)
VOCABULARY = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<image>", *words()])}
#: A caption has 15 words and an end token.
LONGEST = 20


def config() -> Blip2Config:
    """The sizes of every part; hidden sizes are 1/15 to 1/27 of the published checkpoints'."""
    vision = Blip2VisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=16,
    )
    between = Blip2QFormerConfig(
        vocab_size=8,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        encoder_hidden_size=WIDTH,
        cross_attention_frequency=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    language = OPTConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        ffn_dim=2 * WIDTH,
        num_attention_heads=HEADS,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    return Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=between.to_dict(),
        text_config=language.to_dict(),
        num_query_tokens=QUERIES,
        image_token_index=IMAGE,
    )


def new_network(seed: int = 0) -> Blip2ForConditionalGeneration:
    """An untrained network, always the same for a seed.

    The initial weights are larger than the library's 0.02, which is too small to start learning at this width. With
    such small position embeddings the network does not learn the shape's cell.
    """
    torch.manual_seed(seed)
    network = Blip2ForConditionalGeneration(config())
    for name, values in network.named_parameters():
        if "query_tokens" in name or ("position_embedding" in name and values.dim() == 3):
            torch.nn.init.normal_(values, std=0.5)
        elif "patch_embedding.weight" in name:
            torch.nn.init.normal_(values, std=values[0].numel() ** -0.5)
        elif values.dim() == 2 and "embed" not in name:
            torch.nn.init.xavier_uniform_(values)
    return network.eval()


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each of the 40 caption words; a prompt begins with `<s>`, as in training."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )


def save(network: Blip2ForConditionalGeneration, folder: Path) -> None:
    """Writes every file that `from_pretrained(folder)` of the model, tokenizer and processor reads."""
    network.generation_config.max_new_tokens = LONGEST
    network.save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
    preprocessor = {
        "image_processor_type": "BlipImageProcessor",
        "processor_class": "Blip2Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": SIDE, "width": SIDE},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": QUERIES}
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
