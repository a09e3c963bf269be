import pytest

from flatout.config.schema import RunConfig, load_config, nested, parse_overrides
from flatout.errors import ConfigError, on_one_line


def test_values_are_parsed_as_yaml_except_for_text_keys():
    actual = parse_overrides(
        ["optim.lr=3e-4", "train.sample_prompt=3", "data.path=", "model.sizes=[1, 2]", "x = true"],
        RunConfig,
    )
    assert actual == {
        "optim.lr": 3e-4,
        "train.sample_prompt": "3",
        "data.path": None,
        "model.sizes": [1, 2],
        "x": True,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1, a: 2}", "line 1: the key 'a' is given twice"),
        ("a: 1\na: 2", "line 2: the key 'a'"),
        ("{1: 2}", "not text"),
    ],
)
def test_valid_yaml_with_invalid_keys_has_its_own_message(text, message):
    with pytest.raises(ConfigError) as refused:
        parse_overrides([f"data.mix={text}"], RunConfig)
    assert f"data.mix={on_one_line(text)}, " in refused.value.what
    assert message in refused.value.what
    assert "is not YAML" not in refused.value.what


def test_contradictory_keys_are_rejected():
    assert nested({"a.b": 1, "a.c.d": 2}) == {"a": {"b": 1, "c": {"d": 2}}}
    assert nested({"a.b": 1, "a.c": 2, "a": {"c": 3}}) == {"a": {"b": 1, "c": 3}}
    with pytest.raises(ConfigError, match=r"optim\.lr contradicts the earlier optim=3"):
        nested({"optim": 3, "optim.lr": 1})


def test_one_override_needs_no_list():
    assert load_config(None, "optim.lr=0.5").optim.lr == 0.5
