import pytest

from flatout.assembly.preflight import open_dataset
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import DataError


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
