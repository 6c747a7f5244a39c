"""service_streamer's names, answered by Penstock. See `penstock.streamer.service_streamer`."""

from penstock.streamer.service_streamer import __all__ as __all__
from penstock.streamer.service_streamer import __getattr__ as __getattr__
