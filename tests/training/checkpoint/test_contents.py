"""What is inside a checkpoint's files is checked without torch."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fakes import fake_checkpoint, restate
from safetensors.torch import load_file, save_file

from flatout.errors import CheckpointError
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.catalog import Base, read_index
from flatout.training.checkpoint.contents import (
    content_problems,
    digest_of,
    find_base,
    problems_of,
    stored_tensors,
)


@pytest.fixture
def checkpoint(fox_run, tmp_path):
    """A copy of a real checkpoint."""
    return shutil.copytree(fox_run[0] / "runs/fox/checkpoints/step-3", tmp_path / "step-3")


def rewrite(checkpoint, name, change):
    """Change a JSON file of a checkpoint, and state its new digest in the manifest."""
    path = checkpoint / name
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    restate(checkpoint)


def first_tensor(index):
    return next(name for name, entry in index["tensors"].items() if len(entry["shape"]) == 2)


def test_a_whole_checkpoint_has_no_problems(checkpoint):
    assert problems_of(checkpoint) == []


def test_a_damaged_file_is_named_before_its_content_is_read(checkpoint):
    (checkpoint / "model-00000.safetensors").write_bytes(b"torn")
    (problem,) = problems_of(checkpoint)
    assert "model-00000.safetensors has 4 bytes" in problem


def renamed(index):
    index["tensors"]["model/other"] = index["tensors"].pop(first_tensor(index))


def another_shape(index):
    entry = index["tensors"][first_tensor(index)]
    entry["shape"] = entry["slices"][0]["shape"] = entry["shape"][::-1]


def another_dtype(index):
    index["tensors"][first_tensor(index)]["dtype"] = "float64"


def uncovered(index):
    entry = index["tensors"][first_tensor(index)]
    entry["shape"] = [entry["shape"][0] + 1, entry["shape"][1]]


def outside(index):
    entry = index["tensors"][first_tensor(index)]
    entry["slices"][0]["offset"] = [1, 0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (renamed, "model-00000.safetensors has no tensor model/other."),
        (another_shape, "The index lists F32"),
        (another_dtype, "The index lists F64"),
        (uncovered, "do not cover it"),
        (outside, "do not cover it"),
        (lambda index: index.pop("tensors"), "index.json is damaged"),
    ],
    ids=["name", "shape", "dtype", "uncovered", "outside", "no tensors"],
)
def test_an_index_that_does_not_fit_the_files_is_a_problem(checkpoint, change, problem):
    rewrite(checkpoint, catalog.INDEX, change)
    assert problem in content_problems(checkpoint)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_not_a_number_is_a_problem(checkpoint, dtype):
    tensors = load_file(path := checkpoint / "model-00000.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    index = json.loads((checkpoint / catalog.INDEX).read_text())
    index["tensors"][f"model/{name}" if f"model/{name}" in index["tensors"] else name]["dtype"] = (
        str(dtype).removeprefix("torch.")
    )
    for value, problems in ((-torch.inf, 0), (torch.nan, 1), (-torch.nan, 1)):
        tensors[name] = tensors[name].to(dtype)
        tensors[name][-1, -1] = value
        save_file(tensors, path)
        rewrite(checkpoint, catalog.INDEX, lambda old: old.update(index))
        restate(checkpoint)
        found = problems_of(checkpoint)
        assert len(found) == problems, found
        assert all(f"{name} has values that are not numbers" in one for one in found)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"step": 4}, "step is 4 in the checkpoint of step 3"),
        ({"values": None}, "state.json is damaged"),
    ],
    ids=["step", "values"],
)
def test_a_state_that_does_not_fit_is_a_problem(checkpoint, change, problem):
    rewrite(checkpoint, catalog.STATE, lambda state: state.update(change))
    assert problem in problems_of(checkpoint)[0]


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\4\0\0\0\0\0\0\0{"]
)
def test_another_file_is_rejected_by_name(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged"):
        stored_tensors(path)
    with pytest.raises(CheckpointError, match="Cannot read"):
        stored_tensors(tmp_path / "none")


def matrix(index):
    return next(entry for entry in index["tensors"].values() if len(entry["shape"]) == 2)


def flat_slice(index):
    matrix(index)["slices"][0]["offset"] = [0]


def no_shape(index):
    matrix(index)["shape"] = []


def half_a_row(index):
    matrix(index)["shape"][0] = 0.5


@pytest.mark.parametrize("change", [flat_slice, no_shape, half_a_row])
def test_an_index_whose_shapes_make_no_sense_is_damaged(checkpoint, change):
    rewrite(checkpoint, catalog.INDEX, change)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged: (?!ValidationError)"):
        catalog.read_index(checkpoint)


WEIGHTS = {"model-00000": b"weights"}


@pytest.fixture
def pair(tmp_path):
    """Return a checkpoint of adapters, and its base."""
    path = fake_checkpoint(tmp_path / "here" / "base", 6, **WEIGHTS)
    adapters = fake_checkpoint(tmp_path / "here" / "lora", 3, **{"model-00000": b"adapters"})
    base = Base(
        path=str(path), digest=digest_of(path), scale=2.0, rows={"blocks.0.up.adapters.up": (0, 4)}
    )
    (adapters / catalog.INDEX).write_text(
        json.dumps({"tensors": {}, "aliases": {}, "base": base.model_dump()})
    )
    return adapters, base


def test_the_entry_of_the_index_is_read_back(pair):
    adapters, base = pair
    assert read_index(adapters).base == base


def test_a_checkpoint_of_whole_weights_has_no_base(tmp_path):
    assert read_index(fake_checkpoint(tmp_path, 1)).base is None


def test_the_digest_is_that_of_the_weights_alone(tmp_path):
    paths = [
        fake_checkpoint(tmp_path / str(number), 1, state=state, **{"model-00000": content})
        for number, (state, content) in enumerate([(b"a", b"w"), (b"b", b"w"), (b"a", b"x")])
    ]
    one, other_state, other_weights = map(digest_of, paths)
    assert one == other_state != other_weights


def test_the_base_is_where_it_was(pair):
    assert str(find_base(*pair)) == pair[1].path


def test_a_missing_base_is_rejected(pair, tmp_path):
    adapters, base = pair
    gone = base.model_copy(update={"path": str(tmp_path / "far" / "checkpoints" / "step-3")})
    with pytest.raises(CheckpointError, match="contains LoRA adapters, but the weights") as refused:
        find_base(adapters, gone)
    assert "Restore them there" in refused.value.fix


def test_a_damaged_base_is_rejected(pair):
    adapters, base = pair
    (Path(base.path) / "model-00000.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        find_base(adapters, base)


def test_a_changed_base_is_rejected(pair, tmp_path):
    adapters, base = pair
    with pytest.raises(CheckpointError, match="have changed since the LoRA adapters in") as refused:
        find_base(adapters, base.model_copy(update={"digest": "0" * 64}))
    assert "Restore them from a copy" in refused.value.fix


NAN = {"path": "a", "digest": "b", "scale": float("nan"), "rows": {}}
NEGATIVE = {"path": "a", "digest": "b", "scale": 1.0, "rows": {"a": [-1, 2]}}


@pytest.mark.parametrize("base", [{}, {"path": "a"}, [], {"rows": {"a": 1}}, 3, NAN, NEGATIVE])
def test_a_damaged_entry_is_an_error(pair, base):
    adapters, _ = pair
    (adapters / catalog.INDEX).write_text(json.dumps({"tensors": {}, "aliases": {}, "base": base}))
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        read_index(adapters)
