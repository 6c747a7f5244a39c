"""Makes a small stand-in for Salesforce/blip2-opt-2.7b in the cache folder of the Hub's library.

    python stand_in.py FOLDER
    HF_HOME=FOLDER HF_HUB_OFFLINE=1 torchserve --start --ts-config config.properties

It has the same class and processor, but 60,000 random weights instead of 3.7 billion trained ones: its captions are
meaningless, take milliseconds, and depend on the frame.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

NAME = "Salesforce/blip2-opt-2.7b"
REVISION = "0" * 40
SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
WORDS = ["a", "the", "man", "woman", "dog", "red", "blue", "car", "street", "walks", "on", "in", "with", "night", "sea"]
WIDTH = 32
SIDE = 32  # pixels
QUERIES = 4


def make_model() -> Blip2ForConditionalGeneration:
    """The model with random weights, the same every time."""
    block = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**block, intermediate_size=2 * WIDTH, image_size=SIDE, patch_size=8).to_dict(),
        qformer_config=Blip2QFormerConfig(
            **block, intermediate_size=2 * WIDTH, vocab_size=8, encoder_hidden_size=WIDTH, cross_attention_frequency=1
        ).to_dict(),
        text_config=OPTConfig(
            **block,
            vocab_size=len(SPECIAL + WORDS),
            ffn_dim=2 * WIDTH,
            word_embed_proj_dim=WIDTH,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ).to_dict(),
        num_query_tokens=QUERIES,
        image_token_index=3,
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    for weights in model.parameters():
        if weights.dim() > 1:  # with the usual 0.02 the image would hardly matter
            torch.nn.init.normal_(weights, std=0.3)
    model.generation_config.suppress_tokens = [0, 1, 3]
    return model


def make_processor() -> Blip2Processor:
    """The processor that scales frames and decodes words."""
    words = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spelling = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )
    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return Blip2Processor(images, spelling, num_query_tokens=QUERIES)


def main(home: Path) -> None:
    """Writes the files to where `from_pretrained(NAME)` finds them with HF_HOME=home."""
    root = home / "hub" / f"models--{NAME.replace('/', '--')}"
    folder = root / "snapshots" / REVISION
    make_model().save_pretrained(folder)
    make_processor().save_pretrained(folder)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(REVISION)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
