"""The examples on the pages run as written."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock.config.targets import split_targets
from support.shared_batchers import batchers

HEADER_LENGTH = "Inference-Header-Content-Length"
MEAN_OF_7 = {"mean": [127.5], "frame_index": [7]}
ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.S | re.M)
    return [block for name, block in found if name == language]


def shell(lines: str, url: str, cwd: Path) -> list[str]:
    """What the curl lines of a block print, sent to `url` in place of the default address."""
    found = [line for line in lines.splitlines() if line.startswith("curl") and ":8080" in line]
    outputs = []
    for line in found:
        command = line.replace("http://127.0.0.1:8080", url) + " -s -f"
        outputs.append(
            subprocess.run(["bash", "-c", command], cwd=cwd, capture_output=True, text=True, check=True).stdout
        )
    return outputs


def test_the_quickstarts_model_answers_its_curl_line_and_its_program_runs(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    python = blocks("docs/quickstart.md", "python")
    server = serve(python[0], "Means")
    curls = next(b for b in blocks("docs/quickstart.md", "") if "curl" in b)
    assert shell(curls, server.url, tmp_path) == ['{"mean":2.5}']
    program = next(b for b in python if "Portal" in b)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[{'mean': 1.5}, {'mean': 3.5}]"


def named(name: str) -> str:
    """The Python block of the quickstart for this file."""
    return next(block for block in blocks("docs/quickstart.md", "python") if block.startswith(f"# {name}\n"))


def after(text: str) -> list[str]:
    """The shell block of the quickstart that begins with this line, and the blocks without a language that follow."""
    found = blocks("docs/quickstart.md", "")
    return found[next(place for place, block in enumerate(found) if block.startswith(text)) :]


def test_the_quickstart_shows_what_the_options_of_curl_send(serve_all: Callable[..., Any], tmp_path: Path) -> None:
    server = serve_all(named("items.py"), "show")
    (tmp_path / "items.bin").write_bytes(b"\x00\x01")
    lines = [line.partition(" # ") for line in after("penstock serve items.py:show")[0].splitlines()[1:]]
    assert len(lines) == 7
    for command, _, shown in lines:
        assert shell(command.strip(), server.url, tmp_path) == [shown]


def test_the_quickstarts_types_convert_requests(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(named("houses.py"), "prices")
    lines = [line.partition(" # ") for line in after("penstock serve houses.py:prices")[0].splitlines()[1:]]
    assert len(lines) == 3
    for command, _, shown in lines:
        line = command.strip().replace("http://127.0.0.1:8080", server.url) + " -s"
        assert subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout == shown


def test_the_quickstarts_stream_is_ndjson_or_events(serve_all: Callable[..., Any], tmp_path: Path) -> None:
    server = serve_all(named("count.py"), "count")
    commands, lines, events = after("penstock serve count.py:count")[:3]
    assert shell(commands, server.url, tmp_path) == [lines, events + "\n"]


def test_the_quickstarts_fastapi_application_maps_errors_and_ends_its_workers(tmp_path: Path) -> None:
    for name in ("app.py", "web.py"):
        (tmp_path / name).write_text(named(name))
    command = [sys.executable, "-m", "uvicorn", "web:app", "--port", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    output = ""
    try:
        while (found := re.search(r"running on (http://\S+)", output)) is None:
            output += (line := process.stderr.readline())
            assert line, output
        curls = [line for line in after("uvicorn web:app")[0].splitlines() if line.startswith("curl")]
        commands = [line.replace("http://127.0.0.1:8080", found[1]) + " -s -w ' %{http_code}'" for line in curls]
        answers = [subprocess.run(["bash", "-c", each], capture_output=True, text=True).stdout for each in commands]
        workers = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.send_signal(signal.SIGINT)
        output += process.communicate(timeout=30)[1]
    message = "found no x, expected a list of numbers"
    refused = f'{{"error":{{"code":"bad_request","message":"{message}"}}}} 400'
    assert answers == ['{"mean":2.5} 200', refused, '{"mean":1.5} 200']
    assert "Application shutdown complete" in output
    assert workers
    assert not psutil.wait_procs(workers, 10)[1]


def test_the_digits_example_answers_the_curl_lines_of_its_page(serve: Callable[..., Any]) -> None:
    server = serve(None, "examples/digits/app.py:Digits", cwd=ROOT)
    page = (ROOT / "examples/digits/README.md").read_text()
    commands = re.findall(r"^(curl (?:[^\n']|'[^']*')*)$", page, re.M)
    image, array, description = (
        subprocess.run(
            ["bash", "-c", command.replace("http://127.0.0.1:8080", server.url) + " -s -f"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for command in commands
    )
    assert '"digit":7' in image
    assert '"digit":7' in array
    assert '"name":"digits"' in description


def run(page: str, name: str, folder: Path) -> str:
    """What the block `name` of a page prints, with the page's other named blocks beside it."""
    for block in blocks(page, "python"):
        found = re.match(r"# (\w+\.py)\n", block)
        if found:
            (folder / found[1]).write_text(block)
    done = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_streamers_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, futures, coroutine, mixed = run("docs/streamer.md", "calls.py", tmp_path).splitlines()
    assert (first, futures, coroutine) == ("['A', 'B']", "[['C'], ['D']]", "['FROM A COROUTINE']")
    assert mixed == """['E', AttributeError("'int' object has no attribute 'upper'")]"""
    assert run("docs/streamer.md", "managed.py", tmp_path) == "[3.0, 6.0]\n"
    (tmp_path / "request.py").write_text("import app\nprint(app.handle_request('hello'))\n")
    assert run("docs/streamer.md", "request.py", tmp_path) == "HELLO\n"
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    with batchers(tmp_path / "run") as shared:
        assert run("docs/streamer.md", "shared_app.py", tmp_path) == "FROM ANY PROCESS\n"
        program = "import shared_app, sys; print(shared_app.handle_request('held'), flush=True); sys.stdin.readline()"
        holder = shared.start(program, cwd=tmp_path)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "HELD\n"
        assert run("docs/streamer.md", "connect.py", tmp_path) == "['FROM ANOTHER PROGRAM']\n"
        holder.communicate("\n")


def test_the_import_of_the_migration_guide_works(tmp_path: Path) -> None:
    (tmp_path / "imports.py").write_text(blocks("docs/migrate-from-service-streamer.md", "python")[0])
    assert run("docs/migrate-from-service-streamer.md", "imports.py", tmp_path) == ""


def test_the_models_of_the_page_answer_their_curl_lines(serve: Callable[..., Any], tmp_path: Path) -> None:
    assert run("docs/models.md", "make_net.py", tmp_path) == ""
    lines = blocks("docs/models.md", "")[0]
    (tmp_path / "penstock.toml").write_text(blocks("docs/models.md", "toml")[0])
    server = serve(None, "penstock.toml", cwd=tmp_path)
    single, named, tensors = (json.loads(answer) for answer in shell(lines, server.url, tmp_path))
    assert single == [5.0, 5.0]
    assert named == {"OUTPUT__0": [[5.0, 5.0], [0.5, 0.5]]}
    assert tensors["outputs"][0]["data"] == [5.0, 5.0]
    command = next(line for line in lines.splitlines() if line.startswith("penstock serve"))
    toml, models = split_targets(tuple(word for word in command.split()[2:] if not word.startswith(("-", "models."))))
    assert (toml, set(models)) == (None, {"net", "eager"})


def test_the_model_with_declared_tensors_has_eight_lines_and_answers_its_curl_lines(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    (source,) = (block for block in blocks("docs/models.md", "python") if block.startswith("# head.py"))
    assert sum(bool(line.strip()) for line in source.splitlines()[1:]) == 8
    (tmp_path / "head.py").write_text(source)
    lines = next(block for block in blocks("docs/models.md", "") if "head.py:Head" in block)
    config = next(block for block in blocks("docs/models.md", "toml") if "head.py:Head" in block)
    (tmp_path / "penstock.toml").write_text(config)
    for arguments in (["head.py:Head"], ["penstock.toml"]):
        server = serve(None, *arguments, cwd=tmp_path)
        row, tensors = (json.loads(answer) for answer in shell(lines, server.url, tmp_path))
        assert row == [10.0, 10.0]
        assert tensors["outputs"] == [{"name": "y", "shape": [1, 2], "datatype": "FP32", "data": [10.0, 10.0]}]


@pytest.mark.parametrize("target", ["heads.py:Heads", "stacked.py:Stacked"])
def test_the_models_of_tensors_and_of_collated_batches_answer_their_curl_lines(
    serve: Callable[..., Any], tmp_path: Path, target: str
) -> None:
    pytest.importorskip("torch")
    file = target.partition(":")[0]
    (source,) = (block for block in blocks("docs/models.md", "python") if block.startswith(f"# {file}"))
    assert sum(bool(line.strip()) for line in source.splitlines()[1:]) <= 15
    (tmp_path / file).write_text(source)
    lines = next(block for block in blocks("docs/models.md", "") if target in block)
    (answer,) = shell(lines, serve(None, target, cwd=tmp_path).url, tmp_path)
    assert len(json.loads(answer)) == 2


def test_the_model_that_reads_its_requests_answers_its_curl_line(serve: Callable[..., Any], tmp_path: Path) -> None:
    (source,) = (block for block in blocks("docs/models.md", "python") if block.startswith("# greeter.py"))
    (tmp_path / "greeter.py").write_text(source)
    lines = next(block for block in blocks("docs/models.md", "") if "greeter.py:Greeter" in block)
    server = serve(None, "greeter.py:Greeter", cwd=tmp_path)
    assert shell(lines, server.url, tmp_path) == [lines.splitlines()[-1]]
    assert server.post("/predictions/greeter", b"{}")[0] == 400


def test_the_models_with_helper_processes_answer_their_curl_lines(serve: Callable[..., Any], tmp_path: Path) -> None:
    for need in ("cv2", "tokenizers", "torch"):
        pytest.importorskip(need)
    for block in blocks("docs/models.md", "python"):
        if (file := block.splitlines()[0].removeprefix("# ")) in ("sentiment.py", "brightness.py"):
            (tmp_path / file).write_text(block)
    config = next(block for block in blocks("docs/models.md", "toml") if "preprocess_processes" in block)
    (tmp_path / "penstock.toml").write_text(config)
    lines = next(block for block in blocks("docs/models.md", "") if "predictions/sentiment" in block)
    server = serve(None, "penstock.toml", cwd=tmp_path)
    score, mean = (json.loads(answer) for answer in shell(lines, server.url, ROOT))
    assert score == 1.0
    assert 0 < mean < 255
    assert server.post("/predictions/brightness", b"no image", "image/png")[0] == 400
    assert server.metric("penstock_preprocess_processes") == 4


def test_the_steps_of_scaling_run(serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/scale.md"
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path / "run"))
    with batchers(tmp_path / "run"):
        assert run(page, "web.py", tmp_path) == "7\n"
    command = re.search(r"penstock serve (app.py:digits .*)", (ROOT / page).read_text())
    assert command is not None
    assert serve(None, *command[1].split(), cwd=tmp_path).metric("penstock_workers", model="digits") == 4
    follow, slow, zoo = blocks(page, "toml")
    zoo = zoo.replace('cpu = "8GB"\n', "").replace('"cuda:0" =', "cpu =").replace("cuda:0", "cpu")
    for name, text, model in (
        ("scale", follow, "digits"),
        ("slow", slow, "digits"),
        ("zoo", re.sub("app.py:[A-Z][a-z]+", "app.py:digits", zoo), "rare"),
    ):
        (tmp_path / f"{name}.toml").write_text(text)
        server = serve(None, f"{name}.toml", cwd=tmp_path)
        assert server.post(f"/predictions/{model}", b"7") == (200, b"7")
    assert server.metric("penstock_workers_up", model="often") == 1


def test_the_wire_formats_requests_are_answered_as_they_stand_there(serve: Callable[..., Any], tmp_path: Path) -> None:
    page = "docs/wire-format.md"
    model, client = blocks(page, "python")
    server = serve(model, "Frames")
    shown = next(block for block in blocks(page, "") if block.startswith("POST"))
    lengths = [int(number) for number in re.findall(r"Length: (\d+)", shown)]
    said, _, tensors = shown.partition("\n\n")[2].rpartition("}\n")
    data = bytes.fromhex(re.sub(" +[a-z_]+:.*", "", tensors))
    assert [len(said) + 1, len(said) + 1 + len(data)] == lengths
    body = said.encode() + b"}" + data
    assert outputs(server.post("/v2/models/frames/infer", body, **{HEADER_LENGTH: str(lengths[0])})[1]) == MEAN_OF_7
    one, file = (
        block.replace("http://127.0.0.1:8080", server.url).replace("python -c", f"{sys.executable} -c")
        for block in blocks(page, "")
        if "--data-binary" in block
    )
    answers = [
        subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, check=True).stdout
        for script in (one, file)
    ]
    assert [outputs(answer) for answer in answers] == [MEAN_OF_7, {"mean": [0, 0]}]
    program = client.replace("http://127.0.0.1:8080", server.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("mean [128. 128.]\nframe_index [0 1]\n", "")


def test_the_lines_of_kserves_page_are_answered_as_they_stand_there(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(blocks("docs/kserve.md", "python")[0], "Sums", "Words")
    lines = [line.partition(" # ") for line in blocks("docs/kserve.md", "")[0].splitlines()[1:]]
    assert len(lines) == 4
    for command, _, shown in lines:
        assert shell(command.strip(), server.url, tmp_path) == [shown]


def test_the_openai_client_prints_what_its_page_shows(serve: Callable[..., Any], tmp_path: Path) -> None:
    page = "docs/openai.md"
    server = serve(blocks(page, "python")[0], "repeat", "lengths")
    program = blocks(page, "python")[1].replace("http://127.0.0.1:8080", server.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (blocks(page, "")[1], "")
    exec(blocks(page, "python")[2], {"penstock": penstock})


def test_the_embeddings_example_finds_the_text_of_its_page(serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(None, "examples/embeddings/embedder.py", cwd=ROOT)
    program = blocks("examples/embeddings/README.md", "python")[0].replace("http://127.0.0.1:8080", server.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("'the cat sleeps on the sofa')\n"), done.stderr


def outputs(answer: bytes) -> dict[str, Any]:
    """The values of an Open Inference answer by name."""
    return {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
