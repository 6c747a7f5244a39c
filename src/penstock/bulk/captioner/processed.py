"""Networks whose own processor prepares their input: what AutoModelForImageTextToText of `transformers` loads.

The processor writes the text around an image once, at load: it is the same for every row, because all frames have one
size. A batch passes its image processor alone.
"""

from typing import Any, Final

import torch

from penstock.bulk.captioner.feed import ImageSpec
from penstock.bulk.captioner.networks import Network, NetworkKind, NetworkOptions, Prompt

SIDE: Final = 448  # of frames, for networks that take any size
INSTRUCTION: Final = "Describe this image in one sentence."  # of a chat, without a prompt
TASKS: Final = {"florence2": "<CAPTION>"}  # the prompts of networks that know tasks instead


class ProcessedNetwork(Network):
    """A network and its processor. `tokens` takes bytes, not floats: the processor normalises."""

    def __init__(self, model: Any, processor: Any, dtype: torch.dtype, options: NetworkOptions) -> None:
        images = processor.image_processor
        height, width = options.size or _size(images, model.config)
        spec = ImageSpec(height, width, (), (), "bicubic")
        # a frame has the size of the encoder's input, so tiles would only magnify it
        self._how = {"do_image_splitting": False} if hasattr(images, "do_image_splitting") else {}
        self._images = images
        instruction = options.prompt or TASKS.get(model.config.model_type, INSTRUCTION)
        blank = torch.zeros(height, width, 3, dtype=torch.uint8).numpy()
        found = processor(text=_text(processor, instruction), images=[blank], return_tensors="pt", **self._how)
        pixels = images([[blank]], return_tensors="pt", **self._how)
        self._names = [name for name in pixels if name in found]
        arguments = {name: value[0].tolist() for name, value in found.items() if name not in pixels}
        skipped = 1 if model.config.is_encoder_decoder else len(arguments["input_ids"])
        kind = NetworkKind("", lambda *_: Prompt(arguments, skipped))
        super().__init__(model, kind, processor.tokenizer, spec, dtype, options)
        self.instruction = instruction

    def images(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = pixels.permute(0, 2, 3, 1).cpu().numpy()
        found = self._images([[row] for row in rows], return_tensors="pt", **self._how)
        return {
            name: found[name].to(self.device, self.dtype if found[name].is_floating_point() else None)
            for name in self._names
        }


def _text(processor: Any, instruction: str) -> str:
    """The instruction in the processor's chat template, if it has one."""
    if not getattr(processor, "chat_template", None):
        return instruction
    content = [{"type": "image"}, {"type": "text", "text": instruction}]
    text: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return text


def _size(images: Any, config: Any) -> tuple[int, int]:
    """Height and width that the image processor, or else the encoder, takes."""
    size = images.size or {}
    if size.get("height") and size.get("width"):
        return int(size["height"]), int(size["width"])
    side = getattr(getattr(config, "vision_config", None), "image_size", None) or SIDE
    return int(side), int(side)
