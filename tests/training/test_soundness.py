"""A wrong value that a device computes is named before it is saved, or spoils an evaluation."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from fakes import restate
from safetensors.torch import load_file, save_file
from warm import run_ranks

from flatout.errors import CheckpointError, RunFailed, Stopped
from flatout.training import loop
from flatout.training.checkpoint import catalog
from flatout.training.run import run_training

pytestmark = pytest.mark.slow

WEIGHT = "blocks.0.mlp.up.weight"


@pytest.fixture
def faulty(monkeypatch):
    """Return a function that executes a fault after a step of a run in this process."""

    def plant(step, fault):
        plain = loop.train_step

        def wrong(run, *arguments):
            result = plain(run, *arguments)
            if run.step + 1 == step:
                with torch.no_grad():
                    fault(run)
            return result

        monkeypatch.setattr(loop, "train_step", wrong)

    return plant


def weight(run):
    return dict(run.core.named_parameters())[WEIGHT]


def moment(run):
    (state,) = (each.state[weight(run)] for each in run.optimizers if weight(run) in each.state)
    return state["exp_avg"]


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda run: weight(run)[0, 0].fill_(torch.nan), WEIGHT),
        (lambda run: weight(run)[0, 0].fill_(torch.inf), WEIGHT),
        (lambda run: moment(run)[0, 0].fill_(torch.nan), f"{WEIGHT}/exp_avg"),
        # a token that is never seen
        (lambda run: run.core.token_embedding.weight[-1].fill_(torch.nan), "token_embedding"),
    ],
    ids=["weight", "infinite", "moment", "unseen token"],
)
def test_what_is_not_finite_is_not_saved(tiny_config, tmp_path, faulty, monkeypatch, fault, name):
    config = tiny_config(checkpoint__every_steps=2, train__eval_every=0, speedups="none")
    whole = run_training(config, tmp_path / "whole")
    faulty(4, fault)
    with pytest.raises(RunFailed, match=f"Not finite at step 4: .*{re.escape(name)}") as failed:
        run_training(config, tmp_path / "run")
    assert "continues from the last checkpoint" in failed.value.fix
    assert catalog.steps(tmp_path / "run") == [2]
    monkeypatch.undo()
    again = run_training(config, tmp_path / "run")
    assert again["weights_sha256"] == whole["weights_sha256"]


def plant(checkpoint):
    """Make one value of a moment NaN in a checkpoint whose checksums stay valid."""
    (path,) = checkpoint.glob("optimizer-*.safetensors")
    tensors = load_file(path)
    tensors[f"optimizer/0/{WEIGHT}/exp_avg"][0, 0] = torch.nan
    save_file(tensors, path)
    restate(checkpoint)


BAD_ENDS = {
    "at a save": {"train__eval_every": 0, "train__max_bad_steps": 9},
    "at an evaluation": {"train__eval_every": 3},
    "after bad steps": {"train__eval_every": 0, "train__max_bad_steps": 2, "train__steps": 12},
}


@pytest.mark.quick_cases("at a save")
@pytest.mark.parametrize("changes", BAD_ENDS.values(), ids=BAD_ENDS)
def test_a_checkpoint_that_leads_to_bad_steps_twice_gives_way_to_the_one_before(
    tiny_config, tmp_path, stop_at, events, messages, changes
):
    base = {"train__steps": 8, "checkpoint__every_steps": 2, "speedups": "none"}
    config, run = tiny_config(**base | changes), tmp_path / "run"
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(config, run, observers=[stop_at(5)])
    before, newest = (catalog.checkpoint_path(run, step) for step in catalog.steps(run)[-2:])
    plant(newest)
    for _ in range(2):
        with pytest.raises(RunFailed):
            run_training(config, run)
    summary = run_training(config, run, progress=messages)
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert summary["resumed_from"] == str(before)
    assert any(f"{newest.name} has ended in bad steps again" in line for line in messages.lines)
    *failed, resumed = events(run, "resume")
    assert [event.get("rejected") for event in failed] == [None, None]
    assert resumed["rejected"] == [5]
    assert run_training(config, run) == summary


def test_a_run_whose_checkpoints_all_lead_to_bad_steps_says_what_to_do(
    tiny_config, tmp_path, stop_at
):
    config, run = tiny_config(checkpoint__every_steps=2, speedups="none"), tmp_path / "run"
    with pytest.raises(Stopped):
        run_training(config, run, observers=[stop_at(5)])
    for step in catalog.steps(run):
        plant(catalog.checkpoint_path(run, step))
    for _ in range(1 + len(catalog.steps(run))):
        with pytest.raises(RunFailed):
            run_training(config, run)
    with pytest.raises(CheckpointError, match=r"Every start .*not finite") as refused:
        run_training(config, run)
    assert "--run-dir DIR" in refused.value.fix
    with pytest.raises(RunFailed, match="Not finite"):
        run_training(config, run, resume=str(catalog.checkpoint_path(run, 5)))


def test_a_weight_that_jumps_raises_an_alarm(tiny_config, tmp_path, faulty, events):
    faulty(4, lambda run: weight(run)[0, 0].fill_(1e4))
    config = tiny_config(checkpoint__every_steps=2, train__eval_every=0, speedups="none")
    summary = run_training(config, tmp_path / "run")
    (alarm,) = events(tmp_path / "run", "alarm")
    assert (alarm["since_step"], alarm["step"], alarm["now"]) == (2, 4, 1e4)
    assert summary["alarms"] == 1
    assert re.search(r"grown from \d+\.\d+ to 1e\+04, in blocks\.0\.mlp\.up", alarm["text"])


FAULTS = {
    "negated": "for p in run.core.parameters(): p.neg_()",
    "zeroed norm": "run.core.final_norm.weight.zero_()",
    "one weight": "run.core.blocks[0].mlp.up.weight[0, 0] = 4.6e37",
    "one bit": "run.core.blocks[0].mlp.up.weight[0, 0] *= 1.0000001",
    "moment": "next(iter(run.optimizers[0].state.values()))['exp_avg'].add_(1e-3)",
}


@pytest.mark.quick_cases("one bit")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_that_differs_is_named_and_not_saved(tiny_config, tmp_path, fault):
    config = tiny_config(train__devices=2, checkpoint__every_steps=2, speedups="none",
                         train__eval_every=0, batch__rows_per_device=2)  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.to_dict()))
    script = Path(__file__).with_name("faulty_rank.py")
    words = ["train", str(recipe), "--run-dir", str(tmp_path / "run")]
    done = run_ranks([script, "0", "4", FAULTS[fault], *words])
    assert done.returncode == 1, done.stderr
    assert "Ranks have different copies of " in done.stderr
    assert "at step 4: see rank 0" in done.stderr
    assert catalog.steps(tmp_path / "run") == [2]
    resumed = run_ranks(["-m", "flatout", *words])
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.thorough
def test_of_four_copies_the_odd_one_is_named(tiny_config, tmp_path):
    config = tiny_config(
        parallel__shard=2, train__devices=4, checkpoint__every_steps=2, batch__rows_per_device=1,
        train__eval_every=0, speedups="none",
    )  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.to_dict()))
    script = Path(__file__).with_name("faulty_rank.py")
    fault = "run.core.blocks[0].mlp.up.weight.to_local().neg_()"
    words = ["train", str(recipe), "--run-dir", str(tmp_path / "run")]
    done = run_ranks([script, "3", "4", fault, *words], 4)
    assert done.returncode == 1, done.stderr
    assert f"Ranks have different copies of {WEIGHT} at step 4" in done.stderr
    named = re.search(r"see (.*?)\. Nothing", done.stderr)[1]
    assert "rank 3" in named
    assert "rank 0" not in named
    assert "rank 2" not in named
