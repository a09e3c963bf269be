import pytest

from flatout.assembly.preflight import check, open_dataset
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, DataError, HardwareError


@pytest.mark.parametrize(
    ("key", "value", "error", "said"),
    [
        ("model.kind", "transfomer", ConfigError, "Did you mean 'transformer'"),
        ("optim.kind", "adamv", ConfigError, "Did you mean 'adamw'"),
        ("schedule.kind", "cosin", ConfigError, "Did you mean 'cosine'"),
        ("speedups", "auto,-compil", ConfigError, "Did you mean 'compile'"),
        ("train.device", "cudda", HardwareError, "Did you mean 'cuda'"),
        ("data.path", "nowhere", DataError, "flatout prepare"),
        ("data.path", None, ConfigError, "data.path is not set"),
    ],
)
def test_invalid_settings_are_reported(tiny_config, key, value, error, said):
    check(tiny_config())
    with pytest.raises(error, match=said):
        check(tiny_config(**{key.replace(".", "__"): value}))


def test_each_dataset_of_a_mix_must_contain_a_sequence(write_tiny, tmp_path):
    large, small = write_tiny(tmp_path / "large"), write_tiny(tmp_path / "small", num_documents=1)
    tokens = Dataset.open(small).split("train").num_tokens
    mix = f"data.mix={{{large}: 3, {small}: 1}}"
    open_dataset(load_config(None, [mix, f"data.seq_len={tokens - 1}"]))
    needs = rf"One sequence of data\.seq_len={tokens} needs {tokens + 1}"
    with pytest.raises(DataError, match=rf"small has {tokens} tokens for training. {needs}") as bad:
        open_dataset(load_config(None, [mix, f"data.seq_len={tokens}"]))
    advised = int(bad.value.fix.partition("data.seq_len=")[2].partition(",")[0])
    assert 1 <= advised <= tokens // 8
