"""What goes wrong with a cache of metrics."""

from __future__ import annotations


class GeneralMetricsCacheError(Exception):
    def __init__(self, message: object) -> None:
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(OSError):
    def __init__(self, message: object) -> None:
        super().__init__(f"Error reading file: {message}")


class MetricsCachePyYamlError(Exception):
    def __init__(self, message: object) -> None:
        super().__init__(f"Error parsing file: {message}")


class MetricsCacheTypeError(TypeError):
    """A name, unit or type of a metric is of the wrong type."""


class MetricsCacheValueError(ValueError):
    """A unit or section that cannot be."""


class MetricsCacheKeyError(KeyError):
    """No such metric, or no such key in a file of metrics."""
