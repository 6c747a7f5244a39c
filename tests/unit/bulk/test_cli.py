from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.bulk import cli as module
from penstock.bulk.cli import caption
from penstock.bulk.options import JobOptions


def invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(caption, list(arguments), env=env)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[JobOptions]:
    """The options that the job would receive."""
    found: list[JobOptions] = []

    def run(options: JobOptions, show: object) -> int:
        found.append(options)
        return 0

    monkeypatch.setattr(module, "run", run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    return found


def test_the_flags_become_the_options_of_a_job(options: list[JobOptions]) -> None:
    flags = """
        --server http://a --server http://b --model blip -o out/c.parquet --also out/c.csv --vtt v --every 3
        --start 1:30 --end 1:00:00.5 --max-frames 7 --pixels jpeg --kernel exact --mode single --prebatch-size 8
        --decoders 2 --memory 1.5Mi --give-up 5 --wait 0 --from0 --retry-failed --restart
        --extensions mp4,.MKV --extensions gif --on-damage stop --stream 1
        --tone-map --deinterlace
    """.split()  # noqa: SIM905 - as they are typed
    assert invoke("a.mp4", "b", *flags).exit_code == 0
    (found,) = options
    assert found.inputs == ("a.mp4", "b")
    assert found.servers == ("http://a", "http://b")
    assert (found.extensions, found.on_damage) == ({".mp4", ".mkv", ".gif"}, "stop")
    assert found.outputs.files == (Path("out/c.parquet"), Path("out/c.csv"))
    assert (found.work, found.failures) == (Path("out/c.parquet.work"), Path("out/failures.jsonl"))
    assert (found.sampling.every, found.sampling.start_s, found.sampling.end_s) == (3, 90.0, 3600.5)
    assert (found.sampling.stream, found.tone_map, found.deinterlace) == (1, True, True)
    assert (found.pixels, found.kernel, found.mode, found.prebatch_size) == ("jpeg", "exact", "single", 8)
    assert (found.memory_bytes, found.give_up_s, found.wait_s, found.decoders) == (3 * 2**19, 5.0, 0.0, 2)
    assert found.from0
    assert found.retry_failed
    assert found.restart


def test_missing_flags_have_defaults(options: list[JobOptions]) -> None:
    assert invoke("a.mp4", "--server", "http://a").exit_code == 0
    (found,) = options
    assert found.outputs.files == (Path("captions.jsonl"),)
    assert (found.pixels, found.kernel, found.mode, found.prebatch_size) == (
        "server-size",
        "fast",
        "stream-prebatch",
        None,
    )
    assert (found.memory_bytes, found.token, found.sampling.every) == (None, None, 1)


@pytest.mark.parametrize(
    ("text", "every", "fps"), [("30", 30, None), ("30f", 30, None), ("2s", 1, 0.5), ("0.5s", 1, 2.0)]
)
def test_an_interval_is_in_frames_or_in_seconds(
    options: list[JobOptions], text: str, every: int, fps: float | None
) -> None:
    assert invoke("a.mp4", "--server", "http://a", "--every", text).exit_code == 0
    assert (options[0].sampling.every, options[0].sampling.fps) == (every, fps)


def test_clips_and_scenes_become_a_choice_of_frames(options: list[JobOptions]) -> None:
    for flags in ("--clip 0:10 --frames 4", "--scene", "--scene --scene-threshold 9.5"):
        assert invoke("a.mp4", "--server", "http://a", *flags.split()).exit_code == 0
    clips, scenes, sharp = (found.sampling for found in options)
    assert (clips.fps, clips.clip_frames, clips.scene) == (0.4, 4, None)
    assert (scenes.scene, sharp.scene, scenes.clip_frames) == (27.0, 9.5, None)


def test_a_name_with_a_leading_dash_follows_a_double_dash(options: list[JobOptions]) -> None:
    assert invoke("--server", "http://a", "--", "-o.mp4").exit_code == 0
    assert options[0].inputs == ("-o.mp4",)


def test_the_token_is_read_from_a_file_or_the_environment(options: list[JobOptions], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\nother\n")
    invoke("a", "--server", "http://a", "--token-file", "token", PENSTOCK_TOKEN="no")
    invoke("a", "--server", "http://a", PENSTOCK_TOKEN="from-env")
    assert [found.token for found in options] == ["secret", "from-env"]
    (tmp_path / "token").write_text("\n")
    assert invoke("a", "--server", "http://a", "--token-file", "token").exit_code == 2
    assert invoke("a", "--server", "http://a", "--token-file", "none").exit_code == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("a.mp4", "name a server"),
        ("a.mp4 --server http://a --every 2 --fps 1", "--every and --fps exclude each other"),
        ("a.mp4 --server http://a --keyframes --every 2s", "--every and --keyframes exclude each other"),
        ("a.mp4 --server http://a --scene --keyframes", "--keyframes and --scene exclude each other"),
        ("a.mp4 --server http://a --scene-threshold 30", "--scene-threshold needs --scene"),
        ("a.mp4 --server http://a --scene --scene-threshold 300", "0<x<=255"),
        ("a.mp4 --server http://a --clip 4", "--clip needs --frames"),
        ("a.mp4 --server http://a --frames 4", "--frames needs --clip"),
        ("a.mp4 --server http://a --clip 0 --frames 4", "more than 0"),
        ("a.mp4 --server http://a --clip 4 --frames 2 --fps 1", "--fps and --clip exclude each other"),
        ("a.mp4 --server http://a --clip 4 --frames 2 --dedupe 0", "--clip and --dedupe exclude each other"),
        ("a.mp4 --server http://a --decoder torchcodec --keyframes", "--keyframes needs --decoder pyav"),
        ("a.mp4 --server http://a --decoder torchcodec --tone-map", "--tone-map needs --decoder pyav"),
        ("a.mp4 --server http://a --decoder decord", "--decoder"),
        ("a.mp4 --server http://a --dedupe 256", "0<=x<=255"),
        ("a.mp4 --server http://a --ray=auto --rpm 9", "leave out --ray"),
        ("a.mp4 --server http://a --carry-captions", "--carry-captions needs --dedupe"),
        ("a.mp4 --server http://a --every 2.5", "expected frames such as 30f"),
        ("a.mp4 --server http://a --every 0.0s", "--every"),
        ("a.mp4 --server http://a --start 5 --end 5", "--end must be later"),
        ("a.mp4 --server http://a --fps 0", "--fps"),
        ("a.mp4 --server http://a --every 0", "--every"),
        ("a.mp4 --server http://a --memory lots", "a size such as"),
        ("a.mp4 --server http://a --start 1h", "expected seconds or"),
        ("a.mp4 --server http://a --pixels png", "--pixels"),
        ("a.mp4 --server http://a --extensions mp4,", "expected extensions"),
        ("a.mp4 --server http://a --on-damage guess", "--on-damage"),
        ("a.mp4 --server http://a --prebatch-size 0", "--prebatch-size"),
        ("a.mp4 --engine e --ray=auto", "--engine starts a server on this machine"),
        ("--retry-failed", "name a server"),
        ("--dry-run --server http://a", "name the videos"),
    ],
)
def test_wrong_usage_is_status_2_with_the_reason(options: list[JobOptions], flags: str, words: str) -> None:
    result = invoke(*flags.split())
    assert result.exit_code == 2
    assert words in result.output
    assert not options


def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.chdir(tmp_path)
    return invoke(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.mp4", "--server", "http://127.0.0.1:1"], "no file or folder none.mp4"),
        (["*.avi", "--server", "http://127.0.0.1:1"], "no file matches"),
        (["empty", "--server", "http://127.0.0.1:1"], "no video and no image in empty\n"),
        (["a.mp4", "--server", "ftp://x"], "no known scheme"),
        (["a.mp4", "--server", "http://127.0.0.1:1", "-o", "c.txt"], "suffix"),
        (["a.mp4", "--server", "https://127.0.0.1:1", "--ca", "none.pem"], "none.pem"),
        (["--server", "http://127.0.0.1:1"], "no videos are named"),
        ([], "no videos are named"),
    ],
)
def test_a_missing_file_or_server_option_is_status_2_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.mp4").write_bytes(b"not looked at")
    result = job(tmp_path, monkeypatch, *arguments)
    assert (result.exit_code, words in result.output) == (2, True), result.output


def test_an_unreachable_server_is_status_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.mp4").write_bytes(b"not looked at")
    result = job(tmp_path, monkeypatch, "a.mp4", "--server", "http://127.0.0.1:1", "--wait", "0")
    assert result.exit_code == 3
    assert "127.0.0.1:1" in result.output


def test_the_help_lists_every_flag() -> None:
    words = invoke("--help").output
    for flag in caption.params:
        assert any(name in words for name in flag.opts) or flag.name == "inputs"
    assert "130" in words
