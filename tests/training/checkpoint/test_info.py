import json

import pytest

from flatout.training.checkpoint.info import INFO, CheckpointInfo, read_info

CONTENT = {
    "step": 3,
    "tokens": 300,
    "train_loss": 2.5,
    "val_loss": None,
    "tokens_per_s": 1000.0,
    "elapsed_s": 0.3,
    "saved_at": 1.7e9,
    "config_digest": "ab" * 32,
    "host": "node-1",
    "world_size": 2,
    "flatout": "0.2.0",
    "torch": "2.13.0",
    "python": "3.12.1",
}


def test_what_is_written_reads_back_and_keys_of_later_versions_are_ignored(tmp_path):
    (tmp_path / INFO).write_text(json.dumps(CONTENT | {"colour": "blue"}))
    assert read_info(tmp_path) == CheckpointInfo(**CONTENT)


@pytest.mark.parametrize(
    "text", [None, "", "[]", '{"step": 3}', json.dumps({**CONTENT, "step": "3"})]
)
def test_without_a_readable_file_nothing_is_known(tmp_path, text):
    if text is not None:
        (tmp_path / INFO).write_text(text)
    assert read_info(tmp_path) is None
