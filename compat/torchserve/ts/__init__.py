"""Becomes `penstock.torchserve.ts` on import: the names, arguments and results of TorchServe 0.12.0."""

import sys

from penstock.torchserve import ts
from penstock.torchserve.handlers.entry import make_ts_importable

make_ts_importable()
sys.modules[__name__] = ts
