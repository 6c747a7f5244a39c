"""The metrics of `torchserve`: the page, the log files, and their configuration."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from penstock.torchserve import grpc as services
from support.dashboards import Dashboards
from support.waiting import wait_for

HANDLER = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
def handle(data, context):
    if data is None:
        context.metrics.add_counter("Loads", 1)
        return
    metrics = context.metrics
    metrics.add_counter("Faces", 3, 0, [Dimension("camera", "door")])
    metrics.add_time("Slow", 4.5, None, "s")
    metrics.add_error("Oops", 1)
    if bytes(data[0]["body"]) == b"bad":
        raise ValueError("no")
    return ["ok"] * len(data)
"""
FILE = """
dimensions:
  - &level "Level"
  - &hostname "Hostname"
ts_metrics:
  counter:
    - {name: Requests2XX, unit: Count, dimensions: [*level, *hostname]}
  histogram:
    - {name: QueueTime, unit: Milliseconds, dimensions: [*level, *hostname]}
model_metrics:
  counter:
    - {name: Faces, unit: faces, dimensions: ["camera", "ModelName", *level]}
"""
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - (\w+)\.(\w+):([0-9.e-]+)\|#([^|]*)\|#hostname:([^,]+),(.*)")


def begin(torchserve: Any, **keys: str) -> None:
    torchserve.add_model(HANDLER)
    torchserve.configure(disable_token_authorization="true", **keys)
    torchserve.start("--models", "m.mar")


def ask(torchserve: Any, path: str = "m", body: bytes = b"x") -> int:
    url = f"{torchserve.url()}/predictions/{path}"
    status: int = torchserve.fetch(url, body, Content_Type="application/octet-stream")[0]
    return status


def values(torchserve: Any, query: str = "") -> dict[str, float]:
    """The values on the page, by name and labels without the host."""
    status, body = torchserve.fetch(f"{torchserve.url('Metrics')}/metrics{query}")
    assert status == 200
    assert list(text_string_to_metric_families(body.decode())) or not body
    samples = (line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#"))
    return {re.sub(r',?([Hh]ostname="[^"]*")?,}', "}", name): float(value) for name, _, value in samples}


def logged(torchserve: Any, file: str, *wanted: str) -> list[tuple[str, ...]]:
    """(name, unit, value, dimensions, host, rest) of the lines of a log file, once it has these metrics."""
    path: Path = torchserve.folder / "logs" / f"{file}.log"
    end = time.monotonic() + 20
    while True:
        found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
        assert all(found), path.read_text()
        lines = [match.groups() for match in found if match]
        if set(wanted) <= {line[0] for line in lines} or time.monotonic() > end:
            return lines
        time.sleep(0.1)


def test_a_known_load_appears_on_the_page_and_in_both_files(torchserve: Any) -> None:
    begin(torchserve, model_metrics_auto_detect="true", metric_time_interval="3600")
    end, looks = time.monotonic() + 20, 1
    while (loads := values(torchserve, "?name[]=Loads")) == {} and time.monotonic() < end:
        time.sleep(0.1)
        looks += 1
    assert loads == {'Loads{ModelName="m",Level="Model"}': 1}  # before the first request
    statuses = [ask(torchserve), ask(torchserve), ask(torchserve, "m/1.0"), ask(torchserve, body=b"bad")]
    assert [*statuses, ask(torchserve, "nobody")] == [200, 200, 200, 503, 404]
    page = values(torchserve)
    assert page['Requests2XX{Level="Host"}'] == 3 + looks
    assert page['Requests4XX{Level="Host"}'] == 1
    assert page['Requests5XX{Level="Host"}'] == 1
    for version, requests in (("default", 3), ("1.0", 1)):
        labels = f'{{model_name="m",model_version="{version}"}}'
        assert page["ts_inference_requests_total" + labels] == requests
        assert 0 < page["ts_queue_latency_microseconds" + labels] < page["ts_inference_latency_microseconds" + labels]
    assert page['Faces{camera="door",ModelName="m",Level="Model"}'] == 12
    assert page['Slow{ModelName="m",Level="Model"}'] == 4.5
    assert page['PredictionTime{ModelName="m",Level="Model"}'] > 0
    assert 1 < page['WorkerLoadTime{WorkerName="W-9000-m_1.0",Level="Host"}'] < 60_000
    assert page['MemoryUsed{Level="Host"}'] > 10
    assert page['penstock_request_seconds_count{model="m",version="1.0"}'] == 4
    assert page['penstock_http_requests_total{status="5xx"}'] == 1

    models = logged(torchserve, "model_metrics", "Faces", "Oops", "PredictionTime")
    faces = [line for line in models if line[0] == "Faces"]
    assert [line[:4] for line in faces] == [("Faces", "Count", "3.0", "camera:door,ModelName:m,Level:Model")] * 4
    ids = [re.fullmatch(r"requestID:([0-9a-f-]{36}),timestamp:\d{10}", line[5]) for line in faces]
    assert len({match[1] for match in ids if match}) == 4
    (oops, *_) = [line for line in models if line[0] == "Oops"]
    assert oops[:4] == ("Oops", "unit", "1.0", "Level:Error")
    assert oops[5].startswith("requestID:null,timestamp:")
    assert len([line for line in models if line[:2] == ("PredictionTime", "ms")]) == 3

    server = logged(torchserve, "ts_metrics", "Requests5XX", "QueueTime", "WorkerThreadTime", "CPUUtilization")
    assert all(re.fullmatch(r"timestamp:\d{10}", line[5]) for line in server)
    total = sum(float(line[2]) for line in server if line[0] == "ts_inference_requests_total")
    assert total == 4
    assert ("DiskUtilization", "Percent", "Level:Host") in {(line[0], line[1], line[3]) for line in server}


CONSOLE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} \[INFO \] (\S+) (TS|MODEL)_METRICS - (\w+)\.\w+:[0-9.e-]+\|#.*hostname:.*"
)


def test_console_lines_have_the_form_that_scrapers_of_torchserve_read(torchserve: Any) -> None:
    """The requests of auto_benchmark.py, then what it and gen_metrics_json.py read from the lines."""
    torchserve.add_model(HANDLER)
    torchserve.configure(disable_token_authorization="true", enable_model_api="true", metric_time_interval="3600")
    torchserve.start()
    manage = torchserve.url("Management") + "/models"
    asked = "model_name=benchmark&url=m.mar&batch_delay=100&batch_size=8&initial_workers=1&synchronous=true"
    status, registered = torchserve.fetch(f"{manage}?{asked}", method="POST")
    assert (status, b"registered with 1 initial workers" in registered) == (200, True)
    assert [ask(torchserve, "benchmark") for _ in range(5)] == [200] * 5
    assert torchserve.fetch(f"{manage}/benchmark", method="DELETE")[0] == 200
    assert torchserve.run("torchserve", "--stop")[0] == 0
    shown = [line for line in torchserve.said().splitlines() if "_METRICS - " in line]
    assert all(CONSOLE.fullmatch(line) for line in shown), shown
    scraped: dict[str, list[float]] = {}
    for name in ("PredictionTime", "QueueTime", "WorkerThreadTime", "CPUUtilization", "MemoryUtilization"):
        found = [line for line in torchserve.said().splitlines() if name in line]
        scraped[name] = [float(line.split("|")[0].split(":")[3]) for line in found]
    assert {name: len(found) for name, found in scraped.items()} == {
        **dict.fromkeys(("PredictionTime", "QueueTime", "WorkerThreadTime"), 5),
        **dict.fromkeys(("CPUUtilization", "MemoryUtilization"), 1),
    }
    for line in shown:
        value, dimensions, origin = line.split("|")
        assert float(value.rpartition(" ")[2].split(":")[1]) >= 0
        assert all(len(pair.split(":")) == 2 for pair in dimensions.removeprefix("#").split(","))
        assert int(origin.rpartition(",")[2].split(":")[1]) > 1.7e9
    workers = {match[1] for line in shown if (match := CONSOLE.fullmatch(line)) and match[2] == "MODEL"}
    assert workers == {"W-9000-benchmark_1.0-stdout"}


def test_a_supervisor_that_never_reads_stdout_stops_neither_serving_nor_files_nor_the_end(torchserve: Any) -> None:
    torchserve.add_model(HANDLER)
    torchserve.configure(
        disable_token_authorization="true", access_log="true", inference_address=f"unix:{torchserve.folder}/i.sock"
    )
    read, write = os.pipe()
    command = [str(Path(sys.executable).with_name("torchserve")), "--start", "--foreground", "--models", "m.mar"]
    server = subprocess.Popen(command, cwd=torchserve.folder, env=torchserve.env, stdout=write)
    os.close(write)
    try:
        address = f"{torchserve.folder}/i.sock"
        wait_for(lambda: b"Healthy" in over_socket(address, b"GET /ping HTTP/1.1\r\nhost: a\r\n"))
        head = b"POST /predictions/m HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n"
        wait_for(lambda: b" 200 " in over_socket(address, head, b"x"))
        for _ in range(400):
            assert b" 200 " in over_socket(address, head, b"x")
        access = torchserve.folder / "logs" / "access_log.log"
        wait_for(lambda: access.read_text().count("POST /predictions/m") >= 401)
        wait_for(lambda: len(logged(torchserve, "model_metrics", "PredictionTime")) >= 401)
        began = time.monotonic()
        server.terminate()
        assert server.wait(30) == 0
        assert time.monotonic() - began < 15
        assert not (torchserve.folder / "tmp" / ".model_server.pid").exists()
        assert len(os.read(read, 2**20)) > 40_000, "the pipe was full"  # 64 KiB, less what pages leave free
    finally:
        server.kill()
        server.wait()
        os.close(read)


def over_socket(path: str, head: bytes, body: bytes = b"") -> bytes:
    """The answer to one request over a Unix socket; empty without a server."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:
            return b""
        connection.sendall(head + b"connection: close\r\n\r\n" + body)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_requests_over_grpc_count_too_and_the_metrics_of_dashboard_and_alerts_exist(torchserve: Any) -> None:
    begin(torchserve)
    request = services.message_class("org.pytorch.serve.grpc.inference.PredictionsRequest")
    asked = request(model_name="m", input={"body": b"x"})
    with grpc.insecure_channel(torchserve.url("Inference gRPC").removeprefix("grpc://")) as channel:
        call = channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")
        assert b"ok" in call(asked.SerializeToString(), timeout=60)
    page = values(torchserve)
    labels = '{model_name="m",model_version="default"}'
    assert page["ts_inference_requests_total" + labels] == 1
    assert page["ts_inference_latency_microseconds" + labels] > 0
    assert page['penstock_requests_total{model="m",version="1.0"}'] == 1

    assert [ask(torchserve), ask(torchserve, body=b"bad")] == [200, 503]
    text = torchserve.fetch(torchserve.url("Metrics") + "/metrics")[1].decode()
    missing = Dashboards("torchserve").unanswered(text)
    assert [query for query in missing if "HandlerTime" not in query] == []  # only BaseHandler has it


def test_a_metrics_file_determines_the_metrics(torchserve: Any) -> None:
    (torchserve.folder / "metrics.yaml").write_text(FILE)
    begin(torchserve, metrics_config="metrics.yaml", metrics_mode="prometheus")
    assert ask(torchserve) == 200
    page = values(torchserve)
    assert page['Faces{camera="door",ModelName="m",Level="Model"}'] == 3
    assert page['QueueTime_count{Level="Host"}'] == 1
    assert not any(re.match("Slow|Oops|PredictionTime|ts_inference|CPUUtilization|Requests4XX", name) for name in page)
    filtered = values(torchserve, "?name[]=Faces&name[]=QueueTime_sum")
    assert list(filtered) == ['QueueTime_sum{Level="Host"}', 'Faces{camera="door",ModelName="m",Level="Model"}']
    assert values(torchserve, "?name[]=Nobody") == {}
    torchserve.run("torchserve", "--stop")
    assert (logged(torchserve, "ts_metrics"), logged(torchserve, "model_metrics")) == ([], [])


def test_without_system_metrics_none_appear_and_the_rest_is_written_at_the_end(torchserve: Any) -> None:
    begin(torchserve, disable_system_metrics="true")
    assert ask(torchserve) == 200
    torchserve.run("torchserve", "--stop")
    torchserve.wait_for("Torchserve stopped.")
    server = {line[0] for line in logged(torchserve, "ts_metrics", "ts_inference_requests_total")}
    assert server == {
        "Requests2XX", "QueueTime", "WorkerLoadTime", "WorkerThreadTime", "ts_inference_requests_total",
        "ts_inference_latency_microseconds", "ts_queue_latency_microseconds",
    }  # fmt: skip
    assert [line[0] for line in logged(torchserve, "model_metrics")] == ["PredictionTime"]


def test_a_command_can_measure_the_machine(torchserve: Any) -> None:
    line = "CPUUtilization.Percent:77|#Level:Host|#hostname:h,1"
    (torchserve.folder / "collect.py").write_text(f"import sys\nprint({line!r} * (sys.argv[1] == '--all'))")
    begin(torchserve, system_metrics_cmd="collect.py --all")
    (found,) = [line for line in logged(torchserve, "ts_metrics", "CPUUtilization") if line[0] == "CPUUtilization"]
    assert found[1:4] == ("Percent", "77.0", "Level:Host")
    page = values(torchserve)
    assert page['CPUUtilization{Level="Host"}'] == 77
    assert 'MemoryUsed{Level="Host"}' not in page


def test_an_invalid_metrics_file_keeps_the_server_from_starting(torchserve: Any) -> None:
    (torchserve.folder / "metrics.yaml").write_text("model_metrics: {gauge: [{name: a}]}")
    (torchserve.folder / "store").mkdir()
    torchserve.configure(metrics_config="metrics.yaml")
    status, printed = torchserve.run("torchserve", "--start", "--foreground")
    assert status == 1
    assert "metrics.yaml: model_metrics.gauge[0]: found no unit" in printed
