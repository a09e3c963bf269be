"""Values reach a run as they were written, and its files return them."""

import json
import shlex

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.config.documents import dump_yaml, parse_yaml
from flatout.config.schema import load_config, override
from flatout.errors import ConfigError
from flatout.training.run_dir.layout import read_config, write_config

ODD_TEXT = st.text(alphabet="0123456789abxeE.:+-_ #'\"\n\r\t~<=|>&*!%@[]{},\\\x85\u2028")
TEXTS = st.one_of(st.text(), ODD_TEXT)
VALUES = st.one_of(
    TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.lists(TEXTS)
)


@settings(deadline=None)
@given(st.dictionaries(TEXTS, VALUES))
def test_what_is_written_is_read_back_equal_by_any_reader(document):
    text = dump_yaml(document)
    assert parse_yaml(text, name="test") == document
    assert yaml.safe_load(text) == document


@settings(deadline=None)
@given(TEXTS, st.floats(min_value=1e-300, allow_infinity=False), st.integers(1, 10**30))
def test_a_config_reads_an_override_as_what_it_was_made_from(text, number, count):
    values = {"train.sample_prompt": text, "optim.lr": number, "train.steps": count}
    config = load_config(None, [f"{key}={value}" for key, value in values.items()])
    assert {key: config.value(key) for key in values} == values
    shown = [shlex.split(override(key, value)) for key, value in values.items()]
    assert load_config(None, [word for words in shown for word in words]) == config


@pytest.mark.parametrize(
    "text",
    [
        "data/x #2",
        "The ",
        " indented",
        "first line\nsecond line\n\n",
        "# Title #1",
        "key: value",
        "'quoted'",
        '"quoted"',
        "1e3",
        "010",
        "1:30",
        "2026-01-02",
        "true",
        "no",
        "[v2]",
        "{a}",
    ],
)
def test_a_text_key_takes_the_argument_as_it_is(text, tmp_path):
    keys = ("train.sample_prompt", "data.path", "log.run_name", "name")
    config = load_config(None, [f"{key}={text}" for key in keys])
    write_config(tmp_path, config)
    for read in (config, read_config(tmp_path)):
        assert [read.value(key) for key in keys] == [text] * 4
    stored = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert stored["resolved"]["train"]["sample_prompt"] == text


def test_names_are_text_between_commas_or_a_list():
    for text, tags in {
        "#1, a #2": ("#1", "a #2"),
        "1e3,010": ("1e3", "010"),
        "['a, b', c]": ("a, b", "c"),
        "": (),
        "null": (),
    }.items():
        assert load_config(None, [f"log.tags={text}"]).log.tags == tags


def test_text_of_a_models_own_key_keeps_what_follows_a_number_sign():
    config = load_config(None, ["model.note=x #2", "model.other='y'", "model.third=#3"])
    assert config.model.own() == {"note": "x #2", "other": "y", "third": "#3"}


@pytest.mark.parametrize(
    ("written", "steps"), [("010", 10), ("0123", 123), ("0x10", 16), ("1_0", 10), ("1e1", 10)]
)
def test_whole_numbers_are_decimal(written, steps, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"train:\r\n  steps: {written}\t\r\n")
    assert load_config(recipe).train.steps == steps
    assert load_config(None, [f"train.steps={written}"]).train.steps == steps


@pytest.mark.parametrize(
    ("written", "about"),
    [
        ("steps: 1:30", r"train\.steps='1:30' is not valid: it must be a whole number"),
        ("steps: 0b11", r"train\.steps='0b11' is not valid"),
        ("epochs: .inf", r"train\.epochs=inf is not valid: it must be a finite number"),
        ("sample_prompt: 1e3", r"sample_prompt=1000\.0 .* must be text\. Fix: Put it in quotes\."),
    ],
)
def test_other_numbers_are_errors_that_name_the_key(written, about, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"train:\n  {written}\n")
    with pytest.raises(ConfigError, match=about):
        load_config(recipe)


def test_a_dataset_of_a_mix_may_have_a_number_sign_in_its_name():
    mix = {"data/x #2": 1.0, "it's 100%": 2.0}
    assert load_config(None, [f"data.mix={json.dumps(mix)}"]).data.mix == mix
