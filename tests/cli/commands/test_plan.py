"""`flatout plan`: what a run will need, without data and without a GPU."""

import json
import math
import shutil
from unittest.mock import Mock

import pytest

from flatout.cli.commands.plan import plan
from flatout.cli.commands.train import train
from flatout.display import terminal_text
from flatout.errors import CheckpointError, ConfigError, UsageError
from flatout.hardware import machine as hardware
from flatout.measure.plan import prediction

pytestmark = pytest.mark.slow

SMALL = [
    "model.num_layers=2",
    "model.d_model=32",
    "model.num_heads=2",
    "data.seq_len=16",
    "batch.tokens_per_step=128",
    "train.steps=6",
]
ON_CPU = [*SMALL, "train.device=cpu", "speedups=auto,-compile"]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("{}\n")
    return path


def test_a_recipe_is_planned_for_gpus_that_are_not_here(recipe):
    found = plan(recipe, [*SMALL, "model.vocab_size=101"], machine="8x H100", price_per_hour=20.0)
    assert (found.device, found.world_size) == ("cuda", 8)
    assert found.machine == "8x NVIDIA H100 80GB HBM3 (h100-sxm)"
    assert found.fits
    assert found.tokens_per_s_from.startswith("an assumed 15 us to start each of ")
    assert 0 < found.mfu < 0.3
    assert found.kwh == pytest.approx(8 * 700 * found.wall_s / 3.6e6)
    assert found.cost == pytest.approx(20 * found.wall_s / 3600)
    assert found.tokens == 6 * 128
    assert sum(found.params_by_part.values()) == found.params
    assert found.flops_per_token < found.flops_per_token_palm
    assert found.changes == []
    assert "1 row per device, 1 micro-batch per step; 6 steps" in found.summary()


@pytest.mark.quick_cases("rtx-2080-ti", "a100-40gb")
@pytest.mark.parametrize("machine", ["t4", "v100-sxm2-16gb", "rtx-2080-ti", "a100-40gb"])
def test_a_long_run_is_compiled_and_timed_on_gpus_with_and_without_bf16(recipe, machine):
    words = [*SMALL, "model.vocab_size=101", "model.d_model=256", "train.steps=900000000"]
    found = plan(recipe, words, machine=machine)
    assert "compile" in found.speedups
    assert ("fp16" in found.speedups) == (machine != "a100-40gb")
    assert found.tokens_per_s
    assert found.wall_s
    assert 0 < found.mfu < 1


def test_layers_that_processes_share_are_planned_for_as_many_processes(recipe):
    words = [*SMALL, "model.vocab_size=100", "train.device=cuda", "speedups=none"]
    assert plan(recipe, [*words, "parallel.tensor=2"]).world_size == 2
    assert plan(recipe, [*words, "parallel.tensor=2", "parallel.shard=4"]).world_size == 8
    words += ["model.tied_head=false", "parallel.pipeline=2"]
    assert plan(recipe, [*words, "parallel.tensor=2"]).world_size == 4


def test_frozen_weights_need_neither_gradients_nor_optimizer_state(recipe):
    words = [*ON_CPU, "model.vocab_size=101"]
    lora = plan(recipe, [*words, "lora.rank=2", "train.init_from=runs/base"])
    whole = plan(recipe, words)
    adapters = lora.params_by_part["adapters"]
    assert lora.params == whole.params + adapters
    assert lora.memory["optimizer"] * 2**30 == 8 * adapters
    assert lora.memory["gradients_in_all"] * 2**30 == 4 * adapters
    fixed = ("weights", "gradients_in_all", "optimizer")
    assert sum(lora.memory[part] for part in fixed) < sum(whole.memory[part] for part in fixed) / 2
    assert 2 / 3 < lora.flops_per_token / whole.flops_per_token < 1


def test_the_tokens_of_a_step_are_compared_with_the_critical_batch_size(recipe):
    """B* = 2e8 and alpha_B = 0.21 of Kaplan et al. 2020: 2e8 / 4 ** 4.762 = 0.272 M."""
    words = [*ON_CPU, "batch.tokens_per_step=65536"]
    (note,) = [
        note for note in plan(recipe, [*words, "model.vocab_size=50304"]).notes if "Kaplan" in note
    ]
    assert note.startswith("A step has 65.5 K tokens. ")
    assert "271.7 K tokens at a loss of 4 and 2.5 M tokens at 2.5" in note
    few = plan(recipe, [*words, "model.vocab_size=257"]).notes
    assert not any("Kaplan" in note for note in few), "its losses are per byte"


def test_the_parts_of_the_memory_add_up(recipe):
    found = plan(recipe, [*ON_CPU, "model.vocab_size=101", "train.devices=2"])
    assert found.world_size == 2
    memory = found.memory
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
    whole = sum(memory[part] for part in parts)
    assert memory["allocated"] == pytest.approx(whole)
    assert memory["total"] == pytest.approx(memory["reserved"] + memory["context"])


def test_a_dataset_that_is_here_gives_vocabulary_and_length(recipe, tiny_set, tmp_path):
    overrides = [word for word in ON_CPU if "steps" not in word]
    found = plan(recipe, [*overrides, f"data.path={tiny_set}"])
    assert found.steps
    assert found.notes == []
    assert found.params_by_part["embedding"] == 32 * 257
    missing = tmp_path / "none"
    found = plan(recipe, [*ON_CPU, "model.vocab_size=101", f"data.path={missing}"])
    note = f"{missing} is not a dataset here, so the time omits the evaluations."
    assert found.notes == [note]
    found = plan(recipe, [*overrides, "model.vocab_size=101"])
    assert (found.steps, found.tokens, found.wall_s, found.kwh, found.cost) == (None,) * 5
    assert found.tokens_per_s
    assert "length unknown" in found.summary()


def test_a_gpu_recipe_on_a_machine_without_one(recipe, monkeypatch):
    monkeypatch.setattr(hardware, "_gpus", lambda: ())
    found = plan(recipe, [*SMALL, "model.vocab_size=101", "train.device=cuda"])
    assert found.fits is False
    assert found.tokens_per_s is None
    assert "a GPU that is not here" in found.summary()
    assert "Name the one to plan for: --machine H100." in found.summary()
    assert max(map(len, terminal_text(found.display(), 80).splitlines())) <= 80


NO_CHECKPOINTING = "speedups=auto,-checkpointing,-selective-checkpointing"
LARGE = ["model.num_layers=48", "model.d_model=4096", "model.num_heads=32"]
LONG = ["model.vocab_size=50304", "data.seq_len=1024", "train.steps=10"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_large_model_fits_in_a_mesh_or_gets_changes_that_save_memory(recipe):
    shape = ["model.num_layers=12", "model.d_model=2048", "model.num_heads=16", *LONG]
    batch = ["batch.tokens_per_step=65536", "batch.rows_per_device=8", NO_CHECKPOINTING]
    shared = plan(recipe, [*shape, *batch], machine="8x T4")
    assert shared.meshes[0].overrides == ["parallel.tensor=8"]
    assert shared.fits
    found = plan(recipe, [*shape, *batch, "parallel.shard=8"], machine="8x T4")
    assert found.fits is False
    assert found.meshes == []
    words = [change.overrides[0] for change in found.changes]
    assert {"parallel.offload=cpu", "batch.rows_per_device=4"} <= {*words}
    assert all(change.saves_gib > 0 for change in found.changes)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_of_which_not_even_one_row_fits(recipe):
    found = plan(recipe, [*LARGE, *LONG], machine="T4")
    assert found.fits is False
    assert found.largest_rows_per_device == 0
    assert "not even one row fits" in found.summary()


@pytest.mark.slow
def test_a_mesh_is_chosen_for_several_machines(recipe):
    shape = ["model.num_layers=12", "model.d_model=2048", "model.num_heads=16", *LONG]
    words = [*shape, "batch.tokens_per_step=1048576", "data.seq_len=32768"]
    found = plan(recipe, words, machine="2x8 A100, 100 Gb/s")
    best, *others = found.meshes
    assert best.fits
    assert [mesh.fits for mesh in found.meshes] == sorted(
        [mesh.fits for mesh in found.meshes], reverse=True
    )
    assert found.tokens_per_s == pytest.approx(best.tokens_per_s)
    for key in ("parallel.context=4", "parallel.tensor=8"):
        assert any(key in mesh.overrides for mesh in others), key
    assert "gathering weights" in found.tokens_per_s_from or best.overrides[0].endswith("=1")
    assert " ".join(best.overrides) in found.summary()
    assert plan(recipe, [*words, "parallel.shard=16"], machine="2x8 A100").meshes == []
    words += ["model.tied_head=false", "data.seq_len=1024", "batch.tokens_per_step=131072"]
    best = plan(recipe, words, machine="2x8 A100, 1 Gb/s").meshes[0]
    assert best.fits
    assert "parallel.pipeline=2" in best.overrides, "the least traffic between the machines"


@pytest.mark.thorough
@pytest.mark.slow
def test_each_change_that_fits_does_fit(recipe):
    shape = ["model.num_layers=12", "model.d_model=768", "model.num_heads=12"]
    overrides = [*shape, *LONG]
    batch = ["batch.rows_per_device=128", "batch.accumulate=1"]
    added = plan(recipe, [*overrides, *batch], machine="A10")
    assert added.fits
    assert "`auto` turns on checkpointing: without it, 128 rows" in added.summary()
    overrides.append(NO_CHECKPOINTING)
    found = plan(recipe, [*overrides, *batch], machine="A10")
    assert found.fits is False
    fitting = [change for change in found.changes if change.fits]
    assert fitting
    rows = next(c for c in fitting if c.overrides[0].startswith("batch"))
    assert plan(recipe, [*overrides, *rows.overrides], machine="A10").fits
    full = next(c for c in found.changes if c.overrides[0].endswith("+checkpointing"))
    assert "published runs" in full.source
    assert full.need_gib + full.saves_gib == pytest.approx(found.memory["total"])
    assert "To make it fit" in found.summary()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_that_fits_with_fewer_rows_has_no_time(recipe):
    overrides = [*SMALL, "model.vocab_size=50304", "batch.rows_per_device=1_000_000"]
    tokens = "batch.tokens_per_step=16000000"
    found = plan(recipe, [*overrides, tokens], machine="T4", price_per_hour=1.0)
    assert found.fits is False
    assert found.largest_rows_per_device > 0
    assert [found.tokens_per_s, found.wall_s, found.mfu, found.kwh, found.cost] == [None] * 5
    lines = found.summary().splitlines()
    assert "Speed       none: it does not fit" in lines
    assert not [line for line in lines if line.startswith(("Time", "Energy", "Cost"))]


def test_a_run_here_gives_the_rate_of_the_next_plan(recipe, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    config = tiny_config(train__steps=20)
    done = train(config, run=tmp_path / "run")
    path = tmp_path / "same.yaml"
    path.write_text(json.dumps(config.to_dict()))
    found = plan(path)
    assert found.tokens_per_s == pytest.approx(done.tokens_per_s)
    assert found.tokens_per_s_from.startswith("1 earlier run of this shape here")
    assert found.wall_s == pytest.approx(done.wall_s, rel=0.2)


def test_a_custom_model_that_needs_values_has_no_memory_estimate(recipe, monkeypatch):
    monkeypatch.setattr(prediction, "estimate", Mock(side_effect=RuntimeError("data-dependent")))
    found = plan(recipe, [*ON_CPU, "model.vocab_size=101", "batch.rows_per_device=4"])
    assert found.memory is found.fits is found.peak_gib is found.largest_rows_per_device is None
    assert any("RuntimeError: data-dependent" in note for note in found.notes)
    assert math.isfinite(found.tokens_per_s)


def test_micro_batches_are_compared_in_a_table(recipe):
    found = plan(recipe, [*SMALL, "model.vocab_size=101"], machine="T4", rows="4096,2,2,1000000")
    assert [batch.rows_per_device for batch in found.batches] == [2, 4096, 1_000_000]
    assert [batch.fits for batch in found.batches] == [True, True, False]
    first, second, last = found.batches
    assert first.need_gib < second.need_gib < last.need_gib
    assert last.tokens_per_s is None
    table = found.summary().partition("Micro-batches\n")[2].splitlines()
    for row, rows in zip(table[1:4], (2, 4096, 1_000_000), strict=True):
        stated, tokens, shown = row.split()[:3]
        assert (stated, shown) == (f"batch.rows_per_device={rows}", f"{rows:,}")
        assert tokens.startswith("batch.tokens_per_step=")
    assert first.tokens_per_s < second.tokens_per_s
    for rows in ("0", "x", "-2"):
        with pytest.raises(ConfigError, match="is not a list of rows"):
            plan(recipe, [*SMALL, "model.vocab_size=101"], rows=rows)


@pytest.mark.parametrize(
    ("setting", "about"),
    [
        ("log.to=5", "5"),
        ("train.device=gpu0", "gpu0"),
        ("checkpoint.upload=3", "checkpoint.upload=3 is not a URL"),
        ("train.init_from=s3://bucket/run", "is a URL"),
    ],
)
def test_settings_that_train_rejects_are_rejected(recipe, setting, about):
    for command in (plan, train):
        with pytest.raises(UsageError, match=about):
            command(recipe, [*SMALL, "model.vocab_size=101", setting])


def test_a_run_on_the_gpu_of_a_mac_is_planned(recipe):
    found = plan(recipe, [*SMALL, "model.vocab_size=101", "train.device=mps"])
    assert (found.device, found.tokens_per_s) == ("mps", None)
    assert "core" in found.machine


@pytest.mark.parametrize("by_tokens", ["false", "true"])
def test_padding_is_not_planned_as_tokens(recipe, ragged_set, tmp_path, by_tokens):
    """The rate is that of `train`, which counts the tokens of documents."""
    words = [word for word in ON_CPU if not word.startswith(("data", "batch", "speedups"))]
    words += [f"data.path={ragged_set}", "data.seq_len=128", "batch.tokens_per_step=2048"]
    words += [f"batch.by_tokens={by_tokens}", "speedups=auto,-compile,+length-buckets"]
    found = plan(recipe, words)
    done = train(recipe, words, run=tmp_path / "run")
    assert found.tokens == pytest.approx(done.tokens, rel=0.2)
    assert found.tokens < 0.9 * 6 * 2048
    packed = plan(recipe, [*words[:-2], "speedups=auto,-compile"])
    assert packed.tokens == 6 * 2048
    share = 1 if by_tokens == "true" else 1.1 * found.tokens / packed.tokens
    assert found.tokens_per_s < share * packed.tokens_per_s


def test_weights_that_are_here_must_be_readable(recipe, fox_run, tmp_path):
    """Those that are elsewhere are not needed."""
    words = [*SMALL, "model.vocab_size=101"]
    run = shutil.copytree(fox_run[0] / "runs" / "fox", tmp_path / "run")
    for weights in run.glob("checkpoints/*/model-*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"No checkpoint .*damaged"):
        plan(recipe, [*words, f"train.init_from={run}"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is no such run or checkpoint"):
        plan(recipe, [*words, f"train.init_from={tmp_path / 'empty'}"])
    assert plan(recipe, [*words, "train.init_from=elsewhere"]).params
