"""Decoding of images: DecodeMat, DecodeTensor, and the accuracy of JPEGs decoded at reduced size.

What a file becomes is stated in `penstock.images`. Both ops release the interpreter lock while they decode.
"""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct

from penstock.core.worker.devices import visible_gpus
from penstock.errors import ConfigError, DecodeError, describe, install_hint, out_of_memory
from penstock.images import JPEG, MAX_PIXELS, RGB, WHITE, Color, Decoder, decode_image, library, upright, whole_jpeg
from penstock.pipeline.ops.base import Array, Fields, ItemOp, found
from penstock.pipeline.ops.geometry import sized
from penstock.pipeline.ops.mat import DataFormat, cv2, tensor_of
from penstock.runtimes.torch_files import import_torch

log = logging.getLogger("penstock.pipeline")

BYTES = bytes | bytearray | memoryview


class DecodeMat(ItemOp):
    """The pixels of an encoded image: bytes -> uint8 `[height, width, 3]`, BGR; `color` = "bgr".

    The bytes determine the format: JPEG, PNG, WebP, AVIF, BMP, GIF or TIFF. The result is upright, whatever in the
    file says which way is up. It always has three channels of 8 bits: gray is repeated, what is not opaque is laid over
    `background`, deeper levels are cut to their upper 8 bits, floats from 0 to 1 are scaled, and CMYK is converted
    without a color profile. Animations give their first picture. Raises DecodeError, also for a truncated picture.

    - `decoder`: "auto", "opencv" or "simplejpeg" (for JPEG; "auto" uses simplejpeg if it is installed).
    - `scale_h`: decodes a JPEG at 1/2, 1/4 or 1/8 of its size if it stays at least this high and `scale_w` wide, for a
      resize that follows. Pixels differ; the difference is measured and logged at load.
    - `scale_w`: see `scale_h`.
    - `max_pixels`: a larger image is rejected by its header, before it is decoded.
    - `background`: the color behind what is not opaque, in red, green and blue from 0 to 255.
    """

    takes = "bytes"
    gives = "mat"
    writes: ClassVar[tuple[str, ...]] = ("color",)

    def __init__(
        self,
        decoder: Decoder = "auto",
        scale_h: int = 0,
        scale_w: int = 0,
        max_pixels: int = MAX_PIXELS,
        background: RGB = WHITE,
    ) -> None:
        if decoder == "simplejpeg" and library("simplejpeg") is None:
            raise ConfigError(
                f"decoder = 'simplejpeg', but it is not installed: {install_hint('image')}, or set decoder = 'auto'"
            )
        if (scale_h > 0) != (scale_w > 0):
            raise ConfigError(f"scale_h = {scale_h} and scale_w = {scale_w}: set both above 0, or neither")
        if max_pixels < 1:
            raise ConfigError(f"max_pixels = {max_pixels}, expected at least 1")
        if not all(0 <= level <= 255 for level in background):
            raise ConfigError(f"background = {list(background)}, expected levels from 0 to 255")
        self.color: Color = "bgr"
        self.decoder: Decoder = decoder
        self.max_pixels, self.background = max_pixels, background
        self.scale = (scale_h, scale_w) if scale_h > 0 else None

    def load(self, device: str) -> None:
        """Logs the accuracy of reduced decoding."""
        if note := self.note():
            log.info("scaled_decode %s", note)

    def note(self) -> str:
        """The measured accuracy of reduced decoding; "" if it is off."""
        if self.scale is None:
            return ""
        measured = accuracy(*self.scale, self.decoder)
        return (
            f"scale_h={self.scale[0]} scale_w={self.scale[1]}: pixels of the resized image differ from those of a full"
            f" decode by {measured.mean:.1f} of 255 on average, 99 % of them by at most {measured.within:.0f}"
        )

    def __call__(self, data: Any, fields: Fields) -> Any:
        mat = self.decode(data)
        fields["color"] = self.color
        return mat

    def decode(self, data: Any) -> Any:
        """The image in `self.color`. Raises DecodeError."""
        if not isinstance(data, BYTES):
            raise DecodeError(f"{type(self).__name__} found {found(data)}, expected the bytes of an encoded image")
        return decode_image(
            data,
            self.color,
            decoder=self.decoder,
            at_least=self.scale,
            max_pixels=self.max_pixels,
            background=self.background,
        )


class DecodeTensor(DecodeMat):
    """The pixels of an encoded image as a tensor: bytes -> uint8 `[1, 3, height, width]`; `color` is their order.

    In a node on a GPU, the result is a tensor of PyTorch there. nvJPEG decodes JPEGs, at full size, if torchvision or
    nvidia-nvimgcodec is installed; levels may differ by a few from those of the CPU. DecodeMat's decoders do the rest.

    - `color`: "rgb" or "bgr".
    - `data_format`: "nchw"; "nhwc" gives `[1, height, width, 3]`, "hwc" (TorchPipe's) the same without rows.
    """

    gives = "tensor"
    writes = ("color", "data_format")
    gpu = True

    def __init__(
        self,
        color: Color = "rgb",
        data_format: DataFormat = "nchw",
        decoder: Decoder = "auto",
        scale_h: int = 0,
        scale_w: int = 0,
        max_pixels: int = MAX_PIXELS,
        background: RGB = WHITE,
    ) -> None:
        super().__init__(decoder, scale_h, scale_w, max_pixels, background)
        self.color, self.data_format = color, data_format
        self._device: str | None = None
        self._decode_jpeg: JpegDecoder | None = None

    def load(self, device: str) -> None:
        """Raises LoadFailed on a GPU without PyTorch."""
        super().load(device)
        if device.startswith("cuda"):
            self._torch, self._device = import_torch(), device
            self._decode_jpeg = gpu_decoder(device)

    def note(self) -> str:
        """As DecodeMat; and whether a machine with a GPU has no decoder for it."""
        missing = visible_gpus() and not any(map(library, GPU_DECODERS))
        hint = f"JPEGs are decoded on the CPU; for the GPU, install one of {', '.join(GPU_DECODERS)}" if missing else ""
        return "; ".join(filter(None, (super().note(), hint)))

    def decode(self, data: Any) -> Any:
        """The image in `self.color`, on the device of the node. Raises DecodeError."""
        if self._device is None:
            return super().decode(data)
        if self._decode_jpeg is not None and isinstance(data, BYTES) and bytes(data[:2]) == JPEG:
            data = bytes(data)
            header = whole_jpeg(data, self.max_pixels)
            try:
                mat = upright(self._decode_jpeg(data), header.orientation)
                return mat if self.color == "rgb" else mat.flip(2)
            except RuntimeError as e:  # a kind of JPEG that it lacks, or one that the CPU cannot decode either
                if out_of_memory(e):
                    raise
        return self._torch.from_numpy(np.ascontiguousarray(super().decode(data))).to(self._device)

    def __call__(self, data: Any, fields: Fields) -> Any:
        mat = super().__call__(data, fields)
        fields["data_format"] = self.data_format
        return tensor_of(mat, self.data_format)


JpegDecoder = Callable[[bytes], Any]
"""Decodes a JPEG to a tensor `[height, width, 3]`, uint8, RGB, on its device, without applying an orientation. Raises
RuntimeError."""


def _torchvision(module: Any, torch: Any, device: str) -> JpegDecoder:
    def decode(data: bytes) -> Any:
        given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return module.decode_jpeg(given, mode=module.ImageReadMode.RGB, device=device).permute(1, 2, 0)

    return decode


def _nvimgcodec(module: Any, torch: Any, device: str) -> JpegDecoder:
    decoder = module.Decoder(device_id=int(device.partition(":")[2] or 0))
    params = module.DecodeParams(apply_exif_orientation=False, color_spec=module.ColorSpec.SRGB)

    def decode(data: bytes) -> Any:
        image = decoder.decode(data, params=params)
        if image is None:
            raise RuntimeError("nvImageCodec does not decode it")
        return torch.as_tensor(image, device=device)

    return decode


GPU_DECODERS: dict[str, Callable[[Any, Any, str], JpegDecoder]] = {
    "torchvision.io": _torchvision,
    "nvidia.nvimgcodec": _nvimgcodec,
}
"""What makes a decoder from a module, PyTorch, and a device. The first one that works is used."""


def gpu_decoder(device: str) -> JpegDecoder | None:
    """A decoder of a GPU that decodes a small JPEG; None without one."""
    jpeg = cv2.imencode(".jpg", picture(16, 16, 0))[1].tobytes()
    for name, make in GPU_DECODERS.items():
        if (module := library(name)) is None:
            continue
        try:
            decoder = make(module, import_torch(), device)
            decoder(jpeg)
        except Exception as e:  # of another version, or of one that was built without the GPU
            log.warning("gpu_decoder_fails module=%s device=%s reason=%s", name, device, describe(e))
        else:
            return decoder
    return None


# ---- the accuracy of reduced decoding, on generated pictures between a blurred photograph and a busy one

_SIZES = ((2.3, 2.7), (4.6, 4.2), (3.1, 8.9))  # height and width of the pictures, in multiples of the target size
_MOST_SIDE = 160  # larger pictures give the same result
_QUALITY = 90


class Accuracy(Struct, frozen=True):
    """Differences of the resized picture, in levels of 255: their mean, and the bound of 99 % of them."""

    mean: float
    within: float


@lru_cache(maxsize=64)
def accuracy(scale_h: int, scale_w: int, decoder: Decoder = "auto") -> Accuracy:
    """Compares pictures that are decoded in full and at reduced size, then resized to the target size."""
    height, width = min(scale_h, _MOST_SIDE), min(scale_w, _MOST_SIDE)
    decoders = (DecodeMat(decoder), DecodeMat(decoder, height, width))
    differences = []
    for seed, (more_h, more_w) in enumerate(_SIZES):
        image = picture(int(height * more_h), int(width * more_w), seed)
        _, jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        full, scaled = (sized(d.decode(jpeg.tobytes()), height, width).astype(np.int16) for d in decoders)
        differences.append(np.abs(full - scaled).ravel())
    levels = np.concatenate(differences)
    return Accuracy(float(levels.mean()), float(np.quantile(levels, 0.99)))


def picture(height: int, width: int, seed: int) -> Array:
    """A generated picture uint8 `[height, width, 3]`, the same for the same seed."""
    rng = np.random.default_rng(seed)
    levels = np.full((height, width, 3), 128, np.float32)
    size = max(height, width)
    while size >= 2:  # as in a photograph, smaller details have less contrast
        shape = (max(1, height // size), max(1, width // size), 3)
        noise = rng.normal(0, 30 * (size / max(height, width)) ** 0.5, shape).astype(np.float32)
        levels += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
        size //= 2
    for extent in rng.uniform(0.02, 0.3, 400):  # objects of all sizes
        corners = (rng.uniform(0, 1, 2) + rng.uniform(-extent, extent, (4, 2))) * (width, height)
        color = [float(level) for level in rng.uniform(0, 255, 3)]
        cv2.fillConvexPoly(levels, cv2.convexHull(corners.astype(np.int32)), color)
    levels += rng.normal(0, 5, levels.shape).astype(np.float32)  # sensor noise
    return levels.clip(0, 255).astype(np.uint8)
