"""The files of the benchmark suite: the guide's example is read unchanged; mistakes are reported with their line."""

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.perf.bench.suite_yaml import Processor, SuiteCase, read_suite, suite_points

GUIDE = Path(__file__).with_name("guide.yaml").read_text()
TEMPLATE = """\
ts_version:
    branch: &ts_version "master"
models:
    - "model.yaml"
hardware: &hardware "gpu"
metrics_cmd:
    - "cmd": "aws cloudwatch put-metric-data"
    - "--namespace": ["torchserve_benchmark_nightly_", *hardware]
report_cmd:
    - "cmd": "aws s3 cp --recursive"
    - "dest": ["s3://somewhere", "today", *hardware]
"""


def read(folder: Path, text: str) -> tuple[list[SuiteCase], list[str]]:
    path = folder / "models.yaml"
    path.write_text(text)
    return read_suite([path])


def test_the_guides_yaml_is_read_unchanged(tmp_path: Path) -> None:
    (case,), notes = read(tmp_path, GUIDE)
    assert case.text == "Model_name eager_mode"
    assert (case.url, case.input) == ("Path to .mar file", "Path to model input")
    assert (case.workers, case.batch_size, case.concurrency) == ((1, 4), (1, 2, 4, 8), (10,))
    assert (case.batch_delay_ms, case.requests) == (100, 10000)
    assert case.processors == (Processor(), Processor("all"))
    assert notes == ["benchmark_engine ab: penstock's own generator sends the load"]
    found = suite_points(case)
    assert len(found) == 16
    assert found[0].label == "Model_name eager_mode,device=cpu,instances=1,batch=1,hold=100ms"
    assert found[1].settings == "cpu, 1 worker, batch 2"
    assert found[1].short == "batch=2,instances=1,device=cpu"
    assert found[-1].label == "Model_name eager_mode,device=gpus all,instances=4,batch=8,hold=100ms"


def test_defaults_are_those_of_torchserves_suite(tmp_path: Path) -> None:
    (case,), notes = read(tmp_path, "m:\n  any:\n    url: app.py:Model\n")
    assert case.concurrency == (10,)
    (case,), notes = read(tmp_path, "m:\n  any: {url: a.mar, batch_delay: 0, requests: 1}\n")
    assert (case.batch_delay_ms, case.requests) == (0, 1)
    (case,), notes = read(tmp_path, "m:\n  any:\n    url: app.py:Model\n    concurrency: [1, 8, 1]\n")
    assert (case.workers, case.batch_size, case.batch_delay_ms, case.requests) == ((1,), (1,), 200, 100)
    assert suite_points(case)[0].short == "batch=1,instances=1"
    assert (case.concurrency, case.processors, case.input, notes) == ((1, 8), (Processor(),), None, [])


def test_a_template_names_the_files_and_picks_the_hardware(tmp_path: Path) -> None:
    (tmp_path / "models_config").mkdir()
    (tmp_path / "models_config" / "model.yaml").write_text(GUIDE)
    (case,), notes = read(tmp_path, TEMPLATE)
    assert case.processors == (Processor("all"),)
    assert case.folder == tmp_path / "models_config"
    assert [note.partition(":")[0] for note in notes] == [
        "ts_version is ignored",
        "metrics_cmd is ignored",
        "report_cmd is ignored",
        "benchmark_engine ab",
    ]
    (case,), _ = read(tmp_path, 'models: ["model.yaml"]\n')
    assert case.processors == (Processor(),), "cpu by default"


def test_ignored_keys_are_noted(tmp_path: Path) -> None:
    text = (
        "m:\n  e:\n    url: a.mar\n    exec_env: docker\n    image: pytorch/torchserve\n    backend_profiling: true\n"
    )
    _, notes = read(tmp_path, text)
    assert notes[0] == "exec_env docker: m e runs on this machine, not in a container"
    assert [note.split()[0] for note in notes[1:]] == ["backend_profiling", "image"]


def test_a_model_without_the_templates_hardware_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(GUIDE + "other:\n  e:\n    url: o.mar\n")
    (case,), notes = read(tmp_path, TEMPLATE)
    assert case.model == "Model_name"
    assert "other e is left out: " in notes[-1]


@pytest.mark.parametrize(
    ("processors", "found"),
    [
        ("cpu", [0]),
        ("{gpus: all}", ["all"]),
        ("[cpu, gpus: 1, gpus: '2', cpu]", [0, 1, 2]),
        ("[]", "processors: found a list of 0, expected cpu"),
        ("[gpus: '0']", "gpus: N from 1"),
        ("[gpus: few]", "gpus: N from 1"),
        ("[gpus: true]", "gpus: N from 1"),
        ("[{gpus: 1, tpus: 1}]", "cpu, gpus: all, or gpus: N"),
        ("[[gpus]]", r"processors\[0\]: found a list of 1, expected"),
    ],
)
def test_processors_are_the_cpu_all_gpus_or_some(tmp_path: Path, processors: str, found: list[int | str] | str) -> None:
    text = f"m:\n  e:\n    url: a.mar\n    processors: {processors}\n"
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=f"models.yaml:4: m.e: .*{found}"):
            read(tmp_path, text)
    else:
        assert [each.gpus for each in read(tmp_path, text)[0][0].processors] == found


def test_a_workflow_is_left_out_and_alone_refused(tmp_path: Path) -> None:
    workflow = "dog:\n  workflow:\n    url: https://h/dog_wf.war\n    retry_attempts: 5\n"
    (case,), notes = read(tmp_path, workflow + "m:\n  e:\n    url: a.mar\n")
    assert (case.model, notes) == ("m", ["dog workflow is left out: workflows are not supported"])
    with pytest.raises(ConfigError, match=r"models\.yaml: nothing is left to run: dog workflow is left out"):
        read(tmp_path, workflow)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("m:\n  e:\n    url: [\n", 4, "not valid YAML"),
        ("m:\n\te:\n", 2, "not valid YAML"),
        (
            "m:\n  e:\n    url: !!python/object/apply:os.system [exit]\n",
            3,
            "not valid YAML: could not determine a const",
        ),
        ("a: {e: {url: u}}\n---\nb: {e: {url: u}}\n", 2, "not valid YAML: but found another document"),
        ("m:\n  e:\n    url: a.mar\n    ? [a]\n    : 1\n", 4, "not valid YAML: found unhashable key"),
        pytest.param("[" * 1000, None, "not valid YAML: maximum recursion depth", id="deep"),
        ("- a\n", None, "found a list of 1, expected Model_name"),
        ("", None, "found nothing"),
        ("m:\n", 1, "found nothing, expected modes of the model m"),
        ("m: {}\n", 1, "found a table, expected modes of the model m"),
        ("m: [e]\n", 1, "found a list of 1, expected modes of the model m"),
        ("m:\n  e: 3\n", 2, "found 3, expected the keys of e"),
        ("m:\n  e:\n    workers: 2\n", 2, "found no url"),
        ("m:\n  e:\n    url: a.mar\n    batchsize: 2\n", 4, "unknown key 'batchsize'.*did you mean 'batch_size'"),
        (
            "m:\n  e:\n    url: a.mar\n    workers: []\n",
            4,
            "workers: found a list of 0, expected a whole number from 1",
        ),
        ("m:\n  e:\n    url: a.mar\n    workers: [1, 0]\n", 4, "whole number from 1"),
        ("m:\n  e:\n    <<: {url: a.mar, workers: 0}\n", 2, "e: workers: found 0, expected a whole number from 1"),
        ("m:\n  e:\n    url: a.mar\n    workers: true\n", 4, "whole number from 1"),
        ("m:\n  e:\n    url: a.mar\n    batch_delay: -1\n", 4, "batch_delay: found -1, expected a whole number from 0"),
        ("m:\n  e:\n    url: a.mar\n    requests: many\n", 4, "requests: found the string 'many'"),
        ("m:\n  e:\n    url: 3\n", 3, "url: found 3, expected a string"),
        ("m:\n  e:\n    url: a.mar\n    exec_env: dokcer\n", 4, "did you mean 'docker'"),
        ("m:\n  e:\n    url: a.mar\n    benchmark_engine: wrk\n", 4, 'expected "ab" or "locust" or "penstock"'),
        ("m:\n  e:\n    url: a.mar\n    processors: [tpu]\n", 4, r"processors\[0\]: found the string 'tpu'"),
        ("m:\n  e:\n    url: a.mar\n    processors: [gpus: 0]\n", 4, "gpus: N from 1"),
        ("m:\n  e:\n    url: a.mar\n    url: b.mar\n", 4, "duplicate key 'url'"),
        ("7:\n  e:\n    url: a.mar\n", 1, "found the key 7, expected a string"),
        ("models: [none.yaml]\n", 1, "no file 'none.yaml', expected it at [^,]*[^g]/none.yaml"),
        ("models: []\nhardware: gpu\n", 2, "found gpu, expected one that a model of the template lists"),
        ("models:\n- 3\n", 2, "found 3, expected the name of a YAML file"),
        ("models: []\nhardwear: cpu\n", 2, "unknown key 'hardwear'.*did you mean 'hardware'"),
        ("models: []\nhardware: neuron\n", 2, "found the string 'neuron', expected cpu or gpu"),
    ],
)
def test_a_mistake_is_reported_with_file_and_line(tmp_path: Path, text: str, line: int | None, words: str) -> None:
    place = f"models.yaml{'' if line is None else f':{line}'}: "
    with pytest.raises(ConfigError, match=f"{place}.*{words}"):
        read(tmp_path, text)


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(GUIDE)
    with pytest.raises(ConfigError, match=r"b.yaml:2: Model_name eager_mode is defined twice, first at .*a.yaml:2"):
        read_suite([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    with pytest.raises(ConfigError, match=r"defined twice, first at .*a.yaml:2"):
        read_suite([tmp_path / "a.yaml", tmp_path / "a.yaml"])
    with pytest.raises(ConfigError, match=r":2: a b c is defined twice, first at .*:1"):
        read(tmp_path, "a: {b c: {url: u}}\na b: {c: {url: u}}\n")


def test_lists_in_lists_without_end_are_refused_with_few_words(tmp_path: Path) -> None:
    lists = "".join(f"        - &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 12))
    with pytest.raises(ConfigError, match=r"m\.e: workers.*, expected a whole number from 1") as found:
        read(tmp_path, f"m:\n  e:\n    url: a.mar\n    workers:\n        - &l0 [1]\n{lists}")
    assert len(found.value.message) < 400
    with pytest.raises(ConfigError, match=r"m\.e: workers"):
        read(tmp_path, "m:\n  e:\n    url: a.mar\n    workers: &a [*a]\n")


def test_a_missing_and_an_oversized_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file"):
        read_suite([tmp_path / "none.yaml"])
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read(tmp_path, "#" * 2**20 + "\na: b\n")
