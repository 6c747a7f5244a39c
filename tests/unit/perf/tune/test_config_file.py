import errno
import os
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.config.load import load_config
from penstock.config.schema import BatchingConfig, ModelConfig
from penstock.errors import ConfigError, PenstockError
from penstock.perf.tune.config_file import MARK, TunedFile, changed_keys, patched

TEXT = """\
# ours
[server]
port = 8080  # behind the proxy

[models.digits]
# the team's
target = "app.py:Digits"
instances = 2   # as last year

[models.digits.batching]
# asked of sales
slo_s = 0.05
"""
DIGITS = ModelConfig(target="app.py:Digits")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "penstock.toml"
    path.write_text(TEXT)
    return path


def comments(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


def test_only_the_tuned_keys_change_and_every_comment_stays(file: Path) -> None:
    TunedFile(str(file), "digits", DIGITS).write(
        {"instances": 4, "batching.max_batch_size": 16, "devices": ["cpu"], "precision": "fp16"}, "p99<=50ms\nsee there"
    )
    text = file.read_text()
    expected = tomllib.loads(TEXT)
    expected["models"]["digits"] |= {"instances": 4, "devices": ["cpu"], "precision": "fp16"}
    expected["models"]["digits"]["batching"]["max_batch_size"] = 16
    assert tomllib.loads(text) == expected
    assert set(comments(TEXT)) < set(comments(text))
    new = 'devices = ["cpu"]\nprecision = "fp16"\n'
    assert f"[models.digits]\n{MARK}: p99<=50ms\n{MARK}: see there\n{new}# the team's\n" in text


def test_a_comment_stays_in_place_and_line_endings_are_kept() -> None:
    text = (
        '[models.a] # ours\ntarget = "x:y"\n\n# about the options\n[models.a.options]\nwidth = 3\n\n'
        '# about the other model\n[models.b]\ntarget = "x:y"\n'
    )
    values = {"threads": 1, "batching.max_batch_size": 2, "options.width": 4, "options.height": 5}
    found = patched(text, "a", values, "why")
    assert found == (
        f'[models.a] # ours\n{MARK}: why\nthreads = 1\nbatching.max_batch_size = 2\ntarget = "x:y"\n\n'
        "# about the options\n[models.a.options]\nheight = 5\nwidth = 4\n\n# about the other model\n[models.b]\n"
        'target = "x:y"\n'
    )
    assert patched(text.replace("\n", "\r\n"), "a", values, "why") == found.replace("\n", "\r\n")


def test_if_no_place_keeps_the_meaning_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.perf.tune.config_file.variants", lambda *_: iter(["[", TEXT]))
    with pytest.raises(ConfigError, match=r"found no place for the tuned keys; expected \[models\.digits\]"):
        patched(TEXT, "digits", {"threads": 1}, "why")


def test_a_second_run_replaces_the_comment_of_the_first() -> None:
    once = patched(TEXT, "digits", {"instances": 4}, "first")
    twice = patched(once, "digits", {"instances": 8}, "second")
    assert twice == once.replace("first", "second").replace("= 4", "= 8")


def test_a_multi_line_string_that_resembles_a_header_or_our_comment_is_left_alone() -> None:
    text = f"[models.a.options]\nprompt = '''\n[models.a]\n{MARK}: x\n'''\n[models.a]\ntarget = 'x:y'\n"
    text = text.replace("[models.a]\ntarget", "[models.b]\ntarget = 'x:y'\n[models.a]\ntarget", 1)
    found = patched(text, "a", {"threads": 1}, "why")
    expected = tomllib.loads(text)
    expected["models"]["a"]["threads"] = 1
    assert tomllib.loads(found) == expected
    assert found.startswith(f"{MARK}: why\n")


@pytest.mark.parametrize(
    "text",
    [
        'models = { "m" = { target = "x:y", batching = { slo_s = 1.0 } } }\n',
        'models.m.target = "x:y"\n',
        '[models."m"]\ntarget = "x:y"\n',
        '[models]\nm.target = "x:y"\nm.batching.policy = "none"\n',
        'models.m.target = "x:y"\nmodels.n.target = "x:y"\n[server]\nport = 1\n',
        '[models.m]\ntarget = "x:y"\nprecision = "fp32"\nbatching = { slo_s = 1.0 }\n',
        '[models.m]\ntarget = "x:y"\nbatching.slo_s = 1.0\n',
        '[models.m.batching]\nslo_s = 1.0\n[server]\nport = 1\n[models.m]\ntarget = "x:y"\n',
    ],
)
def test_a_model_may_have_any_toml_form_and_none_removes_a_key(text: str) -> None:
    found = patched(
        text, "m", {"batching.max_batch_size": 2, "threads": 1, "precision": None, "options.a": None}, "why"
    )
    expected = tomllib.loads(text)
    expected["models"]["m"] |= {"threads": 1}
    expected["models"]["m"].pop("precision", None)
    expected["models"]["m"].setdefault("batching", {})["max_batch_size"] = 2
    assert tomllib.loads(found) == expected
    assert found.count(f"{MARK}: why") == 1


def test_a_new_file_has_the_model_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apps").mkdir()
    (tmp_path / "conf").mkdir()
    monkeypatch.chdir(tmp_path)
    model = ModelConfig(target="apps/app.py:Digits", options={"size": 3}, weights="apps/w.pt", instances=2)
    TunedFile("conf/penstock.toml", "digits", model).write({"batching.max_batch_size": 8}, "why")
    found = load_config("conf/penstock.toml", env={}).models["digits"]
    assert os.path.realpath(found.target.partition(":")[0]) == str(tmp_path / "apps/app.py")
    assert os.path.realpath(found.weights or "") == str(tmp_path / "apps/w.pt")
    assert (found.options, found.instances, found.batching.max_batch_size) == ({"size": 3}, 2, 8)
    TunedFile("new.toml", "m", ModelConfig(target="pkg.mod:M")).write({"instances": 2}, "why")
    assert tomllib.loads(Path("new.toml").read_text())["models"]["m"]["target"] == "pkg.mod:M", "no file, but a module"


def test_keys_that_differ_from_the_measured_ones_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TEXT + "[models.digits.options]\nwidth = 3\nheight = 4\n")
    model = ModelConfig(target=f"{tmp_path}/app.py:Digits", threads=2, options={"width": 4})
    tuned = TunedFile(str(file), "digits", model)
    tuned.write({"instances": 1, "options.width": 5}, "why")
    (record,) = caplog.records
    assert "other=threads,options.height,batching.slo_s consequence=this file serves" in record.message
    caplog.clear()
    as_there = load_config(str(file), env={}).models["digits"]
    TunedFile(str(file), "digits", as_there).write({"instances": 4, "batching.max_batch_size": 8}, "why")
    TunedFile(str(tmp_path / "new.toml"), "digits", model).write({"instances": 4, "options.width": 5}, "why")
    assert not caplog.records


def test_a_section_with_the_same_target_is_the_model_whatever_its_name(file: Path) -> None:
    assert TunedFile(str(file), "other", ModelConfig(target=f"{file.parent}/app.py:Digits")).name == "digits"


def test_a_new_file_next_to_the_tuned_configuration_is_a_copy_of_it(file: Path) -> None:
    TunedFile(str(file.parent / "tuned.toml"), "digits", DIGITS, str(file)).write({"instances": 4}, "why")
    assert file.read_text() == TEXT
    assert tomllib.loads((file.parent / "tuned.toml").read_text())["server"] == {"port": 8080}
    (file.parent / "there").mkdir()
    with pytest.raises(ConfigError, match=r"paths in .*penstock\.toml are relative to its folder"):
        TunedFile(str(file.parent / "there/tuned.toml"), "digits", DIGITS, str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.digits\n", r"not valid TOML: .*line 1"),
        (TEXT.replace("digits", "numbers").replace("Digits", "N"), r"no \[models\.digits\].*it has numbers"),
        ("[server]\nport = 1\n", "it has no models"),
        ("[models.digits]\n", "found no target"),
        (TEXT.replace("port", "prt"), "unknown key 'prt'; did you mean 'port'"),
    ],
)
def test_a_file_that_is_malformed_or_lacks_the_model_is_refused_before_anything_is_measured(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        TunedFile(str(file), "digits", DIGITS)
    assert file.read_text() == text


def test_the_tuned_pipeline_itself_cannot_receive_the_result(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text('[decode]\nops = "decode_image"\n')
    with pytest.raises(ConfigError, match=r"pipeline\.toml: is the target itself, not a configuration"):
        TunedFile(str(file), "pipeline", ModelConfig(target=str(file)))
    TunedFile(str(tmp_path / "new.toml"), "pipeline", ModelConfig(target=str(file))).write({"instances": 2}, "why")
    assert load_config(str(tmp_path / "new.toml"), env={}).models["pipeline"].instances == 2


def test_an_unwritable_file_or_folder_is_an_error_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no writable folder"):
        TunedFile(str(file.parent / "no/penstock.toml"), "digits", DIGITS)
    for denied, message in ((file.parent, "there is no writable folder"), (file, "change its mode, or name another")):
        monkeypatch.setattr(os, "access", lambda path, mode, denied=denied: path != str(denied))
        with pytest.raises(ConfigError, match=message):
            TunedFile(str(file), "digits", DIGITS)


def test_an_invalid_value_or_a_full_disk_leaves_the_file_unchanged(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = TunedFile(str(file), "digits", DIGITS)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match="instances: found -1"):
        tuned.write({"instances": -1}, "why")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PenstockError, match="cannot be written: No space left on device; it is unchanged"):
        tuned.write({"instances": 4}, "why")
    assert file.read_text() == TEXT
    assert os.listdir(file.parent) == ["penstock.toml"]


def test_a_link_and_the_mode_of_the_file_are_kept(file: Path) -> None:
    link = file.parent / "link.toml"
    file.chmod(0o600)
    link.symlink_to(file)
    TunedFile(str(link), "digits", DIGITS).write({"instances": 4}, "why")
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "instances = 4   # as last year" in file.read_text()


def test_changed_keys_exclude_defaults() -> None:
    model = ModelConfig(target="x:y", devices=("cuda",), batching=BatchingConfig(slo_s=0.1))
    assert changed_keys(model) == {"target": "x:y", "devices": ["cuda"], "batching": {"slo_s": 0.1}}


def test_without_tomlkit_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomlkit", None)
    with pytest.raises(ConfigError, match=r"--write needs tomlkit.*pip install 'optuna"):
        TunedFile(str(tmp_path / "penstock.toml"), "digits", DIGITS)


def test_changes_made_during_the_measurement_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text(TEXT)
    tuned = TunedFile(str(file), "digits", DIGITS)
    file.write_text(TEXT.replace("8080", "9090"))
    tuned.write({"instances": 4}, "why")
    found = tomllib.loads(file.read_text())
    assert (found["server"]["port"], found["models"]["digits"]["instances"]) == (9090, 4)
    file.write_text("[server]\nport = 1\n")
    with pytest.raises(ConfigError, match=r"there is no \[models\.digits\]"):
        tuned.write({"instances": 8}, "why")
