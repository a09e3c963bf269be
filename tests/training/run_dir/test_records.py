"""Records and events of a run that is killed or damaged: each once, and what is lost is named."""

from collections import Counter

import pytest

from flatout.cli.commands.train import train
from flatout.errors import ConfigError
from flatout.storage.json_io import LineReader
from flatout.training import finish
from flatout.training.metrics.log import Log
from flatout.training.run_dir import layout
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow

REPEATED = ("evaluation", "sample", "end")


@pytest.fixture
def config(tiny_config):
    return tiny_config(
        train__steps=4, train__eval_every=2, train__eval_tokens=64, train__sample_every=2
    )


def kinds_of_records(run):
    return Counter(
        (record["step"], "val" if "val/loss" in record else "train")
        for record in LineReader(run / "metrics.jsonl").read()
    )


@pytest.mark.quick_cases("summarise", "end")
@pytest.mark.parametrize(
    "place",
    [(finish, "score"), (finish, "log_sample"), (finish, "summarise"), (Log, "end")],
    ids=lambda place: place[1],
)
def test_a_kill_after_the_last_step_repeats_no_record_and_no_event(
    config, tmp_path, killed_in, place
):
    run = tmp_path / "run"
    with killed_in(*place):
        train(config, run=run)
    train(config, run=run)
    assert kinds_of_records(run) == {
        (step, kind): 1 for step in range(1, 5) for kind in ("train", "val")[: 1 + (step % 2 == 0)]
    }
    found = [event for event in RunLog(run).events if event["event"] in REPEATED]
    assert [(event["event"], event["step"]) for event in found] == [
        ("sample", 2),
        ("evaluation", 4),
        ("sample", 4),
        ("end", 4),
    ]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (None, None),
        (lambda content: content[: len(content) // 2], "bytes since the checkpoint of step 2"),
        (lambda content: None, "bytes since the checkpoint of step 2 was saved"),
    ],
    ids=["whole", "cut", "missing"],
)
def test_a_resume_names_lost_records(config, tmp_path, killed_in, messages, damage, named):
    run = tmp_path / "run"
    config = config.with_values({"checkpoint.every_steps": 2, "train.eval_tokens": "all"})
    with killed_in(finish, "save_last"):
        train(config, run=run)
    metrics = run / "metrics.jsonl"
    if damage is not None:
        content = metrics.read_bytes()
        content = damage(b"".join(content.splitlines(keepends=True)[:3]))
        metrics.unlink() if content is None else metrics.write_bytes(content)
    train(config, run=run, progress=messages)
    lines = [line for line in messages.lines if str(metrics) in line]
    assert [named in line for line in lines] == [True] * (named is not None)
    assert [e["text"] for e in RunLog(run).events if e["event"] == "difference"] == lines


@pytest.mark.parametrize("is_edited", [True, False])
def test_a_resume_says_that_the_settings_were_edited(
    config, tmp_path, killed_in, messages, is_edited
):
    run = tmp_path / "run"
    with killed_in(finish, "save_last"):
        train(config.with_values({"checkpoint.every_steps": 2}), run=run)
    stored = run / "config.yaml"
    before, key, after = stored.read_text().rpartition("clip: 1.0")  # of the resolved part
    stored.write_text(before + ("clip: 0.5" if is_edited else key) + after)
    train(config.with_values({"checkpoint.every_steps": 2}), run=run, progress=messages)
    said = [line for line in messages.lines if "Settings in config.yaml have changed" in line]
    assert said == ["Settings in config.yaml have changed since step-2."] * is_edited


def test_a_resume_names_the_file_whose_model_has_an_unknown_key(config, tmp_path, killed_in):
    run = tmp_path / "run"
    with killed_in(finish, "save_last"):
        train(config.with_values({"checkpoint.every_steps": 2}), run=run)
    stored = run / "config.yaml"
    stored.write_text(stored.read_text().replace("num_layers:", "num_layerz:"))
    with pytest.raises(ConfigError) as refused:
        train(config.with_values({"checkpoint.every_steps": 2}), run=run)
    assert refused.value.what == f"{stored}: There is no config key 'model.num_layerz'."


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_run_with_a_key_without_effect_resumes_as_it_was_trained(
    config, tmp_path, killed_in, messages, is_stated
):
    """An earlier version accepted the key and ignored it."""
    run, asked = tmp_path / "run", config.with_values({"checkpoint.every_steps": 2})
    with killed_in(finish, "save_last"):
        train(asked, run=run)
    old = {"model.rotary_factor": 4.0}
    first = layout.read_requested(run).with_values(old if is_stated else {})
    layout.write_config(run, layout.read_config(run).with_values(old), requested=first)
    train(asked, run=run, progress=messages)
    assert RunLog(run).summary["steps"] == 4
    said = [line for line in messages.lines if "rotary_factor" in line]
    stated = "model.rotary_factor=4.0 has no effect without model.rotary_scaling=linear or"
    assert [stated in line for line in said] == [True] * is_stated
