"""Weights of other tools are read from every kind of file, and nothing in a file is executed."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flatout.errors import CheckpointError
from flatout.models.families.files import open_tensors, plain_name, weight_files
from flatout.storage.files import require_checksums

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b.bias": torch.arange(3).bfloat16()}


def write(folder, name, weights=None):
    path = Path(folder) / name
    path.parent.mkdir(exist_ok=True)
    weights = WEIGHTS if weights is None else weights
    if name.endswith(".safetensors"):
        save_file(weights, path)
    else:
        torch.save(weights, path)
    return path


def require_weights(found):
    assert found.shapes == {"a.weight": (2, 3), "b.bias": (3,)}
    for name, tensor in WEIGHTS.items():
        assert found.read(name).dtype == torch.float32
        assert torch.equal(found.read(name), tensor.float())


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "ckpt.pt", "other.safetensors", "other.pth"]
)
def test_one_file_is_found_in_its_directory(tmp_path, name):
    path = write(tmp_path, name)
    for other in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
        write(tmp_path, other)
    (tmp_path / "log.txt").write_text("step 1")
    require_weights(open_tensors(tmp_path))
    require_weights(open_tensors(path))


@pytest.mark.parametrize(
    ("index", "files"),
    [
        ("model.safetensors.index.json", ["model-1.safetensors", "model-2.safetensors"]),
        ("pytorch_model.bin.index.json", ["pytorch_model-1.bin", "pytorch_model-2.bin"]),
    ],
)
def test_several_files_are_found_by_their_index(tmp_path, index, files):
    for file, (name, tensor) in zip(files, WEIGHTS.items(), strict=True):
        write(tmp_path, file, {name: tensor})
    weight_map = dict(zip(WEIGHTS, files, strict=True))
    (tmp_path / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    require_weights(open_tensors(tmp_path))
    (tmp_path / files[1]).unlink()
    with pytest.raises(CheckpointError, match=f"has no {files[1]}, which {index} lists"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "document", [{}, {"weight_map": {}}, {"weight_map": {"a": "../x.bin"}}, []]
)
def test_an_index_without_usable_names_is_rejected(tmp_path, document):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(document))
    (tmp_path.parent / "x.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="lists"):
        open_tensors(tmp_path)


def test_several_files_are_named_and_how_to_choose(tmp_path):
    for number in range(7):
        write(tmp_path, f"step_{number}.pt")
    with pytest.raises(CheckpointError) as caught:
        open_tensors(tmp_path)
    assert caught.value.what == (
        f"{tmp_path} has several files that may be its weights: step_0.pt, step_1.pt, step_2.pt, "
        "step_3.pt, step_4.pt, and 2 more."
    )
    assert f"train.init_from={tmp_path}/step_6.pt" in caught.value.fix
    require_weights(open_tensors(tmp_path / "step_6.pt"))


def test_safetensors_come_before_pickles(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weights"):
        open_tensors(tmp_path)
    write(tmp_path, "pytorch_model.bin", {"other": torch.zeros(1)})
    write(tmp_path, "model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize(
    "nested", [None, "model", "state_dict", "model_state_dict", "module", "net"]
)
def test_the_weights_of_a_training_program_are_found(tmp_path, nested):
    document = WEIGHTS if nested is None else {nested: OrderedDict(WEIGHTS), "iter_num": 7}
    found = open_tensors(write(tmp_path, "last.pt", document))
    require_weights(found)
    assert nested is None or found.others["iter_num"] == 7


def test_a_file_in_the_format_before_zip_is_read(tmp_path):
    torch.save(WEIGHTS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    require_weights(open_tensors(tmp_path / "old.pt"))


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_prefixes_of_wrappers_are_removed(tmp_path, prefix):
    assert plain_name(f"{prefix}a.weight") == plain_name("a._orig_mod.weight") == "a.weight"
    weights = {f"{prefix}a.weight": WEIGHTS["a.weight"], "b.bias": WEIGHTS["b.bias"]}
    for file in ("model.safetensors", "x.pt"):
        require_weights(open_tensors(write(tmp_path, file, weights)))


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_is_rejected_and_not_executed(tmp_path):
    for attack in (WEIGHTS | {"x": Attack(tmp_path / "executed")}, torch.nn.Linear(2, 2)):
        path = write(tmp_path, "pytorch_model.bin", attack)
        with pytest.raises(CheckpointError, match=r"Python code or objects.*execute code\."):
            open_tensors(path)
    assert not (tmp_path / "executed").exists()
    for document in (torch.zeros(3), [torch.zeros(3)], {}):
        with pytest.raises(CheckpointError, match=r"contains no tensors by name\. Fix: Save"):
            open_tensors(write(tmp_path, "x.pt", document))
    with pytest.raises(CheckpointError, match=r"by name: its keys are step, other\. Fix: Save"):
        open_tensors(write(tmp_path, "x.pt", {"step": 3, "other": WEIGHTS}))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_is_rejected(tmp_path, name):
    path = write(tmp_path, name)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(CheckpointError, match="Cannot read "):
        open_tensors(tmp_path)


def test_a_changed_byte_of_a_tensor_is_found_by_its_checksum(tmp_path):
    """torch.load does not check it. Files may lack checksums, and old ones are no archives."""
    for kind in ("zip", "old", "without"):
        torch.serialization.set_crc32_options(kind != "without")
        try:
            path = tmp_path / f"{kind}.pt"
            torch.save(WEIGHTS, path, _use_new_zipfile_serialization=kind != "old")
        finally:
            torch.serialization.set_crc32_options(True)
        require_checksums(path)
        whole = path.read_bytes()
        value = WEIGHTS["a.weight"].numpy().tobytes()
        offset = whole.index(value) + 9
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert not torch.equal(open_tensors(path).read("a.weight"), WEIGHTS["a.weight"])
        if kind == "zip":
            with pytest.raises(CheckpointError, match=r"zip\.pt is damaged: zip/data/0 in it does"):
                require_checksums(path)
        else:
            require_checksums(path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_rejected(tmp_path, dtype):
    path = write(tmp_path, "model.safetensors", {"a": torch.zeros(3).to(dtype)})
    with pytest.raises(CheckpointError, match="the weights are quantised"):
        open_tensors(path).read("a")
