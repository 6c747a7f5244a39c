"""Archives, inputs and GPUs are checked before the first run; a mistake names file and line."""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pytest

from penstock.client.endpoint import Endpoint
from penstock.client.response import HttpResponse
from penstock.errors import ConfigError, PenstockError
from penstock.perf.bench import suite
from penstock.perf.bench.suite import SuiteJob, SuiteOptions, digest, load_of, prepare
from penstock.perf.bench.suite_yaml import Processor, SuiteCase, suite_points

CPU, ALL, TWO = Processor(), Processor("all"), Processor(2)


def case(folder: Path, url: str = "m.mar", **more: object) -> SuiteCase:
    given: dict[str, object] = {"model": "m", "mode": "e", "url": url, "input": "cat.jpg"}
    return SuiteCase(folder=folder, where=f"{folder}/models.yaml:2", **{**given, **more})  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a YAML file with an archive, an application and an input."""
    for name in ("m.mar", "m.tar.gz", "m.tgz", "cat.jpg", "app.py", "net.onnx"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "store" / "folder").mkdir(parents=True)
    (tmp_path / "store" / "stored.mar").write_bytes(b"x")
    return tmp_path


def source(folder: Path, url: str, wishes: SuiteOptions | None = None, **more: object) -> str:
    ((job,), _) = prepare([case(folder, url, **more)], wishes or SuiteOptions(), folder / "downloads", 0)
    return job.source


def test_a_model_is_found_next_to_the_yaml_in_the_store_or_by_its_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SuiteOptions(model_store=folder / "store")
    assert source(folder, "m.mar") == str(folder / "m.mar")
    assert source(folder, str(folder / "m.mar")) == str(folder / "m.mar")
    assert source(folder, f"file://{folder}/m.mar") == str(folder / "m.mar")
    assert source(folder, "stored", store) == source(folder, "stored.mar", store) == f"{folder}/store/stored.mar"
    assert source(folder, "folder", store) == f"{folder}/store/folder"
    assert source(folder, "net.onnx") == str(folder / "net.onnx")
    assert source(folder, "app.py:Model") == f"{folder}/app.py:Model"
    assert source(folder, "package.module:Model") == "package.module:Model"
    monkeypatch.chdir(folder)
    assert source(Path("elsewhere"), "m.mar") == str(folder / "m.mar")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("none.mar", r"models.yaml:2: m e: url: no file 'none.mar' in .*, nor in --model-store"),
        ("none.py:Model", "no file 'none.py'"),
        ("file:///none.mar", "no file '/none.mar'"),
    ],
)
def test_a_missing_model_is_reported_before_anything_starts(folder: Path, url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source(folder, url)


def test_without_a_downloader_an_archive_behind_a_url_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="archives cannot be downloaded"):
        source(folder, "http://127.0.0.1:1/m.mar")


def test_each_url_is_downloaded_once_even_if_archives_share_a_name(folder: Path) -> None:
    loaded = []

    def download(url: str, target: Path) -> Path:
        loaded.append(url)
        (target / "m.mar").write_text(url)
        return target / "m.mar"

    urls = [f"https://h/{version}/m.mar" for version in "121"]
    cases = [case(folder, url, mode=str(n)) for n, url in enumerate(urls)]
    jobs, _ = prepare(cases, SuiteOptions(download=download), folder / "store", 0)
    assert [Path(job.source).read_text() for job in jobs] == urls
    assert {Path(job.source).name for job in jobs} == {"m.mar"}
    assert loaded == urls[:2]


def test_the_input_is_found_and_required_for_an_archive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def data(wishes: SuiteOptions, **more: object) -> str | None:
        ((job,), _) = prepare([case(folder, **more)], wishes, folder, 0)
        return job.data

    monkeypatch.chdir(folder / "store")
    (folder / "store" / "dog.jpg").write_bytes(b"x")
    assert data(SuiteOptions()) == str(folder / "cat.jpg")
    assert data(SuiteOptions(data="dog.jpg")) == str(folder / "store" / "dog.jpg")
    assert data(SuiteOptions(data="random")) == "random"
    assert data(SuiteOptions(), url="app.py:Model", input=None) is None
    with pytest.raises(ConfigError, match=r"models.yaml:2: m e: input: no file 'cow.jpg' in [^,]*, nor here$"):
        data(SuiteOptions(), input="cow.jpg")
    with pytest.raises(
        ConfigError, match=r"--data cat.jpg: no such file or folder"
    ):  # the command line is relative to the working directory
        data(SuiteOptions(data="cat.jpg"))
    for archive in ("m.mar", "m.tar.gz", "m.tgz", "store/folder"):
        with pytest.raises(ConfigError, match="m e has no input, and an archive has no example; give --data"):
            data(SuiteOptions(), url=archive, input=None)


def test_a_missing_gpu_is_reported_before_anything_starts(folder: Path) -> None:
    asks = case(folder, processors=(CPU, ALL))
    with pytest.raises(ConfigError, match="m e needs gpus all, and this machine has none; remove it, or use"):
        prepare([asks], SuiteOptions(), folder, 0)
    (job,), notes = prepare([asks], SuiteOptions(skip_missing_hardware=True), folder, 0)
    assert job.case.processors == (CPU,)
    assert notes == ["m e needs gpus all, and this machine has none: left out"]
    with pytest.raises(ConfigError, match="nothing is left to run: m e needs gpus all"):
        prepare([case(folder, processors=(ALL,))], SuiteOptions(skip_missing_hardware=True), folder, 0)
    with pytest.raises(ConfigError, match="needs gpus 2, and this machine has 1;"):
        prepare([case(folder, processors=(ALL, TWO))], SuiteOptions(), folder, 1)
    (job,), _ = prepare([case(folder, processors=(ALL, TWO))], SuiteOptions(), folder, 2)
    assert job.case.processors == (ALL, TWO)


def test_requests_on_the_command_line_make_another_suite(folder: Path) -> None:
    def jobs(requests: int | None) -> list[SuiteJob]:
        return prepare([case(folder, concurrency=(4,))], SuiteOptions(requests=requests), folder, 0)[0]

    load = load_of(jobs(7)[0], 4, seed=3)
    assert (load.mode, load.requests, load.concurrency, load.seed) == ("closed", 7, 4, 3)
    assert jobs(None)[0].case.requests == 100
    assert digest(jobs(7)) == digest(jobs(7)) != digest(jobs(8))


def test_another_archive_of_the_same_name_is_another_suite(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "stored.mar").write_bytes(b"y")
    first, second = (
        prepare([case(folder, "stored")], SuiteOptions(model_store=folder / s), folder, 0)[0]
        for s in ("store", "other")
    )
    assert digest(first) != digest(second)


class Management:
    """Replaces TorchServe's management API; it reports the requested settings, overridden by `other`."""

    def __init__(self, **other: Any) -> None:
        self.other = other
        self.asked: dict[str, str] = {}

    def __call__(self, _: Endpoint, method: str, path: str, **__: object) -> HttpResponse:
        if method == "POST":
            self.asked = dict(parse_qsl(urlsplit(path).query))
            return HttpResponse(self.other.get("status", 200), {}, b"too large")
        given = {name: int(self.asked[key]) for name, key in (("batchSize", "batch_size"), ("maxBatchDelay", DELAY))}
        workers = [{"status": "READY"}] * int(self.asked["initial_workers"])
        return HttpResponse(200, {}, msgspec.json.encode([given | {"workers": workers} | self.other]))


DELAY = "max_batch_delay"  # TorchServe's suite uses batch_delay, which its server ignores
HERE = Endpoint("h", 1)


def test_an_archive_is_registered_with_the_settings_of_its_point(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (point, *_) = suite_points(case(folder, batch_size=(8,), workers=(2,), batch_delay_ms=70))
    monkeypatch.setattr(suite, "fetch", asked := Management())
    suite._register(HERE, "m.mar", point)
    expected = {"url": "m.mar", "batch_size": "8", DELAY: "70", "initial_workers": "2", "synchronous": "true"}
    assert asked.asked == {**expected, "model_name": suite.NAME}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"maxBatchDelay": 100}, "cpu, 2 workers, batch 8: expected batch_delay 70, but the server has 100"),
        ({"batchSize": 1}, "expected batch_size 8, but the server has 1"),
        ({"workers": [{"status": "READY"}, {"status": "UNLOADING"}]}, "expected workers 2, but the server has 1"),
        ({"status": 507}, "the server refuses: status 507: too large"),
    ],
)
def test_a_server_with_other_settings_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], words: str
) -> None:
    (point, *_) = suite_points(case(folder, batch_size=(8,), workers=(2,), batch_delay_ms=70))
    monkeypatch.setattr(suite, "fetch", Management(**other))
    with pytest.raises(PenstockError, match=words):
        suite._register(HERE, "m.mar", point)
