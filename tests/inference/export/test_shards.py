"""Safetensors files of a limited size."""

import json
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from flatout.inference.export.shards import INDEX, Planned, write_shards
from flatout.progress import SILENT

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.randn(5, 4).to(torch.bfloat16),
    "c": torch.randn(3).half(),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "turned": torch.randn(3, 2).T,
    "flags": torch.tensor([True, False]),
}


def planned(tensors):
    return [
        Planned(name, tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    ]


def test_the_library_reads_what_was_written(tmp_path):
    write_shards(tmp_path, planned(TENSORS), 1 << 20, SILENT)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_small_model_is_one_file_without_an_index(tmp_path):
    write_shards(tmp_path, planned(TENSORS), 1 << 20, SILENT)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_files_stay_within_the_limit_unless_one_tensor_is_larger(tmp_path):
    tensors = {
        name: torch.full((size,), 1.0) for name, size in zip("abcd", (10, 10, 100, 5), strict=True)
    }
    write_shards(tmp_path, planned(tensors), 100, SILENT)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 500},
        "weight_map": {
            "a": "model-00001-of-00003.safetensors",
            "b": "model-00001-of-00003.safetensors",
            "c": "model-00002-of-00003.safetensors",
            "d": "model-00003-of-00003.safetensors",
        },
    }
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


def test_the_tensors_of_one_file_are_in_memory(tmp_path):
    known, most = [], []

    def read():
        tensor = torch.zeros(10)
        known.append(weakref.ref(tensor))
        most.append(sum(one() is not None for one in known))
        return tensor

    tensors = [Planned(f"t{number}", torch.float32, (10,), read) for number in range(20)]
    write_shards(tmp_path, tensors, 100, SILENT)
    assert len(known) == 20
    assert max(most) <= 4, "two of the file that is written, and two of the one that is read"


def test_parts_of_one_weight_are_written_apart(tmp_path):
    whole = torch.arange(12.0).reshape(4, 3)
    write_shards(tmp_path, planned({"top": whole[:2], "bottom": whole[2:]}), 1 << 20, SILENT)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(torch.cat([found["top"], found["bottom"]]), whole)


def test_a_tensor_that_differs_from_its_plan_is_a_bug(tmp_path):
    wrong = [Planned("a", torch.float32, (2,), lambda: torch.zeros(3))]
    with pytest.raises(AssertionError, match="a"):
        write_shards(tmp_path, wrong, 1 << 20, SILENT)
