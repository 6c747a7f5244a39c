"""service_streamer's names, answered by Penstock. See `penstock.compat.service_streamer`."""

from penstock.compat.service_streamer import __all__ as __all__
from penstock.compat.service_streamer import __getattr__ as __getattr__
