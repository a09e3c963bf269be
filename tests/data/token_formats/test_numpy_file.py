"""Arrays of numpy.save."""

import pickle

import numpy as np
import pytest

from flatout.errors import DataError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", ">u2", "int32", "uint32", "int64", "uint64"])
def test_arrays_of_any_integers_are_imported(tmp_path, imported, dtype):
    tokens = RNG.integers(0, 256, 1000).astype(dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    made = imported(tmp_path / "tokens.npy")
    assert made.train + made.val == tokens.tolist()


def test_an_array_may_be_one_document(tmp_path, imported):
    tokens = RNG.integers(0, 257, 1000)
    np.save(tmp_path / "tokens.npy", tokens)
    by_file = imported(tmp_path / "tokens.npy", documents="chunk")
    assert by_file.train + by_file.val == tokens.tolist()
    assert (by_file.train_ends, by_file.val_ends) == ([900], [100])


def test_files_of_a_directory_are_documents_if_wished(tmp_path, imported):
    folder = tmp_path / "arrays"
    folder.mkdir()
    for number in range(3):
        np.save(folder / f"edufineweb_train_{number:06d}.npy", np.full(5, number))
    np.save(folder / "edufineweb_val_000000.npy", np.full(4, 9))
    made = imported(folder, documents="chunk")
    assert made.train == [0] * 5 + [1] * 5 + [2] * 5
    assert made.train_ends == [5, 10, 15]
    assert made.val == [9] * 4


def test_rows_follow_each_other(tmp_path, imported):
    np.save(tmp_path / "rows.npy", np.arange(200).reshape(20, 10))
    made = imported(tmp_path / "rows.npy")
    assert made.train + made.val == list(range(200))
    assert "20 rows of 10 tokens" in made.said


OBJECTS = np.array([{"a": 1}, None], dtype=object)


def test_arrays_that_need_a_pickle_are_rejected(tmp_path, imported, nothing_kept):
    np.save(tmp_path / "objects.npy", OBJECTS, allow_pickle=True)
    (tmp_path / "list.npy").write_bytes(pickle.dumps([1, 2, 3]))
    with pytest.raises(DataError, match="contains Python objects, not integers") as caught:
        imported(tmp_path / "objects.npy")
    assert "never read" in caught.value.fix
    with pytest.raises(DataError, match="is a pickle, which could run code"):
        imported(tmp_path / "list.npy")


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (np.zeros(5), "contains float64, not integers"),
        (np.array(["a"]), "contains <U1, not integers"),
        (np.arange(8).reshape(2, 2, 2), r"has the shape \(2, 2, 2\)"),
        (np.array(5), r"has the shape \(\)"),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), "is stored in columns"),
        (np.zeros(0, np.int64), "contains no tokens"),
    ],
)
def test_other_arrays_are_rejected(tmp_path, imported, nothing_kept, array, wanted):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=wanted):
        imported(tmp_path / "a.npy")


def test_a_truncated_file_is_named(tmp_path, imported, nothing_kept):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100))
    whole = path.read_bytes()
    for keep in (0, 3, 20, 200, len(whole) - 5):
        path.write_bytes(whole[:keep])
        with pytest.raises(DataError, match=r"a\.npy"):
            imported(path)
