"""A file or a list of overrides with several words of another tool is answered at once."""

import pytest
import yaml

from flatout.config.schema import load_config
from flatout.errors import ConfigError

CHARACTERS = {
    "model": {"d_model": 384, "num_layers": 6},
    "dataset": {"name": "shakespeare", "max_chars": 1_000_000, "seq_len": 256},
    "training": {"batch_size": 256, "epochs": 25, "max_lr": 1e-3, "pct_start": 0.1},
}


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old config.yaml"
    path.write_text(yaml.safe_dump(CHARACTERS))
    return path


def test_a_file_of_another_tool_is_to_be_converted(old):
    with pytest.raises(ConfigError) as refused:
        load_config(old)
    assert "There are no config keys dataset.max_chars, dataset.name," in refused.value.what
    assert f"`flatout convert '{old}' --out my.yaml`" in refused.value.fix


def test_overrides_of_another_tool_are_answered_one_by_one():
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["training.batch_size=4", "learning_rate=3", "what=2"])
    assert "no config keys training.batch_size, learning_rate, what." in refused.value.what
    assert "training.batch_size: Did you mean 'batch.rows_per_device'?" in refused.value.fix
    assert "learning_rate: Did you mean 'optim.lr'?" in refused.value.fix
