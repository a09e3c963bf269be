from types import SimpleNamespace

import pytest
import torch

from flatout.errors import CheckpointError
from flatout.progress import SILENT
from flatout.training.checkpoint import tensors as slices
from flatout.training.checkpoint.catalog import Entry, Slice


def fill(target, index, folder):
    with SILENT.task("reading") as task:
        slices.fill({"x": target}, index, folder, task)
    return target


def stored(path, tensor):
    """Write one tensor and return the index."""
    slices.write(path, {"x": tensor})
    return slices.entries(path.name, {"x": tensor}, {})


def written(folder, whole, boxes):
    """Write `whole` as boxes, one file per box, and return the index."""
    parts = []
    for number, box in enumerate(boxes):
        piece = whole[tuple(slice(low, high) for low, high in box)]
        entry = stored(folder / f"{number}.safetensors", piece)["x"]
        offset = tuple(low for low, _ in box)
        parts.append(
            {
                "x": Entry(
                    dtype=entry.dtype,
                    shape=tuple(whole.shape),
                    slices=(
                        Slice(file=entry.slices[0].file, offset=offset, shape=tuple(piece.shape)),
                    ),
                )
            }
        )
    return slices.merge(parts)


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 5), (0, 7))],
        [((0, 2), (0, 7)), ((2, 5), (0, 7))],
        [((0, 5), (4, 7)), ((0, 2), (0, 4)), ((2, 5), (0, 4))],
    ],
)
def test_any_boxes_that_cover_a_tensor_restore_it(tmp_path, boxes):
    whole = torch.arange(35.0).reshape(5, 7)
    index = written(tmp_path, whole, boxes)
    assert torch.equal(fill(torch.full((5, 7), torch.nan), index, tmp_path), whole)


def test_a_missing_box_is_an_error(tmp_path):
    whole = torch.arange(35.0).reshape(5, 7)
    index = written(tmp_path, whole, [((0, 2), (0, 7)), ((3, 5), (0, 7))])
    with pytest.raises(CheckpointError, match="do not cover"):
        fill(torch.zeros(5, 7), index, tmp_path)


def test_only_overlapping_files_are_read(tmp_path, monkeypatch):
    whole = torch.arange(35.0).reshape(5, 7)
    index = written(tmp_path, whole, [((0, 2), (0, 7)), ((2, 4), (0, 7)), ((4, 5), (0, 7))])
    # as on a rank that has rows 1 and 2
    monkeypatch.setattr(slices, "boxes_of", lambda tensor, cut: [((1, 0), tensor)])
    part = torch.zeros(2, 7)
    (tmp_path / "2.safetensors").unlink()
    assert torch.equal(fill(part, index, tmp_path), whole[1:3])


def test_a_tensor_file_that_cannot_be_opened_is_named(tmp_path, monkeypatch):
    def refused(path, **_):
        raise RuntimeError(
            f"unable to open file <{path}> in read-only mode: Input/output error (5)"
        )

    monkeypatch.setattr(slices, "safe_open", refused)
    index = stored(tmp_path / "model.safetensors", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"Cannot read .*model\.safetensors.*The disk failed"):
        fill(torch.zeros(2), index, tmp_path)


def test_a_scalar_and_an_empty_tensor(tmp_path):
    index = stored(tmp_path / "f", torch.tensor(3.5))
    assert fill(torch.zeros(()), index, tmp_path) == 3.5
    index = stored(tmp_path / "f", torch.zeros(0, 4))
    assert fill(torch.zeros(0, 4), index, tmp_path).shape == (0, 4)


def test_fill_works_in_place_and_keeps_requires_grad(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(3))
    pointer = parameter.data_ptr()
    fill(parameter, stored(tmp_path / "f", torch.ones(3)), tmp_path)
    assert parameter.data_ptr() == pointer
    assert parameter.requires_grad
    assert parameter.tolist() == [1, 1, 1]


def test_whole_tensors_are_distributed_once_and_evenly():
    tensors = {f"t{size}": torch.zeros(size) for size in (100, 60, 50, 10, 0)} | {
        "scalar": torch.zeros(())
    }
    shares = [slices.owned(tensors, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    assert [sum(t.numel() for t in share.values()) for share in shares] == [100, 61, 60]


def test_an_unknown_dtype_is_rejected():
    with pytest.raises(CheckpointError, match="float2"):
        slices.dtype_of(Entry(dtype="float2", shape=(), slices=()))
    with pytest.raises(CheckpointError, match="nn"):
        slices.dtype_of(Entry(dtype="nn", shape=(), slices=()))


def test_copies_of_a_sharded_tensor_take_turns():
    replicate, shard = (
        SimpleNamespace(is_replicate=lambda: True),
        SimpleNamespace(is_replicate=lambda: False),
    )
    for coordinate, expected in {(0, 0): (0, 2), (0, 3): (0, 2), (1, 0): (1, 2)}.items():
        mesh = SimpleNamespace(
            shape=(2, 4), ndim=2, get_coordinate=lambda coordinate=coordinate: list(coordinate)
        )
        assert (
            slices._copy_of(SimpleNamespace(device_mesh=mesh, placements=(replicate, shard)))
            == expected
        )
