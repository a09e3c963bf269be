"""What `import` reads at a path, and which of it is for validation."""

import numpy as np
import pytest

from flatout.config.registry import TOKEN_FORMATS
from flatout.data.token_formats import TokenFormat
from flatout.data.token_formats.find import find_tokens
from flatout.errors import ConfigError, DataError


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.arange(9)) if path.suffix == ".npy" else path.write_bytes(b"\1\0" * 9)
    return folder


def names(found):
    return [[one.path.name for one in split] for split in (found.train, found.val)]


def test_every_format_is_complete():
    assert len(TOKEN_FORMATS.names()) >= 4
    for name in TOKEN_FORMATS.names():
        assert isinstance(TOKEN_FORMATS.get(name), TokenFormat)


@pytest.mark.parametrize(
    ("files", "train", "val"),
    [
        (["train.bin", "val.bin", "meta.pkl", "input.txt"], ["train.bin"], ["val.bin"]),
        (["b_train_2.npy", "b_train_1.npy", "b_validation_0.npy"], 2, ["b_validation_0.npy"]),
        (["a.npy", "b.npy"], ["a.npy", "b.npy"], []),
        (["training.bin", "valid.bin", "test.bin"], ["training.bin"], ["valid.bin"]),
        (["training_evaluate.bin", "valuable.bin"], 2, []),
        ([".hidden.bin", "train.bin"], ["train.bin"], []),
    ],
)
def test_names_decide_the_split(tmp_path, files, train, val):
    found = names(find_tokens(touch(tmp_path, *files)))
    assert (found[0] if isinstance(train, list) else len(found[0]), found[1]) == (train, val)


def test_formats_are_not_mixed(tmp_path):
    touch(tmp_path, "a.bin", "b.npy")
    with pytest.raises(DataError, match=r"several formats: b\.npy \(numpy-file\) and a\.bin"):
        find_tokens(tmp_path)
    assert names(find_tokens(tmp_path, form="raw")) == [["a.bin"], []]


def test_an_unknown_format_is_answered_with_the_nearest(tmp_path):
    touch(tmp_path, "a.bin")
    with pytest.raises(ConfigError, match="no token format named 'numpy-fiel'") as caught:
        find_tokens(tmp_path / "a.bin", form="numpy-fiel")
    assert "'numpy-file'" in caught.value.fix


def test_validation_tokens_are_not_named_twice(tmp_path):
    touch(tmp_path, "train.bin", "val.bin")
    with pytest.raises(
        DataError, match=r"contains validation tokens, val\.bin, and --val names others"
    ):
        find_tokens(tmp_path, tmp_path / "val.bin")
    with pytest.raises(DataError, match="is also training data"):
        find_tokens(tmp_path / "train.bin", tmp_path / "train.bin")
    found = find_tokens(tmp_path / "train.bin", tmp_path / "val.bin")
    assert names(found) == [["train.bin"], ["val.bin"]]


def test_validation_tokens_alone_are_rejected(tmp_path):
    with pytest.raises(DataError, match="contains only tokens for validation"):
        find_tokens(touch(tmp_path, "val.bin"))


@pytest.mark.parametrize(
    ("files", "path", "wanted"),
    [
        ([], "absent", "There is no file or directory"),
        (["a/b.txt"], "a", "has no token files"),
        (["a.txt"], "a.txt", "is not a token file of a known format"),
        (["a.gguf"], "a.gguf", "is not a token file of a known format"),
    ],
)
def test_other_paths_are_rejected(tmp_path, files, path, wanted):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("plain text")
    with pytest.raises(DataError, match=wanted) as caught:
        find_tokens(tmp_path / path)
    assert "iconv" not in caught.value.fix
