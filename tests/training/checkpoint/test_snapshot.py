"""A snapshot is complete: it becomes a checkpoint without reading the run again."""

from dataclasses import replace

from stand_in import build, outcome, train

from flatout.training.checkpoint import read_write
from flatout.training.checkpoint.snapshot import complete, take, write_share


def test_a_snapshot_shares_the_runs_memory_and_lists_its_buffers(tmp_path):
    run = build(tmp_path / "run")
    train(run, 1)
    snapshot = take(run, {"torch": "2.13"})
    assert [*snapshot.tensors] == ["model-00000.safetensors", "optimizer-00000.safetensors"]
    weight = snapshot.tensors["model-00000.safetensors"]["model/embedding.weight"]
    assert weight.data_ptr() == run.core.embedding.weight.data_ptr()
    assert snapshot.buffers == {"model/calls"}
    assert set(snapshot.entries) == {
        name for tensors in snapshot.tensors.values() for name in tensors
    }
    assert snapshot.aliases == {"model/head.weight": "model/embedding.weight"}


def test_a_snapshot_with_copied_tensors_writes_the_earlier_state(tmp_path):
    run = build(tmp_path / "run")
    train(run, 3)
    taken = take(run, {})
    snapshot = replace(
        taken,
        tensors={
            file: {name: t.clone() for name, t in tensors.items()}
            for file, tensors in taken.tensors.items()
        },
    )
    unbroken = outcome(run, 3)
    temporary = tmp_path / "run" / "checkpoints" / "step-3.tmp-1"
    temporary.mkdir(parents=True)
    write_share(snapshot, temporary)
    assert complete(snapshot, temporary) == []
    again = build(tmp_path / "run", seed=8)
    read_write.load(again, snapshot.final)
    assert outcome(again, 3) == unbroken
