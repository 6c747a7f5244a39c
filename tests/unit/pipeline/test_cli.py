"""`penstock pipeline`: what it prints, and with what it ends."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from click.testing import CliRunner

from penstock.cli.main import main
from penstock.pipeline.load import load_graph

TOML = """\
[server]
port = 0

[decode]
backend = "DecodeMat"
instance_num = 2
next = "prep"

[prep]
backend = "S[ResizeMat,CvtColorMat,Mat2Tensor]"
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


def test_check_shows_what_cannot_run_yet(file: Path) -> None:
    file.write_text('[a]\nnext = "a2"\n[a2]\nfilter = "odd"\n')
    status, out, err = said("check", file)
    assert (status, err) == (2, "penstock: p: [a2] filter 'odd' cannot be run yet\n")
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
    status, out, _ = said("run", file, tmp_path / "a.png", tmp_path / "b.png", "--trace")
    good, bad = map(json.loads, out.splitlines())
    assert status == 1
    assert good["file"] == str(tmp_path / "a.png")
    assert good["result"] == {"shape": [1, 3, 2, 3], "dtype": "uint8", "argmax": 0, "max": 9.0}
    assert [hop["node"] for hop in good["trace"]] == ["decode", "prep"]
    assert bad["error"]["code"] == "undecodable"
    assert bad["node"] == "decode"


def test_ops_are_listed_and_told() -> None:
    assert "\nResizeMat " in said("ops")[1]
    status, out, _ = said("ops", "resizemat")
    assert status == 0
    assert out.startswith("ResizeMat: mat -> mat\n")
    assert "resize_h = (must be set)   whole number" in out
    assert said("ops", "ResizMat")[0] == 2
