"""The library that TorchServe's handlers import as `ts`: the names, arguments and results of release 0.12.0.

`MODULES` maps TorchServe's import paths to the modules here. In workers they are importable as `ts...`, unless
TorchServe itself is installed. No module here has the name of one of TorchServe's packages, which an import of that
package would hide. Only the modules that are useless without torch load it.
"""

from importlib import import_module
from typing import Any

__version__ = "0.12.0"

MODULES = {
    "context": "context",
    "handler_utils.distributed.deepspeed": "distributed",
    "handler_utils.distributed.pt_pippy": "distributed",
    "handler_utils.hf_batch_streamer": "hf_batch_streamer",
    "handler_utils.micro_batching": "base_handler",
    "handler_utils.text_utils": "util",
    "handler_utils.timer": "util",
    "handler_utils.utils": "util",
    "launcher": "testing",
    "metrics.caching_metric": "metric_cache",
    "metrics.dimension": "metric_cache",
    "metrics.metric": "metric_cache",
    "metrics.metric_abstract": "metric_cache",
    "metrics.metric_cache_abstract": "metric_cache",
    "metrics.metric_cache_errors": "metric_cache",
    "metrics.metric_cache_yaml_impl": "metric_cache",
    "metrics.metric_encoder": "metric_cache",
    "metrics.metric_type_enum": "metric_cache",
    "metrics.metrics_store": "metric_cache",
    "metrics.unit": "metric_cache",
    "model_loader": "testing",
    "protocol.otf_message_handler": "util",
    "service": "testing",
    "torch_handler.base_handler": "base_handler",
    "torch_handler.contractions": "util",
    "torch_handler.distributed.base_deepspeed_handler": "distributed",
    "torch_handler.distributed.base_pippy_handler": "distributed",
    "torch_handler.image_classifier": "builtin",
    "torch_handler.image_segmenter": "builtin",
    "torch_handler.object_detector": "builtin",
    "torch_handler.request_envelope.base": "context",
    "torch_handler.request_envelope.body": "context",
    "torch_handler.request_envelope.json": "context",
    "torch_handler.request_envelope.kserve": "context",
    "torch_handler.request_envelope.kservev2": "context",
    "torch_handler.text_classifier": "builtin",
    "torch_handler.text_handler": "builtin",
    "torch_handler.unit_tests.test_utils.mock_context": "testing",
    "torch_handler.unit_tests.test_utils.model_dir": "testing",
    "torch_handler.vision_handler": "builtin",
    "utils.timeit_decorator": "util",
    "utils.util": "util",
    "version": "",
}


def __getattr__(name: str) -> Any:
    """The module of `from ts import name`, which Python looks up under this package's own name."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{MODULES[name]}".removesuffix("."))
