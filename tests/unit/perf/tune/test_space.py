"""Spaces and settings are parsed, written again and ordered by cost; errors are clear."""

import pytest

from penstock.errors import ConfigError
from penstock.perf.tune.space import CandidateSettings, Value, parse_settings, parse_space, settings_of


def values(text: str, parameter: str) -> tuple[Value, ...]:
    return next(k.values for k in parse_space(text).parameters if k.name == parameter)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch=1..32", (1, 2, 4, 8, 16, 32)),
        ("batch=1..12", (1, 2, 4, 8, 12)),
        ("batch=3..20", (3, 4, 8, 16, 20)),
        ("batch=1..32/8", (1, 9, 17, 25)),
        ("batch=7..7", (7,)),
        ("batch=4,4, 2", (4, 2)),
        ("batch=auto,8..16", ("auto", 8, 16)),
    ],
)
def test_a_range_has_both_ends_and_powers_of_two_unless_it_has_a_step(text: str, expected: tuple[Value, ...]) -> None:
    assert values(text, "batch") == expected


def test_a_space_is_parsed_and_written_again() -> None:
    text = "batch=1..8, instances=1,2,precision=fp32,fp16,bf16,hold=auto,0,0.005,batching.timeout_s=5"
    space = parse_space(text)
    assert len(space) == 4 * 2 * 3 * 3
    assert parse_space(space.text) == space
    assert values(text, "hold") == ("auto", 0, 0.005)
    assert values("options.beams=1..4,options.kind=a,b", "options.kind") == ("a", "b")
    assert values("device=cpu,cuda:0", "device") == ("cpu", "cuda:0")


def test_values_have_their_toml_types_also_after_they_were_written() -> None:
    assert [type(v) for v in values("options.a=true,2,0.5,nan,inf,yes", "options.a")] == [
        bool,
        int,
        float,
        str,
        str,
        str,
    ]
    assert values("batching.idempotent=true,false", "batching.idempotent") == (True, False)
    text = "hold=0.0012345678,options.half=false,options.large=1234567.5"
    assert parse_settings(text).text == text
    assert parse_settings(text).get("options.half") is False


def test_equal_settings_have_one_text_which_is_parsed_again() -> None:
    one, other = settings_of({"instances": 2, "batch": 8}), parse_settings("batch=8,instances=2")
    assert one == other
    assert hash(one) == hash(other)
    assert one.text == "batch=8,instances=2" == str(one)
    assert parse_settings(str(CandidateSettings())) == CandidateSettings()
    assert str(CandidateSettings()) == "baseline"
    assert one.put(batch=4).text == "batch=4,instances=2"
    assert one.put(**{"batching.slo_s": 0.1}).get("batching.slo_s") == 0.1
    with pytest.raises(ConfigError, match=r"'batch' has several values; expected one"):
        parse_settings("batch=1..4")


def test_cheaper_settings_have_fewer_instances_then_smaller_batches_then_earlier_values() -> None:
    space = parse_space("precision=fp32,fp16,batch=8,1,instances=2,1")
    first = [found.text for found in space][:5]
    assert first == [
        "batch=1,instances=1,precision=fp32",
        "batch=1,instances=1,precision=fp16",
        "batch=8,instances=1,precision=fp32",
        "batch=8,instances=1,precision=fp16",
        "batch=1,instances=2,precision=fp32",
    ]
    assert space.cost(parse_settings("batch=auto")) > space.cost(parse_settings("batch=512"))


def test_neighbours_differ_in_one_parameter_by_one_step_or_in_any_word() -> None:
    space = parse_space("batch=1..8,precision=fp32,fp16,bf16")
    near = {found.text for found in space.neighbours(parse_settings("batch=2,precision=fp32"))}
    assert near == {
        "batch=1,precision=fp32",
        "batch=4,precision=fp32",
        "batch=2,precision=fp16",
        "batch=2,precision=bf16",
    }
    assert all(found in space for found in map(parse_settings, near))
    both = parse_space("batch=1..8,instances=1..4")
    assert {found.text for found in both.neighbours(parse_settings("batch=4,instances=2"))} == {
        "batch=2,instances=2",
        "batch=8,instances=2",
        "batch=4,instances=1",
        "batch=4,instances=4",
        "batch=2,instances=4",
        "batch=8,instances=1",
    }
    assert parse_settings("batch=3,precision=fp32") not in space


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no parameter"),
        ("  ", "names no parameter"),
        ("1..32", "names no parameter"),
        ("batch=", "'batch' has an empty value"),
        ("batch=1,,2", "'batch' has an empty value"),
        ("batches=1..32", "no parameter 'batches'; did you mean 'batch'"),
        ("colour=1", "no parameter 'colour'"),
        ("batch=32..1", "runs backwards; expected 1..32"),
        ("batch=1..", "is no range"),
        ("batch=1..8/0", "steps of 0"),
        ("batch=1-8", "write a range as 1..8"),
        ("batch=0..999999999999/1", "has 1,000,000,000,000 values; expected at most 20,000"),
        ("batch=1..9999999999999999", "is no range"),
        ("batch=true", "batch: found true, expected a whole number"),
        ("batching.idempotent=1", "batching.idempotent: found 1, expected true or false"),
        ("batch=0..8", "batch: found 0, expected a whole number from 1 to 2147483647"),
        ("batch=2.5", "batch: found 2.5, expected a whole number"),
        ("instances=some", "instances: found the string 'some', expected a whole number"),
        ("hold=-1", "hold: found -1, expected a number from 0 to 2147483647"),
        ("batch=1,batch=2", "'batch' appears twice"),
        ("sizes=8", "sizes: found 8, expected any or auto; a list belongs into the configuration"),
        ("devices=cpu", "'devices' is called 'device' here"),
        ("batching.max_batch_size=4", "is called 'batch' here"),
        ("batching.timeout_s=0", "batching.timeout_s: found 0, expected a number above 0"),
        ("target=a.py:B", "no parameter 'target'"),
        ("options.=1", "no parameter 'options.'"),
        ("batch=1..400/1,instances=1..60/1", "24,000 settings; expected at most 20,000"),
    ],
)
def test_an_error_in_a_space_is_explained(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_space(text)
    assert message in str(caught.value)
