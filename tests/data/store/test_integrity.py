"""An intact folder that may not be read; test_shards.py and test_verify.py cover the rest."""

import os
from pathlib import Path

import numpy as np
import pytest

from flatout.data.prepare.writer import DatasetWriter
from flatout.data.store.integrity import file_problems
from flatout.data.store.shards import Dataset
from flatout.data.store.verify import verify_dataset
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import DataError


def test_a_tokenizer_without_read_permission_is_a_separate_problem(tmp_path, monkeypatch):
    tokenizer = make_tokenizer("byte", lambda _: iter([]))
    with DatasetWriter(tmp_path / "set", tokenizer) as writer:
        for split in ("train", "val"):
            writer.append(split, np.array([1, 2, 256]), [3], text_bytes=2)
        manifest = writer.finish(source={}, split_rule="named")
    assert list(file_problems(tmp_path / "set", manifest)) == []
    opened = os.open

    def closed(path, *how, **more):
        if Path(path).name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *how, **more)

    monkeypatch.setattr(os, "open", closed)
    (problem,) = file_problems(tmp_path / "set", manifest)
    assert (problem.name, problem.fix) == ("tokenizer.json", "Check its permissions.")
    assert verify_dataset(tmp_path / "set").problems == (
        f"{tmp_path}/set/tokenizer.json cannot be read: Permission denied.",
    )
    with pytest.raises(
        DataError,
        match=r"tokenizer\.json cannot be read: Permission denied\. Fix: Check its permissions\.",
    ):
        Dataset.open(tmp_path / "set")
