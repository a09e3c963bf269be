"""8-bit moments: close to fp32 ones, as small as the estimate, and saved in full."""

import re
import sys

import pytest
import torch

from flatout.assembly import speedup
from flatout.assembly.memory import estimate, workload_of
from flatout.config.registry import SPEEDUPS
from flatout.errors import CheckpointError, MissingPackage
from flatout.hardware.machine import probe
from flatout.optim.adamw_8bit import AdamW8bit
from flatout.speedups.adamw_8bit import adamw_8bit
from flatout.training.checkpoint import read_write, savers, state
from flatout.training.step import train_step

NAME = "adamw-8bit"
KEYWORDS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
# torch's own compiler instantiates deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def package():
    """Skip the tests where torchao is not installed."""
    pytest.importorskip("torchao")


def weights():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(128, 32, generator=generator), torch.randn(32, generator=generator)


def trained(make, matrix, vector, *, steps=6):
    members = [torch.nn.Parameter(matrix), torch.nn.Parameter(vector)]
    rates = {"lr": 1e-2, "peak_lr": 1e-2}
    decays = zip(members, (0.1, 0.0), strict=True)
    groups = [{"params": [one], "weight_decay": decay, **rates} for one, decay in decays]
    optimizer = make(groups, KEYWORDS)
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        for member in members:
            member.grad = torch.randn(member.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] / (step + 1)
        optimizer.step()
    return members, optimizer


def test_updates_are_close_to_fp32_and_equal_for_small_tensors():
    def plain(groups, keywords):
        return torch.optim.AdamW(groups, **keywords, fused=True)

    (matrix, vector), optimizer = trained(adamw_8bit, *weights())
    (plain_matrix, plain_vector), _ = trained(plain, *weights())
    moved = (plain_matrix - weights()[0]).abs().mean()
    assert 0 < (matrix - plain_matrix).abs().mean() < 0.1 * moved
    torch.testing.assert_close(vector, plain_vector)
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(1e-2 / 6)] * 2


@pytest.mark.thorough
def test_weights_and_codes_are_torchaos_own():
    from torchao import optim

    class Theirs(optim.AdamW8bit):
        def step(self):
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"])
            super().step()

    (matrix, _), optimizer = trained(adamw_8bit, *weights())
    (expected, _), theirs = trained(lambda groups, keywords: Theirs(groups, **keywords), *weights())
    state, wanted = optimizer.state[matrix], theirs.state[expected]
    assert torch.equal(matrix, expected)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[name], wanted[name].codes)
        assert torch.equal(state[f"{name}_scale"], wanted[name].scale)


@pytest.mark.parametrize("saved_on_cpu", [True, False])
def test_the_step_is_restored_on_the_device_of_the_weights(saved_on_cpu):
    """A run on a CPU, or with the loop over parameters on a GPU, saved it from the CPU."""
    matrix = torch.nn.Parameter(torch.empty(128, 32, device="meta"))
    made = AdamW8bit([{"params": [matrix]}], KEYWORDS, codec=None)
    (group,) = made.param_groups
    found = state.device_of("step", group, matrix, saved_on_cpu=saved_on_cpu)
    assert found == matrix.device


def test_a_new_rate_does_not_recompile():
    from torch._dynamo.utils import counters

    trained(adamw_8bit, *weights(), steps=1)
    before = counters["stats"]["unique_graphs"]
    trained(adamw_8bit, *weights(), steps=5)
    assert counters["stats"]["unique_graphs"] == before


def steps(run, count):
    losses = []
    for _ in range(count):
        losses.append(float(train_step(run, next(run.loader)).loss))
        run.step += 1
    return losses


@pytest.mark.quick_cases("muon")
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_resuming_after_five_steps_equals_ten_steps(optim, build_run, tiny_config, tmp_path):
    config = tiny_config(train__steps=10, optim__kind=optim, model__vocab_size=264, speedups=NAME)
    unbroken, half = build_run(config, tmp_path / "whole"), build_run(config, tmp_path / "half")
    losses = steps(unbroken, 10)
    assert steps(half, 5) == losses[:5]
    saved = savers.save(half)
    again = build_run(config, tmp_path / "half")
    steps(again, 2)
    read_write.load(again, saved)
    assert steps(again, 5) == losses[5:]
    for one, other in zip(unbroken.core.parameters(), again.core.parameters(), strict=True):
        assert torch.equal(one, other)
    assert '"uint8"' in (saved / "index.json").read_text()


KINDS = {"baseline": "none", "fused": "fused-adamw", "torchao": NAME}


@pytest.mark.parametrize("kept", KINDS)
@pytest.mark.parametrize("stored", KINDS)
def test_a_checkpoint_with_other_moments_is_rejected(
    stored, kept, build_run, tiny_config, tmp_path
):
    before, run = (
        build_run(tiny_config(model__vocab_size=264, speedups=KINDS[kind]), tmp_path / name)
        for name, kind in (("before", stored), ("after", kept))
    )
    losses = steps(before, 2)
    path = savers.save(before)
    if stored == kept or {stored, kept} == {"baseline", "fused"}:
        read_write.load(run, path)
        assert steps(run, 1)[0] < losses[0]
        return
    with pytest.raises(CheckpointError) as refused:
        read_write.load(run, path)
    assert refused.value.exit_code == 2
    what, fix = refused.value.what, refused.value.fix
    names = [NAME if kind == "torchao" else "fp32" for kind in (stored, kept)]
    assert re.findall(r"adamw-8bit|fp32", what) == names
    assert re.findall(r"adamw-8bit|fp32", fix)[0] == NAME
    assert ("without" in fix) is (names[0] == "fp32")
    assert "train.init_from" in fix


def test_a_model_of_small_tensors_resumes_with_fp32_moments(build_run, tiny_config, tmp_path):
    """torchao quantises none of them, so checkpoints with and without it are the same."""
    small = {"model__d_model": 8, "model__num_heads": 1, "model__vocab_size": 264}
    before = build_run(tiny_config(**small, speedups="adamw-8bit"), tmp_path / "before")
    steps(before, 2)
    after = build_run(tiny_config(**small, speedups="fused-adamw"), tmp_path / "after")
    read_write.load(after, savers.save(before))
    assert steps(after, 2) == steps(before, 2)


def test_the_memory_estimate_equals_the_optimizer_state(build_run, tiny_config):
    run = build_run(tiny_config(speedups=NAME, model__vocab_size=264))
    steps(run, 1)
    states = run.optimizers[0].state.values()
    kept = sum(state[name].nbytes for state in states for name in state.keys() - {"step"})
    assert estimate(workload_of(run.config), 1).optimizer == kept
    assert kept < 0.5 * sum(8 * p.numel() for p in run.core.parameters())


def test_a_missing_package_is_reported_with_its_install_line(monkeypatch, tiny_config):
    for name in ["torchao.optim", *(name for name in sys.modules if name.startswith("torchao"))]:
        monkeypatch.setitem(sys.modules, name, None)
    words = "needs the package torchao, which is not installed"
    with pytest.raises(MissingPackage, match=words) as raised:
        adamw_8bit([], KEYWORDS)
    install = 'pip install "flatout[adamw-8bit]"'
    assert install in str(raised.value)
    monkeypatch.setattr(speedup, "find_spec", lambda _: None)
    assert install in SPEEDUPS.get(NAME).why_not(probe(), tiny_config())


@pytest.mark.parametrize("key", [{"parallel__shard": 2}, {"parallel__offload": "cpu"}])
def test_sharded_weights_are_rejected(tiny_config, key):
    refused = SPEEDUPS.get(NAME).why_not(probe(), tiny_config(**key))
    assert "remove parallel.shard" in refused
