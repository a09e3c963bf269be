"""The section `lora`: values, contradictions, files of runs without it."""

import pytest

from flatout.config.schema import RunConfig, load_config, validate
from flatout.errors import ConfigError


def test_targets_are_a_list_or_names_with_commas():
    config = load_config(None, ["lora.rank=4", "lora.targets=q,v"])
    assert config.lora.targets == ("q", "v")
    assert load_config(None, ["lora.rank=4", "lora.targets=[q, v]"]).lora == config.lora
    assert RunConfig().lora.targets == ("all-linear",)
    assert (config.lora.scale, config.with_values({"lora.alpha": 16}).lora.scale) == (1.0, 4.0)


def test_a_config_without_adapters_has_no_section():
    """Files and names of runs are those of versions that had no such section."""
    assert "lora" not in RunConfig().to_dict()
    config = load_config(None, ["lora.rank=4", "lora.targets=q,v", "lora.dropout=0.1"])
    assert validate(config.to_dict()) == config
    assert config.digest() != RunConfig().digest()


@pytest.mark.parametrize(
    ("overrides", "message", "fix"),
    [
        ("lora.rank=0", "lora.rank=0 is not valid: it must be at least 1", "remove it"),
        ("lora.alpha=16", "lora.alpha has no effect without lora.rank", "lora.rank=8"),
        ("lora.rank=4 lora.targets=[]", "names no layer", "all-linear"),
        ("lora.rank=4 lora.dropout=1", "less than 1", "lora.dropout"),
        ("lora.rank=4 optim.kind=muon", "optim.kind=muon", "optim.kind=adamw"),
        ("load_in_4bit=true", "load_in_4bit", "no QLoRA"),
    ],
)
def test_contradictions_are_rejected(overrides, message, fix):
    with pytest.raises(ConfigError) as refused:
        load_config(None, overrides.split())
    assert message in refused.value.what
    assert fix in refused.value.fix
