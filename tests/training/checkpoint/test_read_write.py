"""Checkpoints: saved and loaded bit for bit, and rejected when they are damaged or do not fit."""

import pytest
import torch
from stand_in import Core, build, outcome, train

from flatout.errors import CheckpointError, RunFailed
from flatout.training.checkpoint import catalog, read_write, savers
from flatout.training.checkpoint.contents import digest_of
from flatout.training.checkpoint.merged import read_merged


def saved(tmp_path, *, steps=5, name="run", **kwargs):
    run = build(tmp_path / name, **kwargs)
    train(run, steps)
    return run, savers.save(run)


def test_a_loaded_run_continues_bit_for_bit(tmp_path):
    run, path = saved(tmp_path)
    unbroken = outcome(run, 5)
    again = build(tmp_path / "run", seed=99)
    assert read_write.load(again, path) == []
    assert outcome(again, 5) == unbroken


def test_a_run_before_its_first_step_can_be_saved(tmp_path):
    run, path = saved(tmp_path, steps=0)
    unbroken = outcome(run, 3)
    again = build(tmp_path / "run", seed=99)
    read_write.load(again, path)
    assert outcome(again, 3) == unbroken


def test_no_file_is_a_pickle_and_every_file_is_in_the_manifest(tmp_path):
    _, path = saved(tmp_path)
    names = {p.name for p in path.iterdir()}
    assert names == {
        "model-00000.safetensors",
        "optimizer-00000.safetensors",
        "index.json",
        "state.json",
        "manifest.json",
    }
    assert {file.name for file in catalog.read_manifest(path).files} == names - {"manifest.json"}


def test_optimizer_state_is_matched_by_name_not_by_order(tmp_path):
    run, path = saved(tmp_path)
    again = build(tmp_path / "run", seed=3)
    again.optimizers[0].param_groups.reverse()
    read_write.load(again, path)
    for p, q in zip(run.core.parameters(), again.core.parameters(), strict=True):
        assert torch.equal(p, q)
        for number in range(2):
            assert all(
                torch.equal(
                    run.optimizers[number].state[p][f], again.optimizers[number].state[q][f]
                )
                for f in run.optimizers[number].state[p]
            )
    assert again.optimizers[0].param_groups[1]["weight_decay"] == 0.1


def test_a_compiled_model_keeps_its_parameter_names(tmp_path):
    run = build(tmp_path / "run")
    run.core.blocks[0] = torch.compile(run.core.blocks[0], backend="eager")
    path = savers.save(run)
    assert "blocks.0.matrix.weight" in read_merged(path)


def test_tied_weights_are_read_weights_under_all_names(tmp_path):
    run, path = saved(tmp_path)
    weights = read_merged(path)
    model = Core()
    model.load_state_dict(weights)
    assert all(
        torch.equal(a, b)
        for a, b in zip(run.core.state_dict().values(), model.state_dict().values(), strict=True)
    )
    assert weights["head.weight"] is weights["embedding.weight"]


def test_the_digest_of_a_checkpoint_depends_only_on_the_weights(tmp_path):
    run, path = saved(tmp_path)
    digest = digest_of(path)
    run.step += 1
    assert digest_of(savers.save(run)) == digest
    with torch.no_grad():
        run.core.embedding.weight[0, 0] += 1e-6
    assert digest_of(savers.save(run)) != digest


def test_ranks_that_check_a_checkpoint_together_read_each_file_once(tmp_path):
    _, path = saved(tmp_path)
    parts = [catalog.digests_of(path, rank, 3) for rank in range(3)]
    together = {file: sha for part in parts for file, sha in part.items()}
    assert sum(map(len, parts)) == len(together) == len(catalog.read_manifest(path).files)
    weights = next(path.glob("model-*"))
    weights.write_bytes(bytes(weights.stat().st_size))
    assert catalog.verify(path, known=together) == [], "read before the damage"
    del together[weights]
    (problem,) = catalog.verify(path, known=together)
    assert str(weights) in problem


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_found_by_name(tmp_path, damage):
    _, path = saved(tmp_path)
    for entry in catalog.read_manifest(path).files:
        file = path / entry.name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        changed = {"flip": content, "cut": content[:-1], "remove": None}[damage]
        file.rename(tmp_path / "kept")
        if changed is not None:
            file.write_bytes(changed)
        assert any(file.name in problem for problem in catalog.verify(path))
        (tmp_path / "kept").replace(file)
    assert catalog.verify(path) == []


@pytest.mark.parametrize("text", ["", "{}", '{"files": 3}', "[1]"])
def test_a_damaged_manifest_is_found(tmp_path, text):
    _, path = saved(tmp_path)
    (path / "manifest.json").write_text(text)
    assert any("manifest.json" in problem for problem in catalog.verify(path))


def test_load_rejects_another_model_and_names_the_tensor(tmp_path):
    _, path = saved(tmp_path)
    again = build(tmp_path / "run")
    again.core.blocks[1].matrix.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"blocks\.1\.matrix\.extra"):
        read_write.load(again, path)


def test_load_rejects_another_shape_and_names_both(tmp_path):
    _, path = saved(tmp_path)
    again = build(tmp_path / "run")
    again.core.blocks[0].matrix.weight = torch.nn.Parameter(torch.zeros(8, 9))
    again.optimizers[0].param_groups[0]["params"][0] = again.core.blocks[0].matrix.weight
    with pytest.raises(CheckpointError, match=r"\[8, 8\].*\[8, 9\]"):
        read_write.load(again, path)


def test_load_rejects_another_dtype_of_the_weights(tmp_path):
    _, path = saved(tmp_path)
    again = build(tmp_path / "run")
    again.core.blocks[0].norm.bfloat16()
    with pytest.raises(CheckpointError, match=r"float32.*bfloat16"):
        read_write.load(again, path)


def test_load_rejects_other_parameter_groups(tmp_path):
    _, path = saved(tmp_path)
    again = build(tmp_path / "run")
    first, second = again.optimizers[0].param_groups
    second["params"].append(first["params"].pop())
    with pytest.raises(CheckpointError, match="does not group"):
        read_write.load(again, path)


def test_load_rejects_another_assignment_to_optimizers(tmp_path):
    _, path = saved(tmp_path)
    again = build(tmp_path / "run")
    again.optimizers = (again.optimizers[1], again.optimizers[0])
    with pytest.raises(CheckpointError, match="optimizer 0"):
        read_write.load(again, path)


def test_load_reports_differences_of_the_machine(tmp_path):
    run = build(tmp_path / "run")
    path = savers.save(run, environment={"torch": "2.11", "threads": 2})
    assert (
        read_write.load(build(tmp_path / "run"), path, environment={"torch": "2.11", "threads": 2})
        == []
    )
    (message,) = read_write.load(
        build(tmp_path / "run"), path, environment={"torch": "2.13", "threads": 2}
    )
    assert "torch has changed from 2.11 to 2.13" in message


def test_load_reports_an_added_or_removed_scaler(tmp_path):
    _, path = saved(tmp_path)
    (message,) = read_write.load(build(tmp_path / "run", scaler=False), path)
    assert "scaler" in message
    _, path = saved(tmp_path, name="other", scaler=False)
    with pytest.raises(CheckpointError, match="no scaler"):
        read_write.load(build(tmp_path / "other"), path)


def test_tensor_hyperparameters_and_scalars_of_optimizers_are_restored(tmp_path):
    def with_tensor_lr(folder):
        run = build(folder)
        weight = run.core.embedding.weight
        run.optimizers = (
            run.optimizers[0],
            torch.optim.Adam([weight], lr=torch.tensor(0.01), capturable=False, foreach=False),
        )
        return run

    run = with_tensor_lr(tmp_path / "run")
    train(run, 2)
    run.optimizers[1].param_groups[0]["lr"].fill_(0.123)
    run.optimizers[1].state[run.core.embedding.weight]["note"] = 7
    path = savers.save(run)
    again = with_tensor_lr(tmp_path / "run")
    read_write.load(again, path)
    assert again.optimizers[1].param_groups[0]["lr"] == torch.tensor(0.123)
    assert again.optimizers[1].state[again.core.embedding.weight]["note"] == 7


def test_save_rejects_state_that_a_checkpoint_cannot_hold(tmp_path):
    run = build(tmp_path / "run")
    train(run, 1)
    run.optimizers[1].state[run.core.embedding.weight]["history"] = [1, 2]
    with pytest.raises(CheckpointError, match=r"history of embedding\.weight as list"):
        savers.save(run)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    run, path = saved(tmp_path)
    run.best_val_loss = -1.0
    assert savers.save(run) == path
    again = build(tmp_path / "run")
    read_write.load(again, path)
    assert again.best_val_loss == -1.0
    assert [p.name for p in path.parent.iterdir()] == ["step-5"]


@pytest.mark.parametrize("kind", ["tensors", "json"])
def test_a_full_disk_leaves_earlier_checkpoints_untouched(tmp_path, monkeypatch, kind):
    run, path = saved(tmp_path)
    train(run, 1)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        read_write.tensors, "write", full
    ) if kind == "tensors" else monkeypatch.setattr(savers, "write_whole", full)
    with pytest.raises(RunFailed, match="No space left"):
        savers.save(run)
    assert [p.name for p in path.parent.iterdir()] == ["step-5"]
    assert catalog.latest(tmp_path / "run") == path
