"""All configuration keys with type, default and meaning. Frozen; `load.py` refuses unknown keys.

`docs/configuration.md` is generated from the meanings; a test keeps it up to date.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Meta, Struct, ValidationError, convert, field, to_builtins

from penstock.errors import ConfigError, nearest
from penstock.types import Task
from penstock.values import prepare

MOST: Final = 2**31 - 1  # of a count, and of seconds: the system's calls and TorchServe's clients take no more
MOST_INSTANCES: Final = 4096  # of one version, whatever `limits.max_instances` is
MOST_HELPERS: Final = 1024  # of one worker

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Instances = Annotated[int, Meta(ge=1, le=MOST_INSTANCES)]
Threads = Annotated[int, Meta(ge=1, le=4096)]
Helpers = Annotated[int, Meta(ge=0, le=MOST_HELPERS)]
Bytes = Annotated[int, Meta(ge=1, le=2**46)]  # half of what a process can address
Seconds = Annotated[float, Meta(gt=0, le=MOST)]
Hold = Annotated[float, Meta(ge=0, le=MOST)]
Amount = Annotated[float, Meta(ge=0, le=MOST)]
if TYPE_CHECKING:
    Target = Any
else:
    Target = str  # in a file; a program may give the class or function itself

PRECISIONS = ("fp32", "fp16", "bf16")  # of PyTorch and ONNX models
OPTIMIZATIONS = ("none", "graph", "optimize_for_inference", "compile")


def doc(text: str) -> Meta:
    """The meaning of a key, stored in its type."""
    return Meta(description=text)


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[server]`: addresses of the listeners."""

    host: Annotated[
        str, doc('address of the inference listener; "::" or "": all, IPv4 and IPv6; "unix:PATH": a Unix socket')
    ] = "127.0.0.1"
    port: Annotated[Port, doc("port of the inference listener; 0 selects a free one")] = 8080
    management: Annotated[bool, doc("allow routes that change models on the management listener")] = False
    management_host: Annotated[str, doc("address of the management listener")] = "127.0.0.1"
    management_port: Annotated[
        Port | None,
        doc("port of the management listener; 0 selects a free one; by default 8081 or, if in use, a free one"),
    ] = None
    metrics_host: Annotated[str, doc("address of the metrics listener")] = "127.0.0.1"
    metrics_port: Annotated[Port, doc("port of the metrics listener; 0 selects a free one")] = 8082
    dashboard: Annotated[bool, doc("show the dashboard at / of the metrics listener")] = True
    triton_metrics: Annotated[
        bool, doc("add Triton's metrics, such as nv_inference_count, to the page of the metrics listener")
    ] = False
    grpc_host: Annotated[str | None, doc("address of the gRPC listener, by default the inference listener's")] = None
    grpc_port: Annotated[
        Port | None,
        doc("port of the gRPC listener; 0: none; by default 8001 or, if in use, a free one; it needs the extra `grpc`"),
    ] = None
    thrift_host: Annotated[str, doc("address of the Thrift listener")] = "127.0.0.1"
    thrift_port: Annotated[
        Port | None, doc("port of the Thrift listener, which is off without it; 0 selects a free one")
    ] = None
    thrift_model: Annotated[str | None, doc("model that answers Thrift calls; by default the only model")] = None
    tls_cert: Annotated[str | None, doc("PEM file of the certificate chain, for every listener")] = None
    tls_key: Annotated[str | None, doc("PEM file of the private key")] = None
    tls_password_file: Annotated[str | None, doc("file whose first line is the password of an encrypted `tls_key`")] = (
        None
    )
    tls_client_ca: Annotated[str | None, doc("PEM file of the authority that must have issued client certificates")] = (
        None
    )
    platform: Annotated[
        Literal["none", "sagemaker", "vertex"],
        doc(
            'managed platform whose environment variables set the address and the routes: "sagemaker" or "vertex"; see'
            " deploy.md"
        ),
    ] = "none"
    model_store: Annotated[
        str | None,
        doc(
            "folder of the Python, model and pipeline files that the management listener may load; it may load only"
            " these and configured files"
        ),
    ] = None
    shared_memory: Annotated[
        bool, doc("let clients on this machine pass tensors in POSIX shared memory that they register")
    ] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        doc(
            "names of this server that a Host header may have, besides IP addresses, localhost and the machine's name;"
            ' "*.example.com" allows all names below, "*" all'
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        doc('origins of web pages that may send requests, such as "https://app.example.com"; "*" allows all'),
    ] = ()
    keep_going: Annotated[
        bool, doc("serve the other models if one does not load at the start; it is tried again and again")
    ] = False
    insecure: Annotated[bool, doc("allow a non-loopback address without a token or client certificates")] = False
    lame_duck_s: Annotated[
        Hold | None,
        doc(
            "time at shutdown in which the server reports that it is not ready and accepts connections as before; by"
            " default 0 if only this machine can connect, otherwise 5"
        ),
    ] = None
    drain_s: Annotated[Hold, doc("longest wait for running requests at shutdown, after `lame_duck_s`")] = 30.0


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[limits]`: bounds of sizes, times and counts."""

    max_body_bytes: Annotated[Bytes, doc("largest request body; a larger one is answered with 413")] = 64 * 2**20
    max_header_bytes: Annotated[Bytes, doc("largest request head; a larger one is answered with 431")] = 64 * 2**10
    max_connections: Annotated[
        Positive,
        doc("connections of each listener, beyond which it answers 503; the Thrift and gRPC listeners close them"),
    ] = 20_000
    max_pipelined: Annotated[Positive, doc("requests in flight on one connection; further ones are read later")] = 64
    header_timeout_s: Annotated[Seconds, doc("longest time for a request's head to arrive")] = 10.0
    body_timeout_s: Annotated[
        Seconds,
        doc(
            "longest time for a request's body to arrive. Over HTTP and gRPC, every 16 KiB that arrive give back a"
            " second: an upload at 16 KiB/s or more may take as long as it needs"
        ),
    ] = 30.0
    idle_timeout_s: Annotated[Seconds, doc("longest silence of a kept-alive connection")] = 75.0
    thrift_idle_timeout_s: Annotated[
        Seconds, doc("longest silence of a Thrift connection; Thrift clients do not reconnect by themselves")
    ] = 3600.0
    grpc_idle_timeout_s: Annotated[Seconds, doc("longest silence of a gRPC stream of requests")] = 3600.0
    write_timeout_s: Annotated[Seconds, doc("longest time in which a client accepts no byte of its response")] = 60.0
    write_buffer_bytes: Annotated[
        Bytes, doc("unsent bytes of one connection above which no request is read from it")
    ] = 2**20
    max_transit_bytes: Annotated[
        Bytes,
        doc("bytes that all clients of a listener may occupy while they send requests or read responses; then 503"),
    ] = 2**30
    pool_bytes: Annotated[Bytes, doc("shared memory for request payloads over 64 KiB")] = 256 * 2**20
    reply_bytes: Annotated[Bytes, doc("shared memory of each worker for responses over 64 KiB")] = 64 * 2**20
    max_instances: Annotated[Instances, doc("most instances of one version of a model")] = 64
    max_versions: Annotated[Positive, doc("most versions of all models together")] = 256
    max_queue_bytes: Annotated[Bytes, doc("bytes of payload that may wait in the queue of a model")] = 512 * 2**20


class AuthConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[auth]`: files with bearer tokens, one per line. Health routes need no token."""

    token_file: Annotated[str | None, doc("tokens that open every listener")] = None
    inference_token_file: Annotated[str | None, doc("tokens that open the inference listener")] = None
    management_token_file: Annotated[str | None, doc("tokens that open the management listener")] = None
    metrics_token_file: Annotated[str | None, doc("tokens that open the metrics listener")] = None


class LoggingConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[logging]`: the log of `penstock serve` and its workers."""

    level: Annotated[Literal["debug", "info", "warning", "error"], doc("least level of the lines")] = "info"
    format: Annotated[Literal["text", "json"], doc('"text": lines; "json": one object per record')] = "text"
    file: Annotated[str | None, doc("file to append to, by default stderr; it may be rotated by renaming it")] = None


class TracingConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[tracing]`: traces of requests and batches, for a collector of OpenTelemetry."""

    endpoint: Annotated[
        str | None,
        doc(
            "OTLP/HTTP address of the collector, such as http://127.0.0.1:4318/v1/traces; by default nothing is traced"
        ),
    ] = None
    ratio: Annotated[
        Annotated[float, Meta(ge=0, le=1)], doc("share of the requests that are traced, unless their caller decides")
    ] = 0.01
    max_per_s: Annotated[Seconds, doc("most requests that are traced in a second")] = 50.0
    service: Annotated[str, doc("service.name of the spans; the variable OTEL_SERVICE_NAME goes before")] = "penstock"


class BatchingConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME.batching]`: how requests are combined into batches."""

    policy: Annotated[str, doc('"adaptive", "fixed", "none", or "pkg.mod:Class"')] = "adaptive"
    options: Annotated[
        dict[str, Any], doc("arguments of your own policy class, such as delay_s = 0.02; built-in policies take none")
    ] = field(default_factory=dict)
    max_batch_size: Annotated[
        Positive | Literal["auto"],
        doc('most rows in a batch; "auto": the best of the warm-up, or 64 without one; out-of-memory lowers it'),
    ] = "auto"
    sizes: Annotated[
        tuple[Positive, ...] | Literal["any", "auto"] | None,
        doc(
            'sizes that batches have, such as [1, 8, 32]; others are padded to the next; "auto": powers of two up to'
            ' max_batch_size; "any": no padding; by default "auto" for model files and modules on CUDA, else "any"'
        ),
    ] = None
    max_hold_s: Annotated[
        Hold | Literal["auto"],
        doc('longest hold of a request while an instance is idle; "auto": learned; 0: never; "fixed": its delay'),
    ] = "auto"
    slo_s: Annotated[Seconds | None, doc("target latency of every request: its deadline is arrival + this")] = None
    timeout_s: Annotated[Seconds, doc("longest wait in the queue")] = 30.0
    max_queue: Annotated[
        Positive | None,
        doc("most rows in the queue; by default 16 x instances x max_batch_size, which counts as 64 with rows = none"),
    ] = None
    rows: Annotated[
        str,
        doc(
            'rows of a request: "auto" ("none" if the model file or the warm-up shows that axis 0 is not rows, else'
            ' "axis0"), "axis0" (Open Inference: axis 0 of the first input; otherwise 1), "none" (requests run one by'
            ' one, uncut; see batching.md) or "header:NAME"'
        ),
    ] = "auto"
    bucket: Annotated[
        str,
        doc(
            'property that requests of a batch must share: "none", "shape", "content-type" or "header:NAME"; with'
            ' "length", for texts that are padded, about the same length'
        ),
    ] = "none"
    max_tokens: Annotated[
        Positive | None,
        doc(
            "most tokens of a batch, padding included: rows x the longest one; for texts that are padded. By default"
            " max_batch_size alone is the limit; out-of-memory lowers it"
        ),
    ] = None
    priority: Annotated[
        tuple[Hold, ...], Meta(min_length=1), doc("extra seconds that requests of `x-priority` 0, 1, 2 ... may wait")
    ] = (0.0, 10.0, 20.0)
    retry_split: Annotated[bool, doc("re-run a batch that raised in halves, until the failing item is alone")] = True
    idempotent: Annotated[bool, doc("items may run again after an error or a worker's death")] = True
    run_timeout_s: Annotated[
        Seconds,
        doc("longest run of a batch, or of a step of a step model; then the worker logs its stacks and is killed"),
    ] = 60.0
    concurrency: Annotated[
        Positive | Literal["auto"],
        doc(
            "most rows in progress on an instance whose batches run side by side: coroutines overlap, generators"
            ' advance in turn; "auto": 256 if `predict` is async, else 1, one batch after the other'
        ),
    ] = "auto"
    mode: Annotated[
        Literal["auto", "batch", "continuous"],
        doc(
            'of a step model: "auto" and "continuous" admit requests at every step, "batch" runs each batch to its end'
        ),
    ] = "auto"
    max_active: Annotated[
        Positive | None,
        doc("most active items of each instance of a step model, by default its attribute `max_active`, or 32"),
    ] = None
    max_steps: Annotated[Positive, doc("most steps of one item of a step model; then it fails")] = 100_000
    max_sequences: Annotated[
        Count, doc("most sequences in progress on each instance; 0: requests are independent of each other")
    ] = 0
    sequence_idle_s: Annotated[Seconds, doc("a sequence without requests for this time ends")] = 60.0
    sequence_timeout_s: Annotated[
        Seconds | None, doc("longest time between the first request of a sequence and the arrival of its last one")
    ] = None
    sequence_backlog: Annotated[
        Positive, doc("most requests of a sequence that may wait behind the one that waits first, or runs")
    ] = 16


class RestartConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME.restart]`: what follows the death of a worker."""

    deaths: Annotated[
        Positive,
        doc(
            "how many deaths of an instance in `window_s` are followed by a restart at once; after more it waits 0.1 s,"
            " 0.2 s ... up to the time of a load, at most 1 s"
        ),
    ] = 30
    window_s: Annotated[Seconds, doc("time in which `deaths` are counted")] = 60.0
    quarantine_s: Annotated[
        Hold, doc("how long the body of a request that killed two workers is refused with 422; 0: never")
    ] = 300.0


class AutoscaleConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME.autoscale]`: with `max`, the number of instances follows the load."""

    min: Annotated[Instances, doc("fewest instances; the number that starts")] = 1
    max: Annotated[Instances | None, doc("most instances; without it their number is fixed")] = None
    slo_s: Annotated[
        Seconds | None,
        doc("latency, with the run, that instances are started for; by default `batching.slo_s`, else 1 s"),
    ] = None
    target_wait_s: Annotated[Seconds | None, doc("instead of `slo_s`: longest wait in the queue, without the run")] = (
        None
    )
    idle_s: Annotated[Seconds, doc("quiet window: an instance leaves after this time in which it was not needed")] = (
        30.0
    )
    scale_to_zero: Annotated[
        bool, doc("after `idle_s` without a request no instance is left; the next request starts one and waits for it")
    ] = False
    spare: Annotated[Count, doc("instances that are kept ready above the need, for steps of the load")] = 0
    headroom: Annotated[Amount, doc("share by which the load may be larger than predicted, such as 0.25")] = 0.0
    schedule: Annotated[
        dict[str, Count],
        doc('least instances from a time of day on, every day, such as {"07:30" = 4, "19:00" = 0}; 0 leaves `min`'),
    ] = field(default_factory=dict)
    timezone: Annotated[
        str | None, doc('zone of the times in `schedule`, such as "Europe/Berlin"; by default the local time')
    ] = None


REMOTE = ("ray",)  # transports whose workers run on other machines, with devices of their own


class RayConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME.ray]`: the place of each instance on a Ray cluster, with `transport = "ray"`."""

    address: Annotated[
        str,
        doc(
            'head of the cluster, such as "10.0.0.1:6379"; by default RAY_ADDRESS, else the cluster that runs on this'
            " machine"
        ),
    ] = ""
    num_cpus: Annotated[Amount, doc("CPUs that Ray reserves for an instance, and its threads without `threads`")] = 1.0
    num_gpus: Annotated[
        Amount | None, doc("GPUs that Ray reserves for an instance, also a part of one; by default 1 on cuda, else 0")
    ] = None
    resources: Annotated[dict[str, Amount], doc("resources of your own that a node must have, such as {a100 = 1}")] = (
        field(default_factory=dict)
    )
    placement_timeout_s: Annotated[
        Seconds, doc("longest wait for a node with these resources; then the load fails and is tried again")
    ] = 60.0


class ResidencyConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME.residency]`: memory, for a model on a device with a budget in `[devices]`."""

    memory_bytes: Annotated[
        Bytes | None, doc("of one instance on its device; by default measured at the first load, on the CPU only")
    ] = None
    keep_alive_s: Annotated[
        Seconds | None,
        doc("the model leaves after this time without a request; by default only when another one needs its memory"),
    ] = None
    pinned: Annotated[bool, doc("the model is loaded at the start and never leaves")] = False


class InputConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME.inputs.INPUT]`: an input as a table, instead of "FP32[-1,4]"; images and padded texts need one."""

    datatype: Annotated[str | None, doc('datatype that clients send, such as "UINT8"; required')] = None
    shape: Annotated[
        tuple[int, ...] | None,
        doc("shape that clients send, such as [-1, 224, 224, 3]; by default what the file declares, or any image"),
    ] = None
    layout: Annotated[
        Literal["NHWC", "NCHW"] | None,
        doc(
            "axes of an image that clients send: rows, height, width and channels. The network receives NCHW floats,"
            " which are computed on its device; see models.md"
        ),
    ] = None
    mean: Annotated[
        float | tuple[float, ...], doc("subtracted from the pixels: a number for each channel, or one for all")
    ] = 0.0
    std: Annotated[float | tuple[float, ...], doc("the divisor of the pixels after that")] = 1.0
    pad: Annotated[
        bool | int | float | str | None,
        doc(
            "value that fills up the free axis of a text, such as 0, so that requests of different lengths share a"
            " batch; see models.md"
        ),
    ] = None


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME]`: one model."""

    target: Annotated[
        Target,
        doc(
            "model to load: app.py:Model, pkg.mod:Model, a file .onnx, .pt, .pth, .pt2, .ts (see models.md), or the"
            " .toml of a pipeline (see pipelines.md)"
        ),
    ]
    options: Annotated[
        dict[str, Any], doc("arguments of the class that `target` names, such as max_new_tokens = 12")
    ] = field(default_factory=dict)
    task: Annotated[
        Task | None,
        doc(
            'what the model is for, by default its attribute `task`: "text-generation" and "embedding" models answer'
            " OpenAI-style routes too (see openai.md)"
        ),
    ] = None
    requirements: Annotated[
        str | None,
        doc("requirements file of packages that only this model's workers get; installed once, see models.md"),
    ] = None
    python: Annotated[
        str | None, doc("interpreter of the workers, in an environment of its own that has the same Penstock")
    ] = None
    weights: Annotated[
        str | None, doc("state dict file, also .safetensors, for a target that is a subclass of torch.nn.Module")
    ] = None
    inputs: Annotated[
        dict[str, str | InputConfig],
        doc(
            'inputs of a Python or PyTorch model that does not declare them, in order: x = "FP32[-1,3,224,224]"; images'
            " for a model file or module are tables, see `[models.NAME.inputs.INPUT]`"
        ),
    ] = field(default_factory=dict)
    outputs: Annotated[
        dict[str, str], doc('outputs of a Python model that does not declare them, in order: y = "FP32[-1,10]"')
    ] = field(default_factory=dict)
    strict_parameters: Annotated[
        bool, doc("refuse Open Inference requests with a parameter that nothing reads, which is otherwise ignored")
    ] = False
    typed_contents: Annotated[
        bool,
        doc("answer gRPC requests whose inputs are typed contents with such outputs; without it all outputs are raw"),
    ] = False
    labels: Annotated[
        dict[str, str],
        doc('files with a name for each class of an output, one a line: y = "labels.txt"; see open-inference.md'),
    ] = field(default_factory=dict)
    strict_json: Annotated[
        bool, doc("fail requests on `/v2` that ask for NaN or infinity in JSON, which has none; Triton writes them")
    ] = False
    name: Annotated[str | None, doc("name of the model, by default NAME; versions of one model share it")] = None
    version: Annotated[str, doc("version of the model")] = "1"
    traffic: Annotated[
        dict[str, float],
        doc("share of each version in the requests that name no version; by default one gets all, see `default`"),
    ] = field(default_factory=dict)
    default: Annotated[
        bool, doc("requests that name no version go to this one; without it, to the newest version that is ready")
    ] = False
    instances: Annotated[
        Instances | Literal["auto"],
        doc('loaded copies; "auto": one per GPU, or physical cores / 2 on the CPU, with one thread each'),
    ] = 1
    devices: Annotated[tuple[str, ...], doc("devices for the instances in turn; cuda: all GPUs")] = ("cpu",)
    transport: Annotated[str, doc('"process", "thread" or "inline"; "ray": actors on a cluster (see ray.md)')] = (
        "process"
    )
    load_timeout_s: Annotated[
        Seconds,
        doc("longest load of an instance; then the worker logs its stacks and is killed, and another one starts"),
    ] = 600.0
    max_requests: Annotated[
        Positive | None, doc("requests after which a new worker replaces a worker process, without losing a request")
    ] = None
    max_memory_bytes: Annotated[
        Bytes | None, doc("resident memory above which a new worker replaces a worker process")
    ] = None
    precision: Annotated[
        str | None, doc("of PyTorch and ONNX models: fp32, fp16 or bf16; other models receive it in `load`")
    ] = None
    optimize: Annotated[
        str | None,
        doc(
            "of PyTorch and ONNX models: none, graph, optimize_for_inference or compile; by default graph for model"
            " files and modules of PyTorch on CUDA, else none; other models receive it in `load`"
        ),
    ] = None
    threads: Annotated[
        Threads | None, doc("threads of numeric libraries in each worker; by default physical cores / instances")
    ] = None
    preprocess_processes: Annotated[
        Helpers,
        doc(
            "helper processes of each worker that run `preprocess` of a Python class; 0: the worker runs it itself (see"
            " models.md)"
        ),
    ] = 0
    trust: Annotated[Literal["none", "pickle"], doc('"pickle" allows a model file to run code when it is loaded')] = (
        "none"
    )
    env: Annotated[dict[str, str], doc("environment variables of the workers, such as a PYTHONPATH of their own")] = (
        field(default_factory=dict)
    )
    batching: Annotated[BatchingConfig, doc("see `[models.NAME.batching]`")] = field(default_factory=BatchingConfig)
    restart: Annotated[RestartConfig, doc("see `[models.NAME.restart]`")] = field(default_factory=RestartConfig)
    autoscale: Annotated[AutoscaleConfig, doc("see `[models.NAME.autoscale]`")] = field(default_factory=AutoscaleConfig)
    residency: Annotated[ResidencyConfig, doc("see `[models.NAME.residency]`")] = field(default_factory=ResidencyConfig)
    ray: Annotated[RayConfig, doc("see `[models.NAME.ray]`")] = field(default_factory=RayConfig)


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of a `penstock.toml`."""

    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    devices: dict[str, int | str] = field(default_factory=dict)  # budgets, such as "40GiB"
    models: dict[str, ModelConfig] = field(default_factory=dict)


SECTIONS: dict[str, Any] = {
    "server": ServerConfig,
    "limits": LimitsConfig,
    "auth": AuthConfig,
    "logging": LoggingConfig,
    "tracing": TracingConfig,
    "models.NAME": ModelConfig,
    "models.NAME.inputs.INPUT": InputConfig,
    "models.NAME.batching": BatchingConfig,
    "models.NAME.restart": RestartConfig,
    "models.NAME.autoscale": AutoscaleConfig,
    "models.NAME.residency": ResidencyConfig,
    "models.NAME.ray": RayConfig,
}


def with_options(config: BatchingConfig, options: dict[str, Any]) -> BatchingConfig:
    """`config` with the options of `@penstock.model` for the keys that have their default value.

    Raises ConfigError for an unknown option, an invalid value, or sizes that contradict other keys.
    """
    default = BatchingConfig()
    for key in options:
        if key not in BatchingConfig.__struct_fields__:
            hint = nearest(key, BatchingConfig.__struct_fields__)
            raise ConfigError(f"@penstock.model has no option '{key}'{hint}")
    chosen = {k: v for k, v in options.items() if getattr(config, k) == getattr(default, k)}
    try:
        merged = convert({**to_builtins(config), **chosen}, BatchingConfig)
    except ValidationError as e:
        raise ConfigError(f"@penstock.model: {e}") from None
    check_sizes(merged)
    return merged


def check_lengths(config: BatchingConfig) -> None:
    """Raises ConfigError for a loaded model that has `max_tokens`, but no lengths."""
    if config.max_tokens is not None and config.bucket != "length":
        raise ConfigError(
            f'batching.max_tokens: found {config.max_tokens} with bucket = "{config.bucket}", but only texts that are'
            ' padded have tokens: give these inputs a value to pad with, or set bucket = "length" if predict pads its'
            " items, or leave max_tokens out"
        )


def check_sizes(config: BatchingConfig, where: str = "batching.") -> None:
    """Raises ConfigError for a list of sizes that is no ladder, and for sizes of a model without batches to pad."""
    sizes = config.sizes
    if sizes is None or sizes == "any":
        return
    for key, plain in (("max_sequences", (0,)), ("mode", ("auto", "batch")), ("concurrency", ("auto", 1))):
        if (other := getattr(config, key)) not in plain:
            raise ConfigError(
                f"{where}sizes: found with {key} = {other}, whose batches cannot be padded; keep one of them"
            )
    if isinstance(sizes, str):
        return
    shown, most = f"[{', '.join(map(str, sizes))}]", config.max_batch_size
    whole = all(type(size) is int and size > 0 for size in sizes)  # a caller in Python skips the schema
    if not sizes or not whole or any(size >= after for size, after in pairwise(sizes)):
        raise ConfigError(
            f"{where}sizes: found {shown}, expected ascending whole numbers from 1, each once, such as [1, 8, 32], or"
            ' "auto" or "any"'
        )
    if config.rows == "none":
        raise ConfigError(f'{where}sizes: found {shown} with rows = "none", which runs one request at a time; keep one')
    if most not in ("auto", sizes[-1]):
        raise ConfigError(
            f"{where}sizes: found {shown} with max_batch_size = {most}; the last size is the largest batch: end the"
            f" list with {most}, or leave max_batch_size out"
        )


prepare(BatchingConfig)
