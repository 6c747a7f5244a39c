"""The drawings example: its parts, its network, its two servers, and the commands of its README."""

import base64
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")
cv2 = pytest.importorskip("cv2")
torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

EXAMPLE = Path(__file__).parents[2] / "examples" / "animated_drawings"
MODULES = ("things", "drawings", "pictures", "network", "networks", "score", "train", "draw", "export")
PREDICT = "/predictions/figuredetector"
README = (EXAMPLE / "README.md").read_text()


@pytest.fixture(scope="module")
def parts() -> Iterator[Any]:
    """The modules of the example by their names."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def server(serve_all: Callable[..., Any]) -> Any:
    return serve_all(None, "app.py", "--option", "outlines=true", cwd=EXAMPLE)


def drawing() -> bytes:
    return (EXAMPLE / "drawing.jpg").read_bytes()


# ---- drawings


def test_the_generator_writes_pictures_and_what_is_on_them(parts: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "drawings.py"), str(tmp_path / "made"), "--count", "2", "--seed", "4"]
    subprocess.run(command, check=True)
    truth = json.loads((tmp_path / "made.json").read_text())
    for (name, told), known in zip(truth.items(), parts.drawings.pictures(2, 4), strict=True):
        assert told["boxes"] == known.boxes.tolist()
        assert parts.pictures.decoded((tmp_path / "made" / name).read_bytes()).shape == known.pixels.shape


# ---- pictures and answers


@pytest.mark.parametrize("file", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(40)])
def test_what_is_no_picture_is_told(parts: Any, file: bytes) -> None:
    with pytest.raises(ValueError, match=f"found (no|{len(file)}|a PNG)"):
        parts.pictures.decoded(file)


@pytest.mark.parametrize(
    ("shape", "inside"), [((100, 200), (160, 320)), ((640, 480), (320, 240)), ((9, 900), (3, 320))]
)
def test_a_picture_of_any_shape_fits_and_boxes_come_back_to_where_they_were(
    parts: Any, shape: tuple[int, int], inside: tuple[int, int]
) -> None:
    pixels = np.full((*shape, 3), 7, np.uint8)
    square = parts.pictures.fitted(pixels)
    assert square.shape == (320, 320, 3)
    assert (square[: inside[0], : inside[1]] == 7).all()
    assert (square == 7).all(axis=2).sum() == inside[0] * inside[1]
    whole = np.array([[0.0, 0.0, inside[1], inside[0]]])
    assert parts.pictures.on_picture(shape, whole).tolist() == [[0, 0, shape[1], shape[0]]]


def test_a_second_view_of_a_figure_and_what_is_unlikely_are_not_told(parts: Any) -> None:
    boxes = np.array([[0, 0, 100, 100], [5, 5, 105, 105], [200, 200, 300, 300], [0, 0, 10, 10]], float)
    masks = np.zeros((4, 80, 80), np.uint8)
    told = parts.pictures.answer((320, 320), np.array([0.9, 0.8, 0.7, 0.2]), np.array([0, 0, 1, 1]), boxes, masks)
    assert told == {
        "classes": ["person", "animal"],
        "scores": [0.9, 0.7],
        "boxes": [[0, 0, 0.3125, 0.3125], [0.625, 0.625, 0.9375, 0.9375]],
    }


def test_boxes_and_outlines_go_around_the_mask_in_parts_of_the_picture(parts: Any) -> None:
    mask = np.zeros((1, 80, 80), np.uint8)
    mask[0, 41, 31] = 255  # a speck, no part of it
    mask[0, 20:40, 10:30] = 255  # pixels 80 to 160 and 40 to 120 of what the network sees, twice that of the picture
    box = np.array([[30.0, 70, 130, 170]])
    told = parts.pictures.answer((640, 640), np.array([0.9]), np.array([0]), box, mask, outlines=True)
    around = np.array([0.125, 0.25, 0.375, 0.5])
    assert np.abs(told["boxes"] - around).max() < 0.01  # closer than the network's
    (corners,) = told["outlines"]
    assert np.abs([*np.min(corners, axis=0), *np.max(corners, axis=0)] - around).max() < 0.01
    empty = parts.pictures.answer((640, 640), np.array([0.9]), np.array([0]), box, mask * 0, outlines=True)
    assert empty["outlines"] == [[]]


@pytest.mark.parametrize(
    ("answer", "said"), [(None, "No such file or directory: '.*answer.json'"), ('{"code": 400}', "cannot be shown")]
)
def test_what_cannot_be_drawn_is_told_in_a_line(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, said: str
) -> None:
    file = tmp_path / "answer.json"
    if answer is not None:
        file.write_text(answer)
    monkeypatch.setattr(sys, "argv", ["draw.py", str(EXAMPLE / "drawing.jpg"), str(file), str(tmp_path / "a.png")])
    with pytest.raises(SystemExit, match=said):
        parts.draw.main()


# ---- the score


def test_the_score_is_that_of_a_case_that_is_worked_out_by_hand(parts: Any) -> None:
    """Two figures of one class: a hit, a miss that is more certain, a hit. Precision 1/2 at recall 1/2, 2/3 at 1."""
    Found, precision = parts.score.Found, parts.score.precision
    truth = [np.array([[0.0, 0, 10, 10], [50, 50, 60, 60]])]
    labels = [np.array([0, 0])]
    shapes = np.array([[80.0, 80, 90, 90], [0, 0, 10, 10], [50, 50, 60, 60]])
    some = precision([Found(np.array([0.9, 0.8, 0.7]), np.zeros(3, int), shapes)], labels, truth)
    assert (some.mean, some.at_half) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    perfect = precision([Found(np.array([0.9, 0.8]), np.zeros(2, int), truth[0])], labels, truth)
    assert (perfect.mean, perfect.at_half) == (1, 1)
    none = precision([Found(np.zeros(0), np.zeros(0, int), np.zeros((0, 4)))], labels, truth)
    assert (none.mean, none.at_half) == (0, 0)
    twice = precision([Found(np.array([0.9, 0.8]), np.zeros(2, int), truth[0][[0, 0]])], labels, truth)
    assert twice.at_half == pytest.approx(51 / 101)  # the second is no other figure
    shifted = truth[0] + np.array([0, 0, 0, 4])  # 10 of 14 rows are shared: 0.714
    near = precision([Found(np.array([0.9, 0.8]), np.zeros(2, int), shifted)], labels, truth)
    assert (near.mean, near.at_half) == (pytest.approx(0.5), 1)


# ---- the network


def test_the_shipped_weights_find_as_much_as_the_readme_says(parts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stated = dict(re.findall(r"(?m)^\| (boxes|masks) \| ([0-9.]+) \|", README))
    parts.train.report(parts.networks.load_network("small"), 40)
    found = dict(re.findall(r"(?m)^(boxes|masks): mAP ([0-9.]+), .* of 40 held-out", capsys.readouterr().out))
    assert found.keys() == stated.keys() == {"boxes", "masks"}
    for name, said in stated.items():
        assert float(found[name]) == pytest.approx(float(said), abs=0.06)  # these are fewer drawings


@pytest.mark.parametrize(("precision", "optimize"), [("bf16", "none"), ("fp32", "optimize_for_inference")])
def test_half_precision_and_fused_operators_find_the_same_figures(parts: Any, precision: str, optimize: str) -> None:
    from penstock.runtimes.torch import prepare

    images = torch.from_numpy(parts.pictures.fitted(parts.pictures.decoded(drawing()))[None].repeat(3, axis=0))
    with torch.inference_mode():
        scores, classes, boxes, _ = parts.networks.load_network("small")(images)
        network = prepare(parts.networks.load_network("small"), precision=precision, optimize=optimize)
        other_scores, other_classes, other_boxes, other_masks = network(images)
    sure = scores[0] > 0.5
    assert sure.sum() == 3
    assert (other_masks.dtype, other_masks.shape) == (torch.uint8, (3, 12, 80, 80))
    assert (other_classes[:, sure] == classes[:, sure]).all()
    assert (other_scores[:, sure] - scores[:, sure]).abs().max() < 0.05
    assert (other_boxes[:, sure] - boxes[:, sure]).abs().max() < 3


def test_a_batch_says_of_each_picture_what_it_says_of_it_alone(parts: Any) -> None:
    random = np.random.default_rng(2)
    images = torch.from_numpy(np.stack([parts.drawings.draw(random, 320, 320).pixels for _ in range(3)]))
    network = parts.networks.load_network("small")
    with torch.inference_mode():
        together = network(images)
        for place in range(3):
            alone = network(images[place : place + 1])
            sure = alone[0][0] > 0.3
            for of_all, own in zip(together[:3], alone[:3], strict=True):
                torch.testing.assert_close(of_all[place][sure], own[0][sure], atol=1e-3, rtol=1e-3)


# ---- penstock serve


def test_the_curl_lines_of_the_readme_find_the_figures_and_draw_them(server: Any, tmp_path: Path) -> None:
    lines = [line for line in README.splitlines() if line.startswith(("curl -s", "python draw.py"))]
    assert len(lines) == 2
    for name in ("drawing.jpg", "draw.py", "pictures.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    for line in lines:
        command = line.replace("http://127.0.0.1:8080", server.url).replace("python", sys.executable)
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    answer = json.loads((tmp_path / "answer.json").read_text())
    (shown,) = re.findall(r"(?m)^(\{\"classes\".*)$", README)
    stated = json.loads(shown)
    assert answer["classes"] == stated["classes"]
    assert answer["scores"] == pytest.approx(stated["scores"], abs=0.02)
    assert np.abs(np.subtract(answer["boxes"], stated["boxes"])).max() < 0.01
    assert [len(corners) > 8 for corners in answer["outlines"]] == [True] * 3
    before, after = (cv2.imread(str(tmp_path / name)) for name in ("drawing.jpg", "found.png"))
    assert before.shape == after.shape
    changed = (before != after).any(axis=2)
    high, wide = changed.shape
    for box in answer["boxes"]:
        left, top, right, bottom = np.rint(np.array(box) * [wide, high, wide, high]).astype(int)
        assert changed[top:bottom, left].mean() > 0.9
        assert changed[top:bottom, right].mean() > 0.9
        assert changed[bottom, left:right].mean() > 0.9
    assert changed.mean() < 0.5


def test_json_and_forms_bring_pictures_too(server: Any) -> None:
    told = json.loads(server.post(PREDICT, drawing(), "image/jpeg")[1])
    sent = json.dumps({"image": base64.b64encode(drawing()).decode()}).encode()
    form = (
        b'--B\r\ncontent-disposition: form-data; name="data"; filename="a.jpg"\r\n\r\n' + drawing() + b"\r\n--B--\r\n"
    )
    assert server.post(PREDICT, sent) == (200, server.post(PREDICT, drawing(), "image/jpeg")[1])
    status, body = server.post(PREDICT, form, "multipart/form-data; boundary=B")
    assert (status, json.loads(body)) == (200, told)


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (b"no image", "image/jpeg", "found 8 bytes beginning with"),
        (b"", "image/jpeg", "found no bytes"),
        (b"a cat", "text/plain", "found a str; send"),
        (b'{"image": "%%"}', "application/json", "not base64"),
        (b'{"image": 7}', "application/json", "found a int; send"),
        (b'{"a": "", "b": ""}', "application/json", "found a dict; send"),
        (b"[1]", "application/json", "found a list; send"),
    ],
)
def test_what_is_no_picture_is_refused(server: Any, body: bytes, content_type: str, said: str) -> None:
    status, answer = server.post(PREDICT, body, content_type)
    assert status == 400
    assert said in answer.decode()


def test_a_picture_that_is_small_as_a_file_and_huge_when_decoded_is_refused(server: Any) -> None:
    small, huge = (cv2.imencode(".png", np.zeros((side, side), np.uint8))[1].tobytes() for side in (64, 8200))
    assert len(huge) < 1_000_000
    assert server.post(PREDICT, small, "image/png")[0] == 200
    status, answer = server.post(PREDICT, huge, "image/png")
    assert status == 400
    assert "found an image of 8200 x 8200 pixels, expected at most 50,000,000" in answer.decode()


def test_the_model_tells_an_example_that_it_can_answer(server: Any) -> None:
    parameters = json.loads(server.get("/v2/models/figuredetector")[1])["parameters"]
    assert parameters["classes"] == ["person", "animal"]
    status, answer = server.post(PREDICT, json.dumps(parameters["example"]).encode())
    assert status == 200
    assert len(json.loads(answer)["classes"]) == 3


def test_a_network_that_nobody_knows_is_refused_with_those_that_are(parts: Any) -> None:
    from penstock.errors import ConfigError
    from penstock.plugins import load_object

    detector: Any = load_object(f"{EXAMPLE / 'app.py'}:FigureDetector")
    with pytest.raises(ConfigError, match="found 'large', expected small or maskrcnn"):
        detector(network="large")


def test_mask_rcnn_says_what_it_needs_when_torchvision_is_not_there(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.errors import LoadFailed

    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(LoadFailed, match="network maskrcnn needs torchvision: pip install torchvision"):
        parts.networks.load_network("maskrcnn")
    monkeypatch.setattr(sys, "argv", ["export.py", "figures.pt", "--network", "maskrcnn"])
    with pytest.raises(SystemExit, match="network maskrcnn needs torchvision: pip install torchvision"):
        parts.export.main()


# ---- torchserve


def test_the_archive_of_the_readme_serves_the_same_figures(torchserve: Any) -> None:
    shutil.copytree(EXAMPLE, torchserve.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    torchserve.configure_like((EXAMPLE / "config.properties").read_text())
    torchserve.env["OMP_NUM_THREADS"] = "1"
    section = README.partition("## As TorchServe's users serve it")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"(python|torch|curl)\S* ", line)]
    assert [line.split()[0] for line in lines] == ["python", "torch-model-archiver", "torchserve", "curl", "torchserve"]

    torchserve.bash(lines[0])
    torchserve.bash(lines[1])
    torchserve.start(*lines[2].split()[2:])
    told = json.loads(torchserve.bash(lines[3]))
    stated = json.loads(re.findall(r"(?m)^(\{\"classes\".*)$", README)[0])
    assert told["classes"] == stated["classes"]
    assert np.abs(np.subtract(told["boxes"], stated["boxes"])).max() < 0.01
    status, answer = torchserve.fetch(torchserve.url() + "/predictions/figures", b"no image", content_type="image/jpeg")
    assert (status, json.loads(answer)["message"][:28]) == (400, "found 8 bytes beginning with")
    status, said = torchserve.run("torchserve", *lines[4].split()[1:])
    assert (status, said.splitlines()[-1]) == (0, "TorchServe has stopped.")


def test_the_file_for_the_benchmark_suite_is_read_as_it_stands_there() -> None:
    pytest.importorskip("yaml")
    from penstock.perf.bench.suite_yaml import read_suite, suite_points

    cases, _ = read_suite([EXAMPLE / "models.yaml"])
    (case,) = cases
    assert (case.url, case.concurrency, len(suite_points(case))) == ("figures.mar", (16,), 8)
    assert (EXAMPLE / str(case.input)).is_file()


def test_the_commands_of_the_readme_that_measure_are_understood() -> None:
    from penstock.perf.bench.cli import bench, benchmark_suite
    from penstock.perf.bench.measurement import parse_slo
    from penstock.perf.cli import tune
    from penstock.perf.tune.space import parse_space

    verbs = {"tune": tune, "bench": bench, "benchmark-suite": benchmark_suite}
    lines = [line for line in README.splitlines() if re.match(r"penstock (tune|bench|benchmark-suite) ", line)]
    parsed = []
    for line in lines:
        _, verb, *arguments = shlex.split(line.replace("models.yaml", str(EXAMPLE / "models.yaml")))
        with verbs[verb].make_context(verb, arguments) as context:
            parsed.append((verb, context.params))
    assert [verb for verb, _ in parsed] == ["tune", "bench", "benchmark-suite"]
    assert parse_slo(parsed[0][1]["slo"]) == parse_slo(parsed[1][1]["slo"])
    space = {p.name: p.values for p in parse_space(parsed[0][1]["space"]).parameters}
    assert space["optimize"] == ("none", "optimize_for_inference")
