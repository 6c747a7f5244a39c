from __future__ import annotations

import json
import subprocess
import sys

import pytest

from penstock.torchserve.ts import MODULES

SURFACE = {
    "": ["__version__"],
    "context": ["Context", "RequestProcessor"],
    "handler_utils.distributed.deepspeed": ["create_checkpoints_json", "get_ds_engine"],
    "handler_utils.distributed.pt_pippy": ["get_pipeline_driver", "initialize_rpc_workers"],
    "handler_utils.hf_batch_streamer": ["TextIteratorStreamerBatch"],
    "handler_utils.micro_batching": ["MicroBatching"],
    "handler_utils.text_utils": ["get_tokenizer", "ngrams_iterator"],
    "handler_utils.timer": ["timed"],
    "handler_utils.utils": ["create_predict_response", "import_class", "send_intermediate_predict_response"],
    "launcher": ["register_model", "register_model_with_params", "start", "stop"],
    "metrics.caching_metric": ["CachingMetric"],
    "metrics.dimension": ["Dimension"],
    "metrics.metric": ["Metric"],
    "metrics.metric_abstract": ["MetricAbstract"],
    "metrics.metric_cache_abstract": ["MetricCacheAbstract"],
    "metrics.metric_cache_errors": [
        "GeneralMetricsCacheError",
        "MetricsCacheIOError",
        "MetricsCacheKeyError",
        "MetricsCachePyYamlError",
        "MetricsCacheTypeError",
        "MetricsCacheValueError",
    ],
    "metrics.metric_cache_yaml_impl": ["MetricsCacheYamlImpl"],
    "metrics.metric_encoder": ["MetricEncoder"],
    "metrics.metric_type_enum": ["MetricTypes"],
    "metrics.metrics_store": ["MetricsStore"],
    "metrics.unit": ["Units"],
    "model_loader": ["ModelLoaderFactory", "TsModelLoader"],
    "protocol.otf_message_handler": ["create_predict_response", "send_intermediate_predict_response"],
    "service": ["PREDICTION_METRIC", "Service", "emit_metrics"],
    "torch_handler.base_handler": [
        "BaseHandler",
        "IPEX_AVAILABLE",
        "ONNX_AVAILABLE",
        "PROFILER_AVAILABLE",
        "PT230_AVAILABLE",
        "PT2_AVAILABLE",
        "XLA_AVAILABLE",
        "setup_ort_session",
    ],
    "torch_handler.contractions": ["CONTRACTION_MAP"],
    "torch_handler.distributed.base_deepspeed_handler": ["BaseDeepSpeedHandler"],
    "torch_handler.distributed.base_pippy_handler": ["BasePippyHandler"],
    "torch_handler.image_classifier": ["ImageClassifier"],
    "torch_handler.image_segmenter": ["ImageSegmenter"],
    "torch_handler.object_detector": ["ObjectDetector"],
    "torch_handler.request_envelope.base": ["BaseEnvelope"],
    "torch_handler.request_envelope.body": ["BodyEnvelope"],
    "torch_handler.request_envelope.json": ["JSONEnvelope"],
    "torch_handler.request_envelope.kserve": ["KServeEnvelope"],
    "torch_handler.request_envelope.kservev2": ["KServev2Envelope"],
    "torch_handler.text_classifier": ["TextClassifier"],
    "torch_handler.text_handler": ["TextHandler"],
    "torch_handler.unit_tests.test_utils.mock_context": ["MockContext"],
    "torch_handler.unit_tests.test_utils.model_dir": ["copy_files"],
    "torch_handler.vision_handler": ["VisionHandler"],
    "utils.timeit_decorator": ["timeit"],
    "utils.util": [
        "CLEANUP_REGEX",
        "PT2Backend",
        "PredictionException",
        "check_valid_pt2_backend",
        "deprecated",
        "get_yaml_config",
        "list_classes_from_module",
        "load_label_mapping",
        "map_class_to_label",
    ],
    "version": ["__version__"],
}

IMPORTS = """
import importlib, json, sys
from penstock.torchserve.handlers.entry import make_ts_importable
from penstock.torchserve.ts import MODULES
make_ts_importable()
for name, members in json.loads(sys.argv[1]).items():
    module = importlib.import_module(f"ts.{name}".rstrip("."))
    ours = importlib.import_module(f"penstock.torchserve.ts.{MODULES.get(name, name)}".rstrip("."))
    assert module is ours, name
    for member in members:
        getattr(module, member)
print(" ".join(sorted({name.split(".")[0] for name in sys.modules})))
"""
NEEDS = ("image_", "object_", "text_classifier", "text_handler", "vision_", "hf_batch")  # torch, whatever they do


def loaded_by(surface: dict[str, list[str]]) -> set[str]:
    command = [sys.executable, "-W", "error", "-c", IMPORTS, json.dumps(surface)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_name_that_handlers_import_exists_once_under_both_paths():
    loaded = loaded_by(SURFACE)
    assert {"torch", "transformers"} <= loaded
    assert not loaded & {"captum", "onnxruntime"}


def test_the_table_of_import_paths_is_complete():
    assert set(SURFACE) == {"", *MODULES}
    packages = {path.partition(".")[0] for path in MODULES if "." in path}
    assert not packages & set(MODULES.values()), "importing ts.NAME would hide the module of that name"


def test_only_modules_that_are_useless_without_torch_load_it():
    light = {name: members for name, members in SURFACE.items() if not any(n in name for n in NEEDS)}
    assert not loaded_by(light) & {"torch", "PIL", "yaml", "transformers"}


def test_the_base_handler_alone_loads_no_numpy():
    assert "numpy" not in loaded_by({n: SURFACE[n] for n in ("context", "torch_handler.base_handler")})


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(AssertionError, match=r"No module named 'ts\.nothing'"):
        loaded_by({"nothing": []})
