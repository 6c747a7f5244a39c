"""`penstock pipeline`: what it prints, and with what it ends."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.cli.serve import build_config
from penstock.cli.serve import config as config_verb
from penstock.config.load import describes_model
from penstock.config.targets import split_targets
from penstock.errors import ConfigError
from penstock.pipeline import cli
from penstock.pipeline.cli import PipelineCheck
from penstock.pipeline.load import load_graph

TOML = """\
[server]
port = 0

[decode]
backend = "DecodeMat"
instances = 2
next = "prep"

[prep]
ops = ["ResizeMat", "CvtColorMat", "Mat2Tensor"]
resize_h = 2
resize_w = 3
color = "rgb"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "p.toml").write_text(TOML)
    return tmp_path / "p.toml"


def said(*words: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    found = CliRunner().invoke(main, ["pipeline", *map(str, words)])
    return found.exit_code, found.stdout, found.stderr


def test_check_prints_nodes_and_edges(file: Path) -> None:
    status, out, _ = said("check", file)
    assert status == 0
    assert out == (
        "pipeline p: 2 nodes, from decode to prep\n"
        "\n"
        "node    ops                                instances  batch  wait  device\n"
        "------  ---------------------------------  ---------  -----  ----  ------\n"
        "decode  DecodeMat                          2          any    0 ms  cpu\n"
        "prep    ResizeMat(resize_h=2, resize_w=3)  1          any    0 ms  cpu\n"
        "        CvtColorMat(color=rgb)\n"
        "        Mat2Tensor\n"
        "\n"
        "caller -> decode: data (bytes)\n"
        "decode -> prep: data (mat), color\n"
        "prep -> caller: result (tensor)\n"
    )


def test_check_prints_the_notes_of_ops(file: Path, tmp_path: Path) -> None:
    text = TOML + 'next = "net"\n[net]\nbackend = "OnnxTensor"\nmodel = "net.onnx"\n'
    file.write_text(text.replace('"DecodeMat"', '"DecodeMat(scale_h=8,scale_w=8)"'))
    status, out, _ = said("check", file)
    assert status == 0
    assert f"[net] OnnxTensor: there is no file {tmp_path}/net.onnx" in out
    assert "[decode] scale_h=8 scale_w=8: pixels of the resized image differ" in out
    (tmp_path / "net.onnx").write_bytes(b"")
    assert "there is no file" not in said("check", file)[1]


def test_check_ends_with_2_for_a_wrong_file(file: Path) -> None:
    file.write_text(TOML.replace('"DecodeMat"', '"DecodMat"'))
    status, out, err = said("check", file)
    assert (status, out) == (2, "")
    assert err.startswith(f"penstock: {file}, line 5: [decode] backend: unknown op 'DecodMat'")
    file.write_text("[server]\nprot = 80\n[a]\n")
    assert said("check", file) == (2, "", f"penstock: {file}: server: unknown key 'prot'; did you mean 'port'?\n")


def test_check_ends_with_2_and_the_line_of_a_fan_out_that_could_never_run(file: Path) -> None:
    file.write_text('[a]\nops = ["DecodeMat"]\nnext = "b"\n[b]\neach = "boxes"\nbody = "c"\n[c]\n')
    status, out, problem = said("check", file)
    assert (status, out) == (2, "")
    assert problem == f"penstock: {file}, line 5: [b] each: there is no field 'boxes'; there are data, color, result\n"


def test_check_shows_what_cannot_run_yet(file: Path) -> None:
    file.write_text('[a]\nnext = "a2"\n[a2]\nfilter = "odd"\n')
    status, out, err = said("check", file)
    assert (status, err.startswith("penstock: p: [a2] filter 'odd' is unknown: ")) == (2, True)
    assert "a -> a2: data" in out


def test_check_warns_about_unknown_keys_in_the_dialect(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text(TOML + "odd = 1\n")
    assert said("check", file)[0] == 2
    assert said("check", file, "--compat", "torchpipe")[0] == 0
    assert "[prep] odd: unknown key, ignored" in caplog.text


def test_outputs_that_are_never_set_are_reported(file: Path) -> None:
    file.write_text('[pipeline]\noutputs = ["label"]\n' + TOML)
    assert "prep -> caller: label (never set: label)" in said("check", file)[1]


def test_convert_writes_native_keys(file: Path, tmp_path: Path) -> None:
    status, out, _ = said("convert", file)
    assert status == 0
    assert out.startswith("[server]\nport = 0\n\n[pipeline]\n")
    assert said("convert", file, "-o", tmp_path / "native.toml") == (0, "", "")
    assert (tmp_path / "native.toml").read_text() == out
    assert load_graph(tmp_path / "native.toml") == load_graph(file)


def test_convert_ends_with_2_where_it_cannot_write(file: Path, tmp_path: Path) -> None:
    status, _, err = said("convert", file, "-o", tmp_path / "none" / "native.toml")
    assert status == 2
    assert "cannot be written: No such file or directory" in err


def test_run_prints_a_line_for_each_file(file: Path, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), np.full((4, 6, 3), 9, np.uint8))
    (tmp_path / "b.png").write_bytes(b"no image")
    status, out, err = said("run", file, tmp_path / "a.png", tmp_path / "b.png", "--trace")
    good, bad = map(json.loads, out.splitlines())
    assert status == 1
    assert good["file"] == str(tmp_path / "a.png")
    assert good["result"] == {"shape": [1, 3, 2, 3], "dtype": "uint8", "argmax": 0, "max": 9.0}
    assert [hop["node"] for hop in good["trace"]] == ["decode", "prep"]
    lines = err.splitlines()
    tree = lines[lines.index(str(tmp_path / "a.png")) :][:3]
    assert [line.split("  ran ")[0] for line in tree[1:]] == ["└─ decode", "   └─ prep"]
    assert bad["error"]["code"] == "undecodable"
    assert bad["node"] == "decode"


def test_ops_are_listed_and_told() -> None:
    assert "\nResizeMat " in said("ops")[1]
    status, out, _ = said("ops", "resizemat")
    assert status == 0
    assert out.startswith("ResizeMat: mat -> mat\n")
    assert "resize_h = (must be set)   a whole number" in out
    assert said("ops", "ResizMat")[0] == 2


def test_show_writes_mermaid_and_svg(file: Path, tmp_path: Path) -> None:
    status, out, _ = said("show", file)
    assert (status, out.splitlines()[0], out.splitlines()[-1]) == (0, "flowchart TD", "  n0 --> n1")
    assert said("show", file, "-o", tmp_path / "p.svg") == (0, "", "")
    assert (tmp_path / "p.svg").read_text().startswith("<svg ")


def test_show_adds_the_load_of_a_server(file: Path, page_server: tuple[str, list[str]]) -> None:
    url, pages = page_server
    pages[:] = [PAGE.format(ran=2.0, one=10, four=0), PAGE.format(ran=2.05, one=11, four=3)]
    status, out, _ = said("show", file, "--server", url, "--seconds", "0.1", "--model", "p")
    assert status == 0
    assert re.search(r'n0\["decode<br/>DecodeMat<br/>queue 3, batch 3\.2, busy 0\.[2-5]\d of 2"\]', out), out
    pages[:] = ["", ""]
    assert said("show", file, "--server", url, "--seconds", "0.1")[0] == 2
    assert said("show", file, "--server", "ftp://a")[0] == 2
    assert said("show", file, "--server", "http://127.0.0.1:1")[0] == 1


PAGE = """\
penstock_pipeline_run_seconds_sum{{model="p",node="decode"}} {ran}
penstock_pipeline_queue_items{{model="p",node="decode"}} 3
penstock_pipeline_queue_items{{model="other",node="decode"}} 9
penstock_pipeline_batches_total{{model="p",node="decode",size="1"}} {one}
penstock_pipeline_batches_total{{model="p",node="decode",size="4"}} {four}
"""


@pytest.fixture
def page_server() -> Iterator[tuple[str, list[str]]]:
    """An HTTP server that answers each GET with the next of its pages."""
    pages: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages.pop(0).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()
        thread.join()


# ---- checks before a server starts


FLAGS: dict[str, object] = {
    **dict.fromkeys(("instances", "devices", "max_batch_size", "model", "compat", "host", "port")),
    **dict.fromkeys(("tls_cert", "tls_key", "tls_password_file", "token_file", "insecure", "keep_going", "reload")),
    "options": (),
}
NODE = '[a]\nbackend = "Identity"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.toml").write_text(NODE)
    (tmp_path / "Res Net.toml").write_text('backend = "Identity"\n')
    (tmp_path / "penstock.toml").write_text('[server]\nport = 1\n[models.m]\ntarget = "net.toml"\n')
    (tmp_path / "logging.toml").write_text('[server]\nport = 1\n[logging]\nlevel = "debug"\n[devices]\ncpu = "1GB"\n')
    (tmp_path / "broken.toml").write_text("[a\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "is_pipeline"),
    [
        ("net.toml", True),
        ("Res Net.toml", True),
        ("penstock.toml", False),
        ("logging.toml", False),
        ("broken.toml", False),
        ("gone.toml", False),
    ],
)
def test_a_pipeline_is_recognized_by_its_tables(file: str, is_pipeline: bool) -> None:
    assert describes_model(file) is is_pipeline


def test_files_of_pipelines_are_models_named_by_their_stems(folder: Path) -> None:
    toml, models = split_targets(("penstock.toml", "net.toml", "Res Net.toml", "other=net.toml", "pkg:A"))
    assert toml == "penstock.toml"
    assert models == {
        "net": {"target": f"{folder}/net.toml"},
        "res-net": {"target": f"{folder}/Res Net.toml"},
        "other": {"target": f"{folder}/net.toml"},
        "a": {"target": "pkg:A"},
    }


def test_the_dialect_and_the_workers_apply_to_pipelines() -> None:
    found = build_config(("net.toml", "pkg:A"), {**FLAGS, "compat": "torchpipe", "instances": 3}, ())
    assert found.models["net"].options == {"compat": True}
    assert found.models["a"].options == {}
    assert {model.instances for model in found.models.values()} == {3}
    with pytest.raises(ConfigError, match="--compat applies to pipeline files"):
        build_config(("pkg:A",), {**FLAGS, "compat": "torchpipe"}, ())


def test_server_tables_of_a_pipeline_apply_unless_there_is_a_configuration(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "net.toml").write_text("[server]\nport = 7\n" + NODE)
    assert build_config(("net.toml",), FLAGS, ()).server.port == 7
    assert build_config(("net.toml",), {**FLAGS, "port": 8}, ()).server.port == 8
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert build_config(("penstock.toml", "net.toml"), FLAGS, ()).server.port == 1
    assert [("net.toml" in r.message, "table=server ignored=true" in r.message) for r in caplog.records] == [
        (True, True)
    ]


def test_a_check_in_a_child_process_reports_problems_and_loads_nothing_here(folder: Path) -> None:
    (folder / "steps.py").write_text("import colorsys\ndef f(data): return data\n")
    (folder / "python.toml").write_text('[a]\nbackend = "Python[steps.py:f]"\n')
    before = set(sys.modules)
    PipelineCheck({}).result()
    PipelineCheck({str(folder / "net.toml"): False, str(folder / "python.toml"): True}).result()
    (folder / "net.toml").write_text(NODE + "nxt = 3\n")
    checking = PipelineCheck({str(folder / "net.toml"): False})
    with pytest.raises(ConfigError, match="nxt"):
        checking.result()
    assert not {"steps", "colorsys"} & (set(sys.modules) - before)


def children() -> set[int]:
    """The children of this process, including zombies."""
    return {child.pid for child in psutil.Process().children()}


def test_a_check_that_dies_leaves_the_report_to_the_workers(folder: Path) -> None:
    (folder / "steps.py").write_text("import os\nos._exit(9)\n")
    (folder / "python.toml").write_text('[a]\nbackend = "Python[steps.py:f]"\n')
    before = children()
    PipelineCheck({str(folder / "python.toml"): False}).result()
    assert children() <= before


def test_a_check_that_hangs_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "PATIENCE_S", 0.2)
    (folder / "steps.py").write_text("import time\ntime.sleep(3600)\n")
    (folder / "python.toml").write_text('[a]\nbackend = "Python[steps.py:f]"\n')
    before = children()
    PipelineCheck({str(folder / "python.toml"): False}).result()
    assert children() <= before


def test_an_import_error_of_a_file_is_reported(folder: Path) -> None:
    (folder / "steps.py").write_text("raise ValueError('no weights')\n")
    (folder / "python.toml").write_text('[a]\nbackend = "Python[steps.py:f]"\n')
    with pytest.raises(ConfigError, match="no weights"):
        PipelineCheck({str(folder / "python.toml"): False}).result()


def test_a_configuration_is_checked_with_its_pipelines(folder: Path) -> None:
    result = CliRunner().invoke(config_verb, ["check", "penstock.toml"])
    assert (result.exit_code, result.output) == (0, "ok: m (net.toml)\n")
    (folder / "net.toml").write_text('[a]\nbackend = "Identitty"\n')
    result = CliRunner().invoke(config_verb, ["check", "penstock.toml"])
    assert result.exit_code == 2
    assert "did you mean 'Identity'" in result.output
    result = CliRunner().invoke(config_verb, ["check", "net.toml"])
    assert (result.exit_code, "penstock pipeline check net.toml" in result.output) == (2, True)
