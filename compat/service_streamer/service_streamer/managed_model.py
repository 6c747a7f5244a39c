"""`service_streamer.managed_model`, for programs that import the module."""

from penstock import ManagedModel

__all__ = ["ManagedModel"]
