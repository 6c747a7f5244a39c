"""Images as bytes: clients send pixels, and the network receives floats `[rows, channels, height, width]`.

Pixels are a quarter of the floats in bodies, in shared memory and on the way to a device, and what a client has anyway.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct, structs

from penstock.config.inputs import AXES, image_shape, per_channel
from penstock.config.schema import InputConfig
from penstock.core.worker.tensor_model import Array, Arrays, Input, Program
from penstock.errors import ConfigError, nearest
from penstock.types import DTYPES

_FLOATS: Final = ("FP32", "FP16", "FP64")


class Normalization(Struct, frozen=True):
    """`(x - mean) * scale` in float32. Both arrays broadcast to the input's shape."""

    mean: Array
    scale: Array

    def write(self, pixels: Array, out: Array) -> None:
        """Writes the normalised pixels into floats of their shape, image by image."""
        for image, floats in zip(pixels, out, strict=True):  # it stays in the cache meanwhile
            np.copyto(floats, image, casting="unsafe")
            floats -= self.mean[0]
            floats *= self.scale[0]


class Image(Struct, frozen=True):
    """How an image input becomes what the network takes. `dtype`: of the network's input; `axes`: where each of its
    axes is in the pixels."""

    dtype: str
    axes: tuple[int, ...]
    normalization: Normalization

    def floats(self, pixels: Array) -> Array:
        """The network's input, in new memory."""
        pixels = pixels.transpose(self.axes)
        found = np.empty(pixels.shape, np.float32)
        self.normalization.write(pixels, found)
        return found.astype(self.dtype, copy=False)


def images_of(inputs: Sequence[Input], tables: Mapping[str, InputConfig]) -> tuple[tuple[Input, ...], dict[str, Image]]:
    """The inputs of a network as clients send them, and the images among them, which have tables.

    Raises ConfigError for a table that does not fit the network.
    """
    names = [i.name for i in inputs]
    for name in tables:
        if name not in names:
            known = f"{', '.join(names)}{nearest(name, names)}"
            raise ConfigError(f"inputs.{name}: the model has no such input; it has {known}")
    images, sent = {}, []
    for spec in inputs:
        table = tables.get(spec.name)
        if table is not None:
            where, datatype = f"inputs.{spec.name}", spec.datatype or "FP32"
            if datatype not in _FLOATS:
                raise ConfigError(
                    f"{where}.layout: images become floats, but the network takes {datatype}; leave it out"
                )
            shape = image_shape(table, where, *([] if spec.shape is None else [spec.shape]))
            axes = AXES[table.layout or "NCHW"]
            mean, std = (np.reshape(per_channel(n), (1, -1, 1, 1)) for n in (table.mean, table.std))
            normalization = Normalization(mean.astype(np.float32), (1 / std).astype(np.float32))
            images[spec.name] = Image(DTYPES[datatype], tuple(map(axes.index, range(4))), normalization)
            spec = structs.replace(spec, datatype=table.datatype, shape=shape, pixels=True)
        sent.append(spec)
    return tuple(sent), images


class ImageProgram:
    """A program that receives floats, for clients that send pixels. They are normalised on the CPU, in one pass."""

    def __init__(self, program: Program, tables: Mapping[str, InputConfig]) -> None:
        """Raises ConfigError."""
        self._program = program
        self.platform, self.outputs = program.platform, program.outputs
        self.rows, self.unbatched = program.rows, program.unbatched
        self.inputs, self._images = images_of(program.inputs, tables)

    def run(self, arrays: Arrays) -> Arrays:
        """Raises what the program raises."""
        images = self._images
        return self._program.run({n: images[n].floats(a) if n in images else a for n, a in arrays.items()})
