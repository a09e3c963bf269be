"""Steps and evaluations of conversations with long prompts, of which most have no target."""

import json
import math

import pytest
from safetensors.torch import load_file

import flatout
from flatout.progress import SILENT

pytestmark = pytest.mark.slow

CONFIG = {
    "model.num_layers": 1,
    "model.d_model": 32,
    "model.num_heads": 2,
    "data.seq_len": 16,
    "batch.tokens_per_step": 16,
    "batch.rows_per_device": 1,
    "optim.weight_decay": 0.5,
    "optim.lr": 1e-2,
    "schedule.kind": "constant",
    "schedule.warmup": 0,
    "train.steps": 30,
    "train.eval_every": 10,
    "train.eval_tokens": 16,
    "train.device": "cpu",
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 40,
    "log.every": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """12 prompts of 200 characters with an answer of 3: 14 of 153 sequences have a target."""
    folder = tmp_path_factory.mktemp("masked")
    for name, count in (("rows", 12), ("val", 3)):
        rows = [{"prompt": f"{n:03} " * 50, "answer": "yes"} for n in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    flatout.prepare(
        folder / "rows.jsonl",
        out=folder / "data",
        tokenizer="byte",
        val=folder / "val.jsonl",
        text_field="answer",
        mask_field="prompt",
    )
    return folder / "data"


class Said(type(SILENT)):
    """Keeps the messages of a run."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


class Seen(flatout.Quiet):
    """Keeps the events and the records of a run."""

    def __init__(self):
        self.events, self.records = [], []

    def on_event(self, event):
        self.events.append(event)

    def on_record(self, record):
        self.records.append(record)


@pytest.fixture(scope="module", params=["fp32", "none"])
def trained(request, data, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    more = {"speedups": "none"} if request.param == "none" else {"train.precision": "fp32"}
    config = flatout.load_config(None).with_values(CONFIG | more | {"data.path": str(data)})
    seen, said = Seen(), Said()
    flatout.train(config, run=run, observers=[seen], progress=said)
    return run, seen, said.lines


def test_a_step_without_a_target_has_no_loss_and_changes_no_weight(trained):
    run, seen, _ = trained
    losses = {r["step"]: r.get("train/loss") for r in seen.records if "train/lr" in r}
    with_loss = [step for step, loss in losses.items() if loss is not None]
    assert len(losses) == 30
    assert 0 < len(with_loss) < 15
    assert all(losses[step] > 1 for step in with_loss)
    assert losses[with_loss[0]] == pytest.approx(math.log(257), abs=0.5)
    weights = {
        step: load_file(next((run / "checkpoints" / f"step-{step}").glob("model-*")))
        for step in losses
    }
    for step in range(2, 31):
        same = all((weights[step][k] == weights[step - 1][k]).all() for k in weights[step])
        assert same == (step not in with_loss), step
    kinds = {event["event"] for event in seen.events}
    assert not kinds & {"alarm", "bad_step", "skip"}


def test_an_evaluation_takes_rows_that_have_targets(trained):
    _, seen, _ = trained
    evaluated = [r["val/loss"] for r in seen.records if "val/loss" in r]
    assert evaluated
    assert all(loss > 1 for loss in evaluated)


def test_a_run_says_at_its_start_that_most_steps_have_no_target(trained):
    _, _, said = trained
    (line,) = (line for line in said if "no target" in line)
    assert line.startswith("91% of the steps"), "14 of 153 sequences have a target"
    assert "data.seq_len" in line
