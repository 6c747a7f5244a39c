"""The release of TorchServe that handlers are told of."""

from penstock.torchserve.ts import __version__ as __version__
