"""The parts of the video captioning example: scenes, clips, network, weights, and the order check."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "video_captioning"
MODULES = ("scenes", "make_videos", "network", "train", "verify")


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """The example's modules, imported like its own scripts."""
    for module in ("av", "simplejpeg", "torch", "transformers"):
        pytest.importorskip(module)
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]
    sys.modules.update(before)


def rows_of(captions: list[str], video: str = "disk/a.mp4") -> list[dict[str, Any]]:
    return [{"video": video, "frame": i, "time": i / 30, "caption": text} for i, text in enumerate(captions)]


def captions_of(modules: Any, frames: int) -> list[str]:
    return [modules.scenes.caption(scene) for scene in modules.make_videos.clip_scenes(frames)]


def test_the_number_of_a_caption_can_be_read(modules: Any) -> None:
    scene = modules.scenes.Scene(1042, "large", "red", "cross", "gray", *modules.scenes.place(0.1, 0.1, "large"))
    assert modules.scenes.caption(scene) == "number 0 4 2 : a large red cross at the top left on gray"
    assert modules.scenes.number_of(modules.scenes.caption(scene)) == 42
    for other in ("", "number 0 4", "number 0 4 2x", "a number 0 4 2 : a", "number 0 4 x : a large", "Number 0 4 2 :"):
        assert modules.scenes.number_of(other) is None


def test_every_word_of_every_scene_has_its_number(modules: Any) -> None:
    random = np.random.default_rng(4)
    said = {word for _ in range(3000) for word in modules.scenes.caption(modules.scenes.sample(random)).split()}
    assert said == set(modules.scenes.words())
    assert len(modules.network.VOCABULARY) == 40


def test_shapes_stay_above_the_number_and_away_from_the_edges_between_cells(modules: Any) -> None:
    random = np.random.default_rng(5)
    for _ in range(300):
        scene = modules.scenes.sample(random)
        below = slice(round(modules.scenes.STRIP_TOP * 270), None)
        higher = replace(scene, y=0.2)
        assert (modules.scenes.draw(scene, 480, 270)[below] == modules.scenes.draw(higher, 480, 270)[below]).all()
        assert scene.y + modules.scenes.SIZES[scene.size] <= modules.scenes.STRIP_TOP
        assert min(abs(scene.x - 1 / 3), abs(scene.x - 2 / 3)) > 0.02
        assert min(abs(scene.y - edge) for edge in (0.28, 0.49)) > 0.02


def test_all_thousand_numbers_look_different(modules: Any) -> None:
    look = modules.scenes.sample(np.random.default_rng(6))
    assert len({modules.scenes.draw(replace(look, number=n), 64, 64).tobytes() for n in range(1000)}) == 1000


def test_a_clip_has_the_requested_frames_and_is_reproducible(modules: Any, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    paths = [tmp_path / "a.mp4", tmp_path / "b.mp4", tmp_path / "c.mp4"]
    captions = [
        modules.make_videos.make_clip(p, 70, (160, 90), 25, seed) for p, seed in zip(paths, (1, 1, 2), strict=True)
    ]
    assert captions[0] == captions[1] != captions[2]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with av.open(str(paths[0])) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
    assert (len(frames), frames[0].width, frames[0].height, stream.average_rate) == (70, 160, 90, 25)
    assert stream.codec_context.name == "h264"
    assert [round(frame.time * 25) for frame in frames] == list(range(70))
    assert [modules.scenes.number_of(text) for text in captions[0]] == list(range(70))
    assert len({text.partition(":")[2] for text in captions[0]}) > 1


def test_the_number_wraps_around_after_999(modules: Any) -> None:
    scenes = list(modules.make_videos.clip_scenes(1002))
    assert [scene.number for scene in scenes[-3:]] == [999, 0, 1]


def test_the_command_makes_the_requested_number_of_clips(modules: Any, tmp_path: Path, monkeypatch: Any) -> None:
    arguments = ["make_videos.py", str(tmp_path / "clips"), "--clips", "2", "--frames", "3", "--size", "64x36"]
    monkeypatch.setattr(sys, "argv", arguments)
    modules.make_videos.main()
    assert sorted(path.name for path in (tmp_path / "clips").iterdir()) == ["clip-000.mp4", "clip-001.mp4"]


def test_a_training_batch_depends_on_seed_and_step_only(modules: Any) -> None:
    lessons = modules.train.Lessons(3, 10)
    (first, said), (again, _), (other, _) = lessons[7], lessons[7], lessons[8]
    assert tuple(first.shape) == (64, 64, 64, 3)
    assert first.equal(again)
    assert not first.equal(other)
    assert said.shape == (64, 12 + 1 + 15 + 1)


def test_an_untrained_network_is_saved_in_the_librarys_format(modules: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    network = modules.network.new_network(1)
    assert 0.7e6 < sum(values.numel() for values in network.parameters()) < 0.8e6
    modules.network.save(network, tmp_path)
    again = transformers.Blip2ForConditionalGeneration.from_pretrained(tmp_path)
    for name, values in network.state_dict().items():
        assert values.equal(again.state_dict()[name]), name
    assert again.generation_config.max_new_tokens == modules.network.LONGEST
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("number 0 4 2 : a large red cross at the top left on gray")["input_ids"]
    assert (ids[0], len(ids)) == (modules.network.START, 1 + 15)
    assert modules.network.PAD not in ids


@pytest.mark.parametrize("spoil", ["swap", "loss", "repeat", "slip", "mixed", "end", "foreign"])
def test_lost_repeated_or_moved_rows_are_found(modules: Any, spoil: str) -> None:
    captions = captions_of(modules, 120)
    rows = rows_of(captions)
    truth = {"a.mp4": captions}
    assert modules.verify.verify(rows, truth).faults == []
    match spoil:
        case "swap":
            rows[50], rows[51] = rows[51], rows[50]
        case "loss":
            del rows[60]
        case "repeat":
            rows.insert(60, rows[60])
        case "slip":
            # correct frames with the caption of the previous frame: three rows are enough
            for index in (57, 58, 59):
                rows[index] = {**rows[index], "caption": captions[index - 1]}
        case "mixed":
            rows[50:50] = rows_of(captions, "disk/b.mp4")
            truth["b.mp4"] = captions
        case "end":
            del rows[-1]
        case "foreign":
            rows += rows_of(captions, "disk/c.mp4")
    assert modules.verify.verify(rows, truth).faults


def test_an_occasional_misread_number_is_counted_but_not_a_fault(modules: Any) -> None:
    captions = captions_of(modules, 1200)
    rows = rows_of(captions)
    for index in (100, 101, 700):
        rows[index]["caption"] = "number 9 9 9 : a large red cross at the top left on gray"
    report = modules.verify.verify(rows, {"a.mp4": captions})
    assert (report.faults, report.frames, report.numbers, report.whole) == ([], 1200, 1197, 1197)
    for index in range(200, 216, 4):
        rows[index]["caption"] = ""
    assert re.search(r"1193 of 1200 numbers are right", str(modules.verify.verify(rows).faults))
    assert modules.verify.verify([]).faults == ["there are no captions"]


@pytest.fixture(scope="module")
def captioner(modules: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.Blip2ForConditionalGeneration.from_pretrained(modules.network.WEIGHTS).eval()


def test_the_shipped_weights_read_held_out_numbers_and_captions(modules: Any, captioner: Any) -> None:
    for name, by_kernel, truth in modules.train.held_out(100):
        for kernel, pixels in by_kernel.items():
            numbers, whole = modules.train.score(captioner, pixels, truth)
            assert (numbers >= 0.99, whole >= 0.97) == (True, True), f"{name}, {kernel}: {numbers:.2%}, {whole:.2%}"


def test_the_processor_and_the_model_of_the_library_caption_a_picture(modules: Any, captioner: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    processor = transformers.AutoProcessor.from_pretrained(modules.network.WEIGHTS)
    scene = modules.scenes.sample(np.random.default_rng(8))
    pixels = processor(images=[modules.scenes.draw(scene, 480, 270)], return_tensors="pt")
    ids = captioner.generate(**pixels, max_new_tokens=20)
    assert processor.batch_decode(ids, skip_special_tokens=True)[0].strip() == modules.scenes.caption(scene)


@pytest.mark.slow
def test_the_demo_captions_every_frame_and_resumes_a_killed_job(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [sys.executable, "demo.py", "--clips", "2", "--frames", "150", "--keep", str(kept)]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^300 frames in order, \d+ numbers read right .* \d+ frames/s", done.stdout, re.MULTILINE)
    killed = re.search(r"SIGKILL after (\d+) of 300 frames", done.stdout)
    assert killed is not None
    assert 100 <= int(killed[1]) < 300
    assert (kept / "captions.jsonl").read_bytes() == (kept / "again.jsonl").read_bytes()
