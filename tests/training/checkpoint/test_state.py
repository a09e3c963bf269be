"""Every item of STATE matters: replaced on disk by another run's, it changes the resumed run."""

import json
import shutil

import pytest
import torch
from fakes import restate
from stand_in import build, outcome, train

from flatout.errors import CheckpointError
from flatout.training.checkpoint import catalog, read_write, savers, state, weights
from flatout.training.checkpoint.state import STATE
from flatout.training.step import train_step


def transplant(part, donor, path):
    """Replace one item of the checkpoint `path` by the donor's, and update the manifest."""
    index, facts = (json.loads((path / name).read_text()) for name in ("index.json", "state.json"))
    donor_index, donor_facts = (
        json.loads((donor / name).read_text()) for name in ("index.json", "state.json")
    )
    if part.prefix:
        index["tensors"] = {
            n: e for n, e in index["tensors"].items() if not n.startswith(part.prefix)
        }
        index["tensors"] |= {
            n: e for n, e in donor_index["tensors"].items() if n.startswith(part.prefix)
        }
        shutil.copy(donor / f"{part.prefix[:-1]}-00000.safetensors", path)
    if part.name in donor_facts["values"]:
        facts["values"][part.name] = donor_facts["values"][part.name]
    (path / "index.json").write_text(json.dumps(index))
    (path / "state.json").write_text(json.dumps(facts))
    restate(path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint, the outcome of its run, and a checkpoint that differs in every item."""
    folder = tmp_path_factory.mktemp("runs")
    donor = build(folder / "donor", seed=4)
    train(donor, 9)
    donor.best_val_loss = 0.0  # lower than any
    run = build(folder / "run")
    train(run, 5)
    return savers.save(run), outcome(run, 5), savers.save(donor)


@pytest.mark.parametrize("part", STATE, ids=lambda part: part.name)
def test_every_item_changes_the_resumed_run(part, checkpoints, tmp_path):
    path, unbroken, donor = checkpoints
    for replaced, equal in ((False, True), (True, False)):
        copy = tmp_path / f"{replaced}" / path.name
        shutil.copytree(path, copy)
        if replaced:
            transplant(part, donor, copy)
        run = build(tmp_path, seed=77)
        assert catalog.verify(copy) == []
        read_write.load(run, copy)
        assert (outcome(run, 5) == unbroken) is equal


def real_outcome(run, num_steps):
    """Return the outcome of a real run: losses, weights, optimizers, counters."""
    losses = real_train(run, num_steps)
    groups = [
        (optimizer, group) for optimizer in run.optimizers for group in optimizer.param_groups
    ]
    moments = [
        value
        for optimizer, group in groups
        for p in group["params"]
        for _, value in sorted(optimizer.state[p].items())
    ]
    tensors = [*run.core.state_dict().values(), *moments]
    numbers = (
        run.step,
        run.tokens,
        run.elapsed_s,
        run.best_val_loss,
        run.best_step,
        int(run.loader.position),
        run.guard.state_dict(),
    )
    return losses, [tensor.numpy().tobytes() for tensor in tensors], numbers


def real_train(run, num_steps):
    losses = []
    for _ in range(num_steps):
        losses.append(train_step(run, next(run.loader)).loss.item())
        run.step += 1
        run.tokens += run.tokens_per_step
        run.elapsed_s += 0.1
        if run.best_val_loss is None:
            run.best_val_loss, run.best_step = losses[-1], run.step
    return losses


@pytest.mark.slow
def test_every_item_changes_a_real_resumed_run(build_run, tiny_config, tmp_path):
    """With Muon, AdamW and dropout on a real dataset, unlike the stand-in of the test above."""

    def fresh(seed):
        return build_run(
            tiny_config(train__steps=20, train__seed=seed, model__dropout=0.1, optim__kind="muon"),
            tmp_path / str(seed),
        )

    donor = fresh(1)
    real_train(donor, 7)
    donor.guard.judge(torch.tensor(torch.nan), torch.tensor(1.0), torch.tensor(1))
    donor_path = savers.save(donor)
    run = fresh(0)
    real_train(run, 4)
    path = savers.save(run)
    unbroken = real_outcome(run, 2)
    applies = [part for part in STATE if part.used(run)]
    assert {part.name for part in STATE} - {part.name for part in applies} == {"scaler"}
    without_effect = []
    again = fresh(0)
    for part in (None, *applies):
        copy = tmp_path / (part.name if part else "unchanged") / path.name
        shutil.copytree(path, copy)
        if part:
            transplant(part, donor_path, copy)
        read_write.load(again, copy)
        if real_outcome(again, 2) == unbroken:
            without_effect.append(part.name if part else "unchanged")
    assert without_effect == ["unchanged"]


def test_a_checkpoint_holds_exactly_the_items_of_state(checkpoints):
    stored = json.loads((checkpoints[0] / "state.json").read_text())
    assert {*stored["values"]} == {part.name for part in STATE}


@pytest.mark.parametrize(
    "part", [part for part in STATE if part.name != "scaler"], ids=lambda part: part.name
)
def test_load_rejects_a_checkpoint_that_lacks_an_item(part, checkpoints, tmp_path):
    copy = tmp_path / "step-5"
    shutil.copytree(checkpoints[0], copy)
    facts = json.loads((copy / "state.json").read_text())
    facts["values"].pop(part.name, None)
    (copy / "state.json").write_text(json.dumps(facts))
    restate(copy)
    with pytest.raises(CheckpointError, match=f"no {part.name}"):
        read_write.load(build(tmp_path), copy)


def test_extra_state_of_a_model_is_rejected():
    class Odd(torch.nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match="extra state"):
        weights.weights_and_aliases(torch.nn.Sequential(Odd()))


def test_an_optimizer_of_other_tensors_is_rejected(tmp_path):
    run = build(tmp_path)
    run.optimizers = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1),)
    with pytest.raises(CheckpointError, match="not a parameter of the model"):
        savers.save(run)


def test_switches_of_an_optimizer_are_not_state(tmp_path):
    """A run saved with one implementation of AdamW may resume with another."""
    run = build(tmp_path)
    train(run, 1)
    path = savers.save(run)
    again = build(tmp_path)
    again.optimizers[0].param_groups[0]["fused"] = None
    read_write.load(again, path)
    assert again.optimizers[0].param_groups[0]["fused"] is None
    assert again.optimizers[0].param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_settings_in_the_configuration_are_not_state(
    kind, build_run, tiny_config, tmp_path
):
    """A run that resumes from another's checkpoint uses its own learning rate and weight decay."""
    stated = {"lr": 1e-4, "weight_decay": 0.3, "betas": (0.7, 0.8), "eps": 1e-5, "momentum": 0.5}
    run = build_run(tiny_config(optim__kind=kind), tmp_path / "first")
    real_train(run, 2)
    path = savers.save(run)
    again = build_run(
        tiny_config(optim__kind=kind, **{f"optim__{key}": value for key, value in stated.items()}),
        tmp_path / "second",
    )
    groups = [group for optimizer in again.optimizers for group in optimizer.param_groups]
    fresh = [
        {key: value for key, value in group.items() if key not in {"params", "lr"}}
        for group in groups
    ]
    read_write.load(again, path)
    assert [
        {key: group[key] for key in kept} for group, kept in zip(groups, fresh, strict=True)
    ] == fresh
    assert {group["peak_lr"] for group in groups} == {1e-4}
    result = train_step(again, next(again.loader))
    assert {group["lr"] for group in groups} == {result.learning_rate}


def test_other_numbers_of_a_group_are_restored(tmp_path):
    """An optimizer may keep counters in its groups."""
    run = build(tmp_path)
    run.optimizers[0].param_groups[0]["num_restarts"] = 3
    path = savers.save(run)
    again = build(tmp_path)
    read_write.load(again, path)
    assert again.optimizers[0].param_groups[0]["num_restarts"] == 3


@pytest.mark.parametrize("saved_on_cpu", [True, False])
@pytest.mark.parametrize(
    ("field", "switches", "device"),
    [
        ("step", {"fused": True}, "meta"),
        ("step", {"fused": False}, "cpu"),
        ("step", {"fused": False, "capturable": True}, "meta"),
        ("step", {}, None),
        ("exp_avg", {"fused": False}, None),
    ],
)
def test_the_step_is_on_the_device_where_the_kernels_read_it(field, switches, device, saved_on_cpu):
    """Fused AdamW reads it on the device, the loop over parameters on the host; None: as saved."""
    found = state.device_of(
        field, switches, torch.empty(2, device="meta"), saved_on_cpu=saved_on_cpu
    )
    assert found.type == (device or ("cpu" if saved_on_cpu else "meta"))
