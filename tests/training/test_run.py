"""A run from its configuration to its summary, stopped and resumed."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flatout.assembly.resolve import epoch_tokens
from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, DataError, RunFailed, Stopped
from flatout.hardware.machine import Gpu, Machine
from flatout.inference.generate import Sampling, sample
from flatout.inference.load import load_run
from flatout.training import loop
from flatout.training import run as training
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.merged import read_merged
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_config, read_exit_code
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow

NAMES = {
    "train/loss", "train/lr", "train/grad_norm", "train/epoch", "val/loss", "perf/tokens_per_s",
    "perf/samples_per_s", "perf/steps_per_s", "perf/mfu", "perf/step_ms", "perf/data_wait_ms",
    "perf/host_ms", "perf/device_ms", "mem/allocated_gib", "mem/peak_gib", "mem/reserved_gib",
    "mem/process_gib", "gpu/util_pct", "gpu/power_w",
    "cpu/cores", "cpu/other_cores",  # where at least a second lies between two records
}  # fmt: skip


class Watch(Quiet):
    """Records the calls of a run in order."""

    def __init__(self):
        self.calls = []

    def on_start(self, run):
        self.calls.append("start")

    def on_tick(self, step, last_step):
        self.calls.append(("tick", step, last_step))

    def on_event(self, event):
        self.calls.append(("event", event["event"]))

    def on_record(self, record):
        self.calls.append(("record", record["step"]))

    def on_end(self, summary):
        self.calls.append("end")


@pytest.fixture
def losses(records):
    """Return a function that reads the loss and gradient norm of each step of a run."""

    def read(run):
        trained = [record for record in records(run) if "train/loss" in record]
        return [(r["step"], r["train/loss"], r["train/grad_norm"]) for r in trained]

    return read


def test_a_run_writes_all_files_and_numbers(tiny_config, tmp_path, records, events, losses):
    folder = tmp_path / "run"
    summary = run_training(tiny_config(train__eval_every=2, train__eval_tokens=64), folder)
    assert summary["steps"] == 6
    assert summary["tokens"] == 6 * 128
    assert summary["train_loss"] == losses(folder)[-1][1]
    assert RunLog(folder).summary == summary
    assert read_exit_code(folder) == 0
    files = ("config.yaml", "metrics.jsonl", "events.jsonl", "lock")
    for name in (*files, "checkpoints/step-6", "tensorboard"):
        assert (folder / name).exists(), name
    assert [r["step"] for r in records(folder) if "train/loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records(folder) if "val/loss" in r] == [2, 4, 6]
    for record in records(folder):
        assert {"step", "tokens", "wall_s", "elapsed_s"} <= set(record)
        assert {name for name in record if "/" in name} <= NAMES
        assert record["tokens"] == 128 * record["step"]
    speedups = events(folder, "speedup")
    assert {event["name"] for event in speedups} >= {"prefetch", "compile"}
    assert all(event["reason"] for event in speedups)


def test_evaluations_by_epochs_are_written_down_in_steps(tiny_config, tmp_path, records, stop_at):
    folder, config = tmp_path / "run", tiny_config(train__steps=9, checkpoint__keep=9)
    per_epoch = epoch_tokens(Dataset.open(config.data.path), config.data.seq_len) / 128
    config = config.with_values({"train.eval_every_epochs": 2.5 / per_epoch})
    with pytest.raises(Stopped):
        run_training(config, folder, observers=[stop_at(4)])
    assert read_config(folder).train.eval_every == 3
    assert read_config(folder).train.eval_every_epochs is None
    run_training(config, folder)
    assert [r["step"] for r in records(folder) if "val/loss" in r] == [3, 6, 9]
    twice = config.with_values({"train.eval_every_epochs": 1.5 / per_epoch, "train.steps": 10})
    longer = tmp_path / "longer"
    run_training(twice, longer, resume=str(folder / "checkpoints" / "step-4"))
    assert [r["step"] for r in records(longer) if "val/loss" in r] == [6, 8, 10]


def test_one_process_cannot_have_several_devices(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.devices=2 needs 2 processes, but this is one"):
        run_training(tiny_config(train__devices=2), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run_training(tiny_config(train__devices="all", train__steps=1), tmp_path / "all")


def test_idle_gpus_are_mentioned(monkeypatch):
    lines = []
    for count in (1, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        training.say_idle_gpus(SimpleNamespace(say=lines.append))
    assert lines == ["This run uses 1 of 2 GPUs. train.devices=all uses all of them."]


WITHOUT_LINUX = """
import os, sys
from pathlib import Path
for name in ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fallocate"):
    if hasattr(os, name):
        delattr(os, name)
read_text = Path.read_text
def without_proc(path, *arguments, **options):
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return read_text(path, *arguments, **options)
Path.read_text = without_proc
import flatout
from flatout.training.run_dir.runlog import RunLog
book = Path("book.txt")
book.write_text("It was a dark and stormy night; the rain fell in torrents. " * 60)
data = flatout.prepare([book], out="data/book", tokenizer="byte")
result = flatout.train("my.yaml", run="runs/first")
assert flatout.train("my.yaml", run="runs/first", resume="auto").steps == result.steps
print(result.steps, result.val_loss > 0)
"""
"""Removes what macOS lacks, prepares and trains."""


@pytest.mark.thorough
def test_a_run_needs_nothing_that_only_linux_has(tmp_path, tiny):
    settings = {**tiny, "data.path": "data/book", "train.steps": 2, "log.every": 1}
    recipe = load_config().with_values(settings).to_dict()
    (tmp_path / "my.yaml").write_text(json.dumps(recipe))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_LINUX],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["2", "True"], done.stderr
    first = json.loads((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()[0])
    assert "mem/process_gib" not in first


def test_mps_is_said_to_be_untried_and_rejected_for_the_eigenstate_model():
    lines = []
    progress = SimpleNamespace(say=lines.append)
    training.require_mps_model(load_config(None), progress)
    assert "never been run on MPS" in lines[0]
    with pytest.raises(ConfigError, match=r"float64, which train\.device=mps does not"):
        training.require_mps_model(load_config(None, ["model.kind=eigenstate"]), progress)


def test_padding_counts_neither_as_tokens_nor_as_samples(tiny_config, tmp_path, records):
    config = tiny_config(
        speedups="auto,-compile,+length-buckets",
        data__seq_len=64,
        batch__tokens_per_step=512,
        train__steps=None,
        train__epochs=1.0,
    )
    summary = run_training(config, tmp_path / "run")
    dataset = Dataset.open(config.data.path)
    split = dataset.manifest.splits["train"]
    assert summary["tokens"] == split.tokens - split.documents < 512 * summary["steps"]
    trained = [record for record in records(tmp_path / "run") if "perf/samples_per_s" in record]
    assert trained[-1]["train/epoch"] == 1.0
    assert trained[-1]["tokens"] == summary["tokens"]
    rows = sum(record["perf/samples_per_s"] / record["perf/steps_per_s"] for record in trained)
    lengths = np.diff(dataset.split("train").document_ends, prepend=0)
    assert rows == pytest.approx(sum(-(-(length - 1) // 64) for length in lengths))


def test_a_run_by_tokens_resumes_with_another_micro_batch(tiny_config, tmp_path, stop_at, records):
    config = tiny_config(
        speedups="auto,-compile,+length-buckets",
        data__seq_len=64,
        batch__tokens_per_step=512,
        batch__rows_per_device=8,
        batch__by_tokens=True,
        train__steps=None,
        train__epochs=2,
    )
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[stop_at(3)])
    smaller = config.with_values({"batch.rows_per_device": 2})
    resumed = run_training(smaller, tmp_path / "run")
    assert resumed["tokens"] == whole["tokens"]
    lines, others = (
        [line for line in records(tmp_path / name) if "train/loss" in line]
        for name in ("run", "whole")
    )
    for one, other in zip(lines, others, strict=True):
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)
    split = Dataset.open(config.data.path).split("train")
    rows = sum(-(-(size - 1) // 64) for size in np.diff(split.document_ends, prepend=0))
    assert whole["steps"] == -(-2 * rows // 8)
    assert lines[-1]["train/epoch"] == pytest.approx(8 * whole["steps"] / rows)


def test_the_best_checkpoint_compares_losses_on_the_same_tokens(
    tiny_config, tmp_path, records, events
):
    """The start of the validation text may be easier than the whole."""
    config = tiny_config(train__eval_every=2, train__eval_tokens=64, optim__lr=1e-9)
    summary = run_training(config, tmp_path / "run")
    partial = [r["val/loss"] for r in records(tmp_path / "run") if "val/loss" in r]
    assert len(partial) == 3
    assert summary["best_val_loss"] == min(partial)
    assert summary["best_step"] == 2 * (1 + partial.index(min(partial)))
    assert summary["val_loss"] == events(tmp_path / "run", "evaluation")[0]["loss"] != partial[-1]


def test_the_stored_config_is_resolved(tiny_config, tmp_path):
    config = tiny_config(train__steps=None, train__tokens=300, batch__rows_per_device="auto")
    run_training(config, tmp_path / "run")
    stored = load_config(tmp_path / "run" / "config.yaml")
    assert stored.train.steps == 3
    assert stored.train.precision == "fp32"
    assert stored.train.device == "cpu"
    assert stored.batch.rows_per_device == 8
    assert stored.batch.accumulate == 1
    assert stored.model.vocab_size == 257
    assert "compile" not in stored.speedups
    assert "prefetch" in stored.speedups


@pytest.mark.quick_cases("bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_steps_equal_five_and_five_bit_for_bit(
    tiny_config, tmp_path, precision, stop_at, losses
):
    more = {"train__precision": precision, "checkpoint__every_steps": 5, "train__eval_every": 3}
    config = tiny_config(train__steps=10, model__dropout=0.1, optim__kind="muon", **more)
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped, match="step 5 of 10") as stop:
        run_training(config, tmp_path / "parts", observers=[stop_at(5)])
    assert stop.value.exit_code == 75
    assert read_exit_code(tmp_path / "parts") == 75
    resumed = run_training(config, tmp_path / "parts")
    assert resumed["resumed_from"].endswith("step-5")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["val_loss"] == whole["val_loss"]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert resumed["elapsed_s"] > resumed["wall_s"]


def test_a_killed_run_repeats_the_steps_since_the_last_save(tiny_config, tmp_path, losses):
    """Records after the checkpoint are dropped, so that no step appears twice."""
    config = tiny_config(train__steps=7, checkpoint__every_steps=3)
    run_training(config, tmp_path / "whole")
    folder = tmp_path / "run"

    class Killed(Exception):
        pass

    class Kill(Quiet):
        def on_tick(self, step, last_step):
            if step == 5:
                raise Killed

    with pytest.raises(Killed):
        run_training(config, folder, observers=[Kill()])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "tok\x80')
    resumed = run_training(config, folder)
    assert resumed["resumed_from"].endswith("step-3")
    assert losses(folder) == losses(tmp_path / "whole")


def test_observers_are_called_in_order(tiny_config, tmp_path):
    watch, config = Watch(), tiny_config(train__steps=2, train__sample_every=1)
    run_training(config, tmp_path / "run", observers=[watch], sample=lambda run: "words")
    ticks = ("tick", 1, 2), ("tick", 2, 2)
    order = [("event", "start"), "start", *ticks, ("event", "save"), "end"]
    positions = [watch.calls.index(call) for call in order]
    assert positions == sorted(positions)
    assert watch.calls[-1] == "end"
    assert watch.calls.count(("event", "sample")) == 2
    assert ("record", 2) in watch.calls
    again = Watch()
    run_training(config, tmp_path / "run", observers=[again])
    assert again.calls == [], "the run is finished"


def test_a_sample_that_fails_is_reported_and_the_run_completes(tiny_config, tmp_path, messages):
    def fail(run):
        raise DataError("The prompt has no tokens.", fix="Change it.")

    config = tiny_config(train__steps=2, train__sample_every=1)
    summary = run_training(config, tmp_path / "run", sample=fail, progress=messages)
    assert summary["steps"] == 2
    lines = [line for line in messages.lines if "sample" in line]
    assert lines == [
        f"There is no sample at step {step}: The prompt has no tokens." for step in (1, 2)
    ]


def test_two_runs_of_one_configuration_are_equal_bit_for_bit(tiny_config, tmp_path):
    """Evaluations and samples do not affect training, and the seed does."""

    def weights(name, **changes):
        config = tiny_config(model__dropout=0.2, **changes)
        return run_training(config, tmp_path / name, sample=lambda run: "")["weights_sha256"]

    first = weights("a")
    assert weights("b", train__eval_every=1, train__sample_every=2) == first
    assert weights("c", train__seed=1) != first


def test_a_diverging_run_ends_after_its_bad_steps_and_saves_only_finite_weights(
    tiny_config, tmp_path, records
):
    config = tiny_config(
        optim__lr=1e30,
        optim__clip=0.0,
        train__steps=40,
        schedule__warmup=0,
        schedule__kind="constant",
        checkpoint__every_steps=1,
        train__max_bad_steps=3,
    )
    with pytest.raises(RunFailed, match="Training has diverged: 3 bad steps in a row") as failed:
        run_training(config, tmp_path / "run")
    assert read_exit_code(tmp_path / "run") == failed.value.exit_code == 1
    assert 1 <= len(records(tmp_path / "run")) < 10, "the third bad step ends it"
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    for step in catalog.steps(tmp_path / "run"):
        weights = read_merged(catalog.checkpoint_path(tmp_path / "run", step))
        assert step <= 2
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_an_interrupt_without_a_save_leaves_its_exit_code(tiny_config, tmp_path):
    class Interrupt(Quiet):
        def on_tick(self, step, last_step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(tiny_config(), tmp_path / "run", observers=[Interrupt()])
    assert read_exit_code(tmp_path / "run") == 130


def test_the_last_steps_are_saved_before_the_final_evaluation(tiny_config, tmp_path, killed_in):
    with killed_in(loop, "score"):
        run_training(tiny_config(), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step-6").is_dir()
    assert run_training(tiny_config(), tmp_path / "run")["val_loss"] > 0


def test_a_dataset_smaller_than_a_step_is_read_more_than_once(tiny_config, tmp_path, records):
    rows = {"batch__tokens_per_step": 16 * 4096, "batch__rows_per_device": 1024}
    summary = run_training(tiny_config(train__steps=2, **rows), tmp_path / "run")
    assert summary["tokens"] == 2 * 16 * 4096
    assert records(tmp_path / "run")[0]["train/epoch"] > 1


@pytest.mark.thorough
def test_a_run_overfits_a_small_dataset(tiny_config, tmp_path):
    rows = {"batch__tokens_per_step": 512, "batch__rows_per_device": 32}
    summary = run_training(tiny_config(train__steps=300, log__every=100, **rows), tmp_path / "run")
    assert summary["train_loss"] < 1.2
    assert summary["val_loss"] < 1.3


def test_a_trained_model_generates_without_its_data(tiny_config, tiny_set, tmp_path):
    data = tmp_path / "moved"
    shutil.copytree(tiny_set, data)
    run_training(tiny_config(data__path=str(data)), tmp_path / "run")
    shutil.rmtree(data)
    loaded = load_run(tmp_path / "run")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("a run")) == "a run"
    assert "".join(sample(loaded.model, loaded.tokenizer, "a", Sampling(max_tokens=5)))
    with pytest.raises(DataError, match="no dataset directory"):
        _ = loaded.dataset


def test_the_first_run_on_an_unmeasured_gpu_suggests_bench(tiny_config, tmp_path, messages):
    h200 = Machine("a CPU", 2, 8.0, (Gpu("NVIDIA H200", 139.0, (9, 0), "580"),), "3.11")

    def lines(device="cuda:0", cache=tmp_path / "cache", checkpoint=None):
        messages.lines.clear()
        mesh = SimpleNamespace(device=torch.device(device))
        run = SimpleNamespace(machine=h200, mesh=mesh, config=tiny_config())
        request = SimpleNamespace(cache=cache, progress=messages)
        training.suggest_bench(run, SimpleNamespace(checkpoint=checkpoint), request)
        return [*messages.lines]

    assert lines(cache=None) == lines(device="cpu") == lines(checkpoint=tmp_path) == []
    (line,) = lines()
    assert line.startswith(
        "No speedup has been measured on this GPU (NVIDIA H200). `flatout bench "
    )
    assert lines() == [], "once"
