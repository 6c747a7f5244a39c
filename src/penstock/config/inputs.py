"""The inputs of a model in its configuration: texts such as "FP32[-1,4]", or tables, for images and padded texts."""

from collections.abc import Mapping
from typing import Final

from penstock.config.schema import InputConfig
from penstock.errors import ConfigError, nearest
from penstock.types import DTYPES, TensorSpec
from penstock.values import found

AXES: Final = {"NHWC": (0, 2, 3, 1), "NCHW": (0, 1, 2, 3)}  # where each axis of a layout is in NCHW
ANY_IMAGE: Final = (-1, -1, -1, -1)
_NUMERIC: Final = tuple(name for name in DTYPES if name not in ("BOOL", "BYTES"))
_LEAST, _MOST = 1.2e-38, 3.4e38  # of normal float32 numbers


def input_texts(inputs: Mapping[str, str | InputConfig], where: str) -> dict[str, str | TensorSpec]:
    """The inputs as texts, or as they are padded, see `tensor_specs`. `where` is their key, for messages.

    Raises ConfigError.
    """
    return {n: _declared(n, i, f"{where}.{n}") if isinstance(i, InputConfig) else i for n, i in inputs.items()}


def images_in(inputs: Mapping[str, str | InputConfig]) -> dict[str, InputConfig]:
    """The inputs that have a layout."""
    return {n: i for n, i in inputs.items() if isinstance(i, InputConfig) and i.layout is not None}


def _declared(name: str, table: InputConfig, where: str) -> str | TensorSpec:
    text = _text(table, where)
    if table.pad is None:
        return text
    if table.layout is not None:
        raise ConfigError(f"{where}.pad: found with layout, but images are not padded; keep one of them")
    return TensorSpec(name, str(table.datatype), table.shape or (), pad=table.pad)


def _text(table: InputConfig, where: str) -> str:
    normalised = next((key for key in ("mean", "std") if getattr(table, key) != getattr(InputConfig(), key)), None)
    image = table.layout is not None or normalised is not None
    if table.datatype not in (kinds := _NUMERIC if image else tuple(DTYPES)):
        hint = ", because layout, mean and std are for images" if image else nearest(table.datatype or "", kinds)
        raise ConfigError(f"{where}.datatype: found {found(table.datatype)}, expected {', '.join(kinds)}{hint}")
    shape = table.shape
    if shape is not None and (shape[:1] != (-1,) or min(shape) < -1):
        raise ConfigError(f"{where}.shape: found {list(shape)}, expected -1 for the rows, then sizes, or -1 for any")
    if table.layout is not None:
        shape = image_shape(table, where)
    elif normalised is not None:
        raise ConfigError(f'{where}.{normalised}: found without layout, expected layout = "NHWC" or "NCHW" beside it')
    elif shape is None:
        raise ConfigError(f"{where}.shape: found none, expected for instance [-1, 4], with -1 for the rows first")
    return f"{table.datatype}[{','.join(map(str, shape))}]"


def image_shape(table: InputConfig, where: str, network: tuple[int, ...] = ANY_IMAGE) -> tuple[int, ...]:
    """The shape of the image that clients send to a network that takes the shape `network`, in NCHW.

    Raises ConfigError for a shape, mean or std that does not fit.
    """
    assert table.layout is not None
    axes = AXES[table.layout]
    if table.shape is not None and len(table.shape) != len(axes):
        raise ConfigError(f"{where}.shape: found {list(table.shape)}, expected 4 sizes for the layout {table.layout}")
    if len(network) != len(axes):
        raise ConfigError(f"{where}.layout: found {table.layout}, but the network takes no images: {list(network)}")
    given, taken = table.shape or ANY_IMAGE, [network[axis] for axis in axes]
    sizes = [max(pair) for pair in zip(given, taken, strict=True)]
    if any(-1 < min(pair) < max(pair) for pair in zip(given, taken, strict=True)):
        raise ConfigError(
            f"{where}.shape: found {list(given)}, but the network takes {taken} in the layout {table.layout}"
        )
    channels = axes.index(1)
    for key in ("mean", "std"):
        numbers = per_channel(getattr(table, key))
        least = _LEAST if key == "std" else 0
        if not numbers or not all(least <= abs(number) <= _MOST for number in numbers):  # NaN fails, too
            raise ConfigError(
                f"{where}.{key}: found {list(numbers)}, expected numbers{', and none of 0' if least else ''}, in the"
                " units of the pixels (such as 0 to 255)"
            )
        if sizes[channels] == -1 and len(numbers) > 1:
            sizes[channels] = len(numbers)
        if len(numbers) not in (1, sizes[channels]):
            raise ConfigError(
                f"{where}.{key}: found {len(numbers)} numbers, expected one, or one for each channel of"
                f" {table.layout} {sizes}"
            )
    return tuple(sizes)


def per_channel(numbers: float | tuple[float, ...]) -> tuple[float, ...]:
    """The numbers of `mean` or `std`."""
    return numbers if isinstance(numbers, tuple) else (numbers,)
