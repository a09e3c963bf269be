"""A run from its configuration to its summary, stopped and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch

from flatout.config.schema import load_config
from flatout.data.store.shards import Dataset
from flatout.errors import CheckpointError, ConfigError, DataError, RunFailed, Stopped
from flatout.inference.generate import sample
from flatout.inference.load import load_run
from flatout.progress import SILENT
from flatout.training import loop
from flatout.training import run as training
from flatout.training.checkpoint import catalog
from flatout.training.checkpoint.read_write import read_weights
from flatout.training.metrics.observers import Quiet
from flatout.training.out_of_memory import explained
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_exit_code, read_summary

NAMES = {
    "train/loss", "train/lr", "train/grad_norm", "train/epoch", "val/loss", "perf/tokens_per_s", "perf/samples_per_s", "perf/steps_per_s",
    "perf/mfu", "perf/step_ms", "perf/data_wait_ms", "perf/host_ms", "perf/device_ms", "mem/allocated_gib", "mem/peak_gib",
    "mem/reserved_gib", "gpu/util_pct", "gpu/power_w",
}  # fmt: skip


class StopAt(Quiet):
    """Asks this process to stop after a step, as Ctrl+C would."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def on_tick(self, step, last_step):
        if step == self.step:
            os.kill(os.getpid(), self.number)


class Watch(Quiet):
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


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder, kind):
    return [
        e
        for e in map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        if e["event"] == kind
    ]


def train_losses(folder):
    return [
        (r["step"], r["train/loss"], r["train/grad_norm"])
        for r in records(folder)
        if "train/loss" in r
    ]


def test_a_run_leaves_everything_the_run_folder_promises(tiny_config, tmp_path):
    folder = tmp_path / "run"
    summary = run_training(tiny_config(train__eval_every=2, train__eval_tokens=64), folder)
    assert summary["steps"] == 6
    assert summary["tokens"] == 6 * 128
    assert summary["train_loss"] == train_losses(folder)[-1][1]
    assert read_summary(folder) == summary
    assert read_exit_code(folder) == 0
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "events.jsonl",
        "summary.json",
        "checkpoints/step-6",
        "tensorboard",
        "lock",
    ):
        assert (folder / name).exists(), name
    assert [r["step"] for r in records(folder) if "train/loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records(folder) if "val/loss" in r] == [2, 4, 6]
    for record in records(folder):
        assert {"step", "tokens", "wall_s", "elapsed_s"} <= set(record)
        assert {name for name in record if "/" in name} <= NAMES
        assert record["tokens"] == 128 * record["step"]
    assert {e["name"] for e in events(folder, "speedup")} >= {"prefetch", "compile"}
    assert all(e["reason"] for e in events(folder, "speedup"))


def test_padding_is_no_token_and_no_sample(tiny_config, tmp_path):
    config = tiny_config(
        speedups="auto,-compile,+length-buckets",
        data__seq_len=64,
        batch__tokens_per_step=512,
        train__steps=None,
        train__epochs=1.0,
    )
    summary = run_training(config, tmp_path / "run")
    manifest = Dataset.open(config.data.path).manifest.splits["train"]
    assert summary["tokens"] == manifest.tokens - manifest.documents < 512 * summary["steps"]
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    trained = [record for record in records if "perf/samples_per_s" in record]
    assert trained[-1]["train/epoch"] == 1.0
    assert [record["tokens"] for record in trained][-1] == summary["tokens"]
    rows = sum(record["perf/samples_per_s"] / record["perf/steps_per_s"] for record in trained)
    ends = Dataset.open(config.data.path).split("train").document_ends
    assert rows == pytest.approx(sum(-(-(length - 1) // 64) for length in np.diff(ends, prepend=0)))


def test_the_best_checkpoint_is_chosen_among_losses_on_the_same_tokens(tiny_config, tmp_path):
    """The beginning of the validation text may be easier than the whole: the two must not be
    compared.
    """
    summary = run_training(
        tiny_config(train__eval_every=2, train__eval_tokens=64, optim__lr=1e-9), tmp_path / "run"
    )
    in_part = [r["val/loss"] for r in records(tmp_path / "run") if "val/loss" in r]
    assert len(in_part) == 3
    assert summary["best_val_loss"] == min(in_part)
    assert summary["best_step"] == 2 * (1 + in_part.index(min(in_part)))
    assert summary["val_loss"] == events(tmp_path / "run", "evaluation")[0]["loss"] != in_part[-1]


def test_the_stored_config_is_resolved(tiny_config, tmp_path):
    run_training(
        tiny_config(train__steps=None, train__tokens=300, batch__rows_per_device="auto"),
        tmp_path / "run",
    )
    stored = load_config(tmp_path / "run" / "config.yaml")
    assert stored.train.steps == 3
    assert stored.train.precision == "fp32"
    assert stored.train.device == "cpu"
    assert stored.batch.rows_per_device == 8
    assert stored.batch.accumulate == 1
    assert stored.model.vocab_size == 257
    assert "compile" not in stored.speedups
    assert "prefetch" in stored.speedups


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_steps_equal_five_and_five_in_every_bit(tiny_config, tmp_path, precision):
    more = {"train__precision": precision, "checkpoint__every_steps": 5, "train__eval_every": 3}
    config = tiny_config(train__steps=10, model__dropout=0.1, optim__kind="muon", **more)
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped, match="step 5 of 10") as stop:
        run_training(config, tmp_path / "parts", observers=[StopAt(5)])
    assert stop.value.exit_code == 75
    assert read_exit_code(tmp_path / "parts") == 75
    resumed = run_training(config, tmp_path / "parts")
    assert resumed["resumed_from"].endswith("step-5")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["val_loss"] == whole["val_loss"]
    assert train_losses(tmp_path / "parts") == train_losses(tmp_path / "whole")
    assert resumed["elapsed_s"] > resumed["wall_s"]


def test_a_resume_after_a_kill_repeats_the_steps_since_the_last_save(tiny_config, tmp_path):
    """Lines of metrics past the checkpoint are dropped, so that no step stands twice."""
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
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tok')
    resumed = run_training(config, folder)
    assert resumed["resumed_from"].endswith("step-3")
    assert train_losses(folder) == train_losses(tmp_path / "whole")


def test_sigterm_saves_too(tiny_config, tmp_path):
    with pytest.raises(Stopped):
        run_training(tiny_config(), tmp_path / "run", observers=[StopAt(2, signal.SIGTERM)])
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()


def test_a_finished_run_answers_with_its_summary_and_does_nothing(tiny_config, tmp_path):
    first = run_training(tiny_config(), tmp_path / "run")
    before = (tmp_path / "run" / "events.jsonl").read_text()
    watch = Watch()
    assert run_training(tiny_config(), tmp_path / "run", observers=[watch]) == first
    assert watch.calls == []
    assert (tmp_path / "run" / "events.jsonl").read_text() == before


def test_other_settings_in_the_same_folder_are_refused_with_the_difference(tiny_config, tmp_path):
    run_training(tiny_config(), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"optim\.lr: 0\.01 -> 0\.02"):
        run_training(tiny_config(optim__lr=0.02), tmp_path / "run")


def test_never_refuses_a_folder_that_holds_a_run(tiny_config, tmp_path):
    run_training(tiny_config(), tmp_path / "run")
    with pytest.raises(CheckpointError, match="never would write over"):
        run_training(tiny_config(), tmp_path / "run", resume="never")


def test_observers_hear_of_everything_in_order(tiny_config, tmp_path):
    watch = Watch()
    run_training(
        tiny_config(train__steps=2, train__sample_every=1),
        tmp_path / "run",
        observers=[watch],
        sample=lambda run: "words",
    )
    calls = watch.calls
    assert (
        calls.index(("event", "start"))
        < calls.index("start")
        < calls.index(("tick", 1, 2))
        < calls.index(("tick", 2, 2))
    )
    assert (
        calls.index(("tick", 2, 2))
        < calls.index(("event", "save"))
        < calls.index("end")
        == len(calls) - 1
    )
    assert calls.count(("event", "sample")) == 2
    assert ("record", 2) in calls


def test_two_runs_of_one_configuration_are_equal_in_every_bit(tiny_config, tmp_path):
    first = run_training(tiny_config(model__dropout=0.2), tmp_path / "a")
    second = run_training(
        tiny_config(model__dropout=0.2, train__eval_every=1, train__sample_every=2),
        tmp_path / "b",
        sample=lambda run: "",
    )
    assert second["weights_sha256"] == first["weights_sha256"], (
        "evaluation and samples must not touch the course of training"
    )
    assert (
        run_training(tiny_config(model__dropout=0.2, train__seed=1), tmp_path / "c")[
            "weights_sha256"
        ]
        != first["weights_sha256"]
    )


def test_a_run_that_diverges_ends_at_once_and_leaves_only_whole_weights(tiny_config, tmp_path):
    config = tiny_config(
        optim__lr=1e30,
        optim__clip=0.0,
        train__steps=40,
        schedule__warmup=0,
        schedule__kind="constant",
        checkpoint__every_steps=1,
    )
    with pytest.raises(RunFailed, match="training has diverged") as failed:
        run_training(config, tmp_path / "run")
    assert read_exit_code(tmp_path / "run") == failed.value.exit_code == 1
    assert 1 <= len(records(tmp_path / "run")) < 10, "the first figure that is no number ends it"
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    for step in catalog.steps(tmp_path / "run"):
        weights = read_weights(catalog.checkpoint_path(tmp_path / "run", step))
        assert step <= 2
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_out_of_memory_says_what_was_needed_and_what_fits(tiny_config, tmp_path, monkeypatch):
    def fail(run, batch, drop):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(
        RunFailed,
        match=r"Out of memory at step 0: this run needs about .* GiB with 4 rows .* batch\.rows_per_device=3",
    ):
        run_training(tiny_config(), tmp_path / "run")
    assert read_exit_code(tmp_path / "run") == 1


def test_a_chunk_that_takes_the_memory_is_named_before_the_rows(tiny_config, tmp_path, monkeypatch):
    def fail(run, batch, drop):
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(loop, "train_step", fail)
    wide = {
        "model__kind": "eigenstate",
        "data__seq_len": 512,
        "batch__tokens_per_step": 2048,
        "speedups": "fast-scan",
    }
    with pytest.raises(
        RunFailed,
        match=r"Out of memory at step 0: .*Set model\.chunk_size=64: it changes no result",
    ):
        run_training(tiny_config(**wide, model__chunk_size=512), tmp_path / "wide")
    with pytest.raises(RunFailed, match=r"Out of memory at step 0: .*Set batch\.rows_per_device=3"):
        run_training(tiny_config(**wide, model__chunk_size=32), tmp_path / "lean")


def test_an_interrupt_that_saves_nothing_leaves_its_exit_code(tiny_config, tmp_path):
    class Interrupt(Quiet):
        def on_tick(self, step, last_step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(tiny_config(), tmp_path / "run", observers=[Interrupt()])
    assert read_exit_code(tmp_path / "run") == 130


def test_the_last_steps_are_saved_before_the_last_evaluation(tiny_config, tmp_path, monkeypatch):
    class Killed(Exception):
        pass

    def killed(*_, **__):
        raise Killed

    monkeypatch.setattr(loop, "score", killed)
    with pytest.raises(Killed):
        run_training(tiny_config(), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step-6").is_dir()
    monkeypatch.undo()
    assert run_training(tiny_config(), tmp_path / "run")["val_loss"] > 0


@pytest.mark.parametrize("steps", [2, 3])
def test_a_checkpoint_past_the_last_step_of_a_new_run_is_refused(steps, tiny_config, tmp_path):
    run_training(tiny_config(train__steps=3), tmp_path / "first")
    with pytest.raises(
        ConfigError, match=f"step-3 is at step 3, and this run has {steps} steps"
    ) as refused:
        run_training(
            tiny_config(train__steps=steps),
            tmp_path / "runs" / "second",
            resume=str(tmp_path / "first"),
        )
    assert "train.steps to more than 3" in refused.value.fix
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_going_on_in_another_folder_trains_at_the_rate_that_is_written_down(tiny_config, tmp_path):
    run_training(tiny_config(train__steps=3), tmp_path / "first")
    config = tiny_config(
        train__steps=6, optim__lr=1e-12, schedule__kind="constant", schedule__warmup=0
    )
    run_training(config, tmp_path / "second", resume=str(tmp_path / "first"))
    assert {r["train/lr"] for r in records(tmp_path / "second") if "train/lr" in r} == {1e-12}
    before, after = (
        read_weights(tmp_path / f"{name}/checkpoints/step-{step}")
        for name, step in (("first", 3), ("second", 6))
    )
    assert max(float((after[name] - before[name]).abs().max()) for name in before) < 1e-10


def test_a_checkpoint_that_does_not_fit_leaves_no_run_folder(tiny_config, tmp_path):
    run_training(tiny_config(optim__kind="muon"), tmp_path / "first")
    with pytest.raises(CheckpointError, match=r"train\.init_from") as refused:
        run_training(
            tiny_config(train__steps=7),
            tmp_path / "runs" / "second",
            resume=str(tmp_path / "first"),
        )
    assert refused.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_folder_of_other_files_is_not_made_a_run(tiny_config, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is not a run directory; it holds notes\.txt"):
        run_training(tiny_config(), tmp_path)
    assert not (tmp_path / "config.yaml").exists()


def test_moved_data_is_found_where_it_is_now(tiny_config, tiny_set, tmp_path):
    whole = run_training(tiny_config(), tmp_path / "whole")
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(tiny_set, before)
    with pytest.raises(Stopped):
        run_training(tiny_config(data__path=str(before)), tmp_path / "run", observers=[StopAt(3)])
    before.rename(after)
    moved = run_training(tiny_config(data__path=str(after)), tmp_path / "run")
    assert moved["weights_sha256"] == whole["weights_sha256"]
    assert events(tmp_path / "run", "difference") == []
    assert load_run(tmp_path / "run").dataset.path == after
    assert run_training(tiny_config(data__path=str(after)), tmp_path / "run") == moved


def test_more_shards_than_processes_says_how_to_start_them(tiny_config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"parallel\.shard=2 does not fit 1 process.*torchrun --nproc-per-node 2"
    ):
        run_training(tiny_config(parallel__shard=2), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_data_that_changed_meanwhile_is_said_and_another_tokenizer_refused(
    tiny_config, tmp_path, write_tiny
):
    data = write_tiny(tmp_path / "data")
    config = tiny_config(data__path=str(data))
    with pytest.raises(Stopped):
        run_training(config, tmp_path / "run", observers=[StopAt(3)])
    shutil.rmtree(data)
    write_tiny(data, num_documents=48)
    run_training(config, tmp_path / "run")
    assert any("data" in e["text"] for e in events(tmp_path / "run", "difference"))
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        run_training(config, tmp_path / "run")


def test_no_data_path_says_what_to_do(tiny_config, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path is not set.*flatout prepare"):
        run_training(tiny_config(data__path=None), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_corpus_smaller_than_a_step_trains_over_epochs(tiny_config, tmp_path):
    summary = run_training(
        tiny_config(batch__tokens_per_step=16 * 4096, batch__rows_per_device=1024, train__steps=2),
        tmp_path / "run",
    )
    assert summary["tokens"] == 2 * 16 * 4096
    assert records(tmp_path / "run")[0]["train/epoch"] > 1


def test_overfits_a_small_corpus(tiny_config, tmp_path):
    summary = run_training(
        tiny_config(
            train__steps=300, batch__tokens_per_step=512, batch__rows_per_device=32, log__every=100
        ),
        tmp_path / "run",
    )
    assert summary["train_loss"] < 1.2
    assert summary["val_loss"] < 1.3


def test_a_trained_model_can_be_tried_without_its_data(tiny_config, tiny_set, tmp_path):
    data = tmp_path / "moved"
    shutil.copytree(tiny_set, data)
    run_training(tiny_config(data__path=str(data)), tmp_path / "run")
    shutil.rmtree(data)
    loaded = load_run(tmp_path / "run")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("a run")) == "a run"
    assert "".join(sample(loaded.model, loaded.tokenizer, "a", max_tokens=5))
    with pytest.raises(DataError, match="no data set folder"):
        _ = loaded.dataset


def test_the_first_run_on_a_gpu_that_nothing_was_measured_on_says_how_to(
    tiny_config, tmp_path, monkeypatch
):
    class Said(type(SILENT)):
        def say(self, line):
            lines.append(line)

    monkeypatch.setattr(training, "gpu_name", lambda machine, device: "NVIDIA H200")
    lines, options = [], {"cache": tmp_path / "cache", "progress": Said()}
    with pytest.raises(Stopped):
        run_training(tiny_config(), tmp_path / "none", observers=[StopAt(3)], progress=Said())
    run_training(tiny_config(), tmp_path / "none", **options)
    assert not [line for line in lines if "SIGINT" not in line], (
        "neither without a cache nor on resume"
    )
    lines.clear()
    run_training(tiny_config(), tmp_path / "first", **options)
    (line,) = lines
    assert line.startswith(
        "No speedup has been measured on this GPU (NVIDIA H200); `flatout bench RECIPE --minutes "
    )
    run_training(tiny_config(), tmp_path / "second", **options)
    assert lines == [line]


@pytest.mark.parametrize(
    "said",
    [
        "[gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1",
        "Connection reset by peer",
    ],
)
def test_another_process_that_is_gone_is_a_named_error(said):
    with (
        pytest.raises(RunFailed, match=r"Another process of this run has ended\."),
        explained(None),
    ):
        raise RuntimeError(said)
    with pytest.raises(RuntimeError, match="a bug"), explained(None):
        raise RuntimeError("a bug")
