"""The pixels of decoded frames: scaled, upright, RGB, written once into their place; or compressed as JPEG."""

import functools
import importlib
import io
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.bulk.types import Pixels
from penstock.bulk.video import VideoError, av_library
from penstock.plugins import optional_module

JPEG_QUALITY = 90
JPEG_SHARE = 8  # a JPEG of this quality takes far less than an eighth of its pixels
PQ, HLG = 16, 18  # transfer characteristics of HDR in ITU-T H.273
WHITE_NITS = 203  # diffuse white of HDR in ITU-R BT.2408
PEAK_NITS = 1000  # of HLG's nominal display, and of most PQ masters
HASH_LEVELS = 2  # of 255
SCENE_WIDTH = 256  # of PySceneDetect's automatic downscaling
SHORTEST_SCENE_S = 0.6  # the default of PySceneDetect's command
KNEE = 0.5  # of diffuse white: darker colours stay, brighter ones are compressed
LUMINANCE = np.array((0.2627, 0.6780, 0.0593), np.float32)  # of BT.2020's primaries
TO_BT709 = np.array(  # ITU-R BT.2087
    ((1.6605, -0.5876, -0.0728), (-0.1246, 1.1329, -0.0083), (-0.0182, -0.1006, 1.1187)), np.float32
)

Array = np.ndarray[Any, np.dtype[np.uint8]]


class FrameConverter:
    """Converts the frames of one video as `pixels` requires. Belongs to one thread; keeps the scaler between frames."""

    def __init__(self, pixels: Pixels) -> None:
        av = av_library()
        self.pixels = pixels
        self._reformatter = av.video.reformatter.VideoReformatter()
        self._area = av.video.reformatter.Interpolation.AREA
        self._exact = exact_kernel() if pixels.kernel == "exact" and pixels.mode != "source" else None
        self._rotation: int | None = None  # of the last frame
        self._orientation = 0, False  # from its display matrix

    def size(self, picture: Any) -> tuple[int, int]:
        """Height and width of the converted frame."""
        if self.pixels.height is not None and self.pixels.width is not None:
            return self.pixels.height, self.pixels.width
        height, width = picture.height, picture.width
        if self._oriented(picture)[0] % 2:
            height, width = width, height
        return within(self.pixels.max_pixels, height, width)

    def _oriented(self, picture: Any) -> tuple[int, bool]:
        """`orientation_of` a frame, which reads the matrix only when the rotation changes."""
        if picture.rotation != self._rotation:
            self._rotation, self._orientation = picture.rotation, orientation_of(picture)
        return self._orientation

    def ignores(self, picture: Any) -> str:
        """What sets a frame apart and is not taken care of, or ""."""
        if picture.color_trc in (PQ, HLG) and not self.pixels.tone_map:
            return "HDR: its colours are sent as they are stored, paler than they look; --tone-map converts them"
        if picture.interlaced_frame and not self.pixels.deinterlace:
            return "interlaced: moving edges are combs; --deinterlace sends one field of each frame"
        return ""

    def convert(self, picture: Any, into: Array) -> None:
        """Writes a frame to `into`, `[height, width, 3]` uint8. Raises VideoError if it cannot be converted."""
        turns, mirrored = self._oriented(picture)
        if self.pixels.deinterlace and picture.interlaced_frame:
            picture = _top_field(picture)
        height, width = into.shape[:2]
        if turns % 2:
            height, width = width, height
        if self._exact is None:
            upright = self._rgb(picture, width=width, height=height, interpolation=self._area)
        else:
            upright = self._exact(self._rgb(picture), height, width)
        if mirrored:
            upright = upright[:, ::-1]
        if turns:
            upright = np.rot90(upright, turns)
        np.copyto(into, upright)

    def _rgb(self, picture: Any, **how: Any) -> Array:
        """`[height, width, 3]` uint8."""
        if self.pixels.tone_map and picture.color_trc in (PQ, HLG):
            deep = _to_rgb(self._reformatter, picture, "rgb48le", **how)
            rows: Array = rgb_view(deep, 6).reshape(-1).view("<u2").reshape(deep.height, deep.width, 3)
            return tone_mapped(rows, picture.color_trc)
        return rgb_view(_to_rgb(self._reformatter, picture, **how))


def within(max_pixels: int | None, height: int, width: int) -> tuple[int, int]:
    """The size in the same proportions that has at most so many pixels, and no more than before."""
    if max_pixels is None or height * width <= max_pixels:
        return height, width
    scale = math.sqrt(max_pixels / (height * width))
    return max(1, int(height * scale)), max(1, int(width * scale))


class DifferenceHash:
    """The hash of a frame: 256 bits, whether a cell of a grid of 17 x 16 is clearly brighter than its right neighbour.

    Krawetz, "Kind of Like That", 2013. `HASH_LEVELS` keeps the bits of even areas at 0, whatever their noise.
    """

    def __init__(self) -> None:
        reformatter = av_library().video.reformatter
        self._reformatter = reformatter.VideoReformatter()
        self._grid = {"width": 17, "height": 16, "interpolation": reformatter.Interpolation.AREA}

    def __call__(self, picture: Any) -> int:
        cells = rgb_view(_to_rgb(self._reformatter, picture, "gray8", **self._grid), 1)[..., 0].astype(np.int16)
        return int.from_bytes(np.packbits(cells[:, :-1] - cells[:, 1:] > HASH_LEVELS))


class SceneStarts:
    """Finds the first frame of each scene: PySceneDetect's content detector, on small pictures."""

    def __init__(self, threshold: float) -> None:
        """Raises ConfigError without PySceneDetect."""
        found = optional_module("scenedetect", "--scene needs PySceneDetect", "scene")
        self._timecode, cuts = found.FrameTimecode, found.detector.FlashFilter.Mode.SUPPRESS
        self._detector = found.ContentDetector(threshold, min_scene_len=SHORTEST_SCENE_S, filter_mode=cuts)
        reformatter = av_library().video.reformatter
        self._reformatter, self._area = reformatter.VideoReformatter(), reformatter.Interpolation.AREA
        self._first = True

    def begins(self, picture: Any, time_s: float) -> bool:
        """Whether the next frame begins a scene, as the first one does. A new detector may begin with such a frame."""
        width = min(SCENE_WIDTH, picture.width)
        size = {"width": width, "height": max(1, width * picture.height // picture.width)}
        small = rgb_view(_to_rgb(self._reformatter, picture, "bgr24", interpolation=self._area, **size))
        cuts = self._detector.process_frame(self._timecode(float(time_s), fps=1000.0), small)
        first, self._first = self._first, False
        return first or bool(cuts)


def _to_rgb(reformatter: Any, picture: Any, form: str = "rgb24", **how: Any) -> Any:
    """The frame as rgb24 or another form. Raises VideoError."""
    try:
        return reformatter.reformat(picture, format=form, threads=1, **how)
    except (OSError, ValueError) as error:
        raise VideoError(f"its pixels ({picture.format.name}) cannot be converted: {error}") from error


def rgb_view(rgb: Any, pixel_bytes: int = 3) -> Array:
    """`[height, width, pixel_bytes]` uint8 over the memory of an RGB frame, without the padding of its rows."""
    plane = rgb.planes[0]
    rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: rgb.height, : rgb.width * pixel_bytes]
    return rows.reshape(rgb.height, rgb.width, pixel_bytes)


def _top_field(picture: Any) -> Any:
    """Every second row of a frame. A video's fields are moments apart, and its neighbours need not be decoded."""
    field = av_library().VideoFrame(picture.width, picture.height // 2, picture.format.name)
    for source, target in zip(picture.planes, field.planes, strict=True):
        rows, into = (np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size) for plane in (source, target))
        width = min(source.line_size, target.line_size)
        into[:, :width] = rows[::2][: len(into), :width]
    for name in ("colorspace", "color_range", "color_primaries", "color_trc"):
        setattr(field, name, getattr(picture, name))
    return field


@functools.cache
def _light(curve: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """`[65536]`: the light of each 16-bit signal, PQ in units of diffuse white, HLG of the scene's peak.

    From SMPTE ST 2084 and ITU-R BT.2100.
    """
    signal = np.linspace(0, 1, 65536)
    if curve == HLG:
        bright = (np.exp((signal - 0.55991073) / 0.17883277) + 0.28466892) / 12
        return np.where(signal <= 0.5, signal**2 / 3, bright).astype(np.float32)
    root = signal ** (1 / 78.84375)
    nits = 10_000 * (np.maximum(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)) ** (1 / 0.1593017578125)
    return (nits / WHITE_NITS).astype(np.float32)


def tone_mapped(rgb: np.ndarray[Any, Any], curve: int) -> Array:
    """BT.2020 of the curve PQ or HLG, `[height, width, 3]` uint16, as BT.709 uint8.

    Highlights up to `PEAK_NITS` are compressed as in Reinhard's extended operator, alike in all channels, so that hues
    stay.
    """
    light = _light(curve)[rgb]
    if curve == HLG:  # the display's own exponent, for PEAK_NITS
        light *= PEAK_NITS / WHITE_NITS * (light @ LUMINANCE)[..., None] ** 0.2
    light = np.maximum(light @ TO_BT709.T, 0)
    brightest = light.max(axis=-1, keepdims=True)
    over = np.maximum(brightest - KNEE, 0) / (1 - KNEE)
    most = (PEAK_NITS / WHITE_NITS - KNEE) / (1 - KNEE)
    shown = np.minimum(brightest, KNEE) + (1 - KNEE) * over * (1 + over / most**2) / (1 + over)
    light *= shown / np.maximum(brightest, 1e-6)
    signal: Array = np.rint(255 * np.minimum(light, 1) ** (1 / 2.4)).astype(np.uint8)
    return signal  # for a display of ITU-R BT.1886


def orientation_of(picture: Any) -> tuple[int, bool]:
    """How to make a frame upright: quarter turns counter-clockwise, after mirroring it left to right or not.

    Reading side data ties a frame into a reference cycle, which would hold the decoder's memory until the garbage
    collector runs, possibly hours later. A tiny copy is read instead.
    """
    tiny = _to_rgb(av_library().video.reformatter.VideoReformatter(), picture, width=16, height=16)
    matrix = tiny.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0, False
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(matrix))
    mirrored = a * d - b * c < 0
    if mirrored:
        a, b = -a, -b
    return round(math.degrees(math.atan2(-b, a)) / 90) % 4, mirrored


def exact_kernel() -> Callable[[Array, int, int], Array]:
    """Antialiased bicubic scaling of RGB bytes, as Pillow does it. Needs torch, and runs in the calling thread."""
    torch = optional_module("torch", "the exact kernel needs torch (--kernel fast does not)", "torch")
    torch.set_num_threads(1)

    def scale(rgb: Array, height: int, width: int) -> Array:
        source = torch.from_numpy(rgb).permute(2, 0, 1)[None]
        scaled = torch.nn.functional.interpolate(source, (height, width), mode="bicubic", antialias=True)
        array: Array = scaled[0].permute(1, 2, 0).numpy()
        return array

    return scale


def jpeg_encoder() -> Callable[[Array], bytes]:
    """Encodes `[height, width, 3]` uint8 as JPEG, quality 90, 4:2:0, by simplejpeg or else Pillow."""
    try:
        simplejpeg: Any = importlib.import_module("simplejpeg")
    except ImportError:
        return _pillow_encoder()
    return functools.partial(simplejpeg.encode_jpeg, quality=JPEG_QUALITY, colorspace="RGB", colorsubsampling="420")


def _pillow_encoder() -> Callable[[Array], bytes]:
    image = optional_module("PIL.Image", "JPEG needs simplejpeg, other pixels do not", "image")

    def encode(rgb: Array) -> bytes:
        file = io.BytesIO()
        image.fromarray(rgb).save(file, "jpeg", quality=JPEG_QUALITY, subsampling="4:2:0")
        return file.getvalue()

    return encode
