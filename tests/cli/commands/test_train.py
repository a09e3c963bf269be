"""`flatout train`: its summary."""

import pytest

from flatout.cli.commands.train import SAMPLE_LINES, TrainResult, processes, train
from flatout.config.schema import load_config
from flatout.errors import DataError
from flatout.inference import chat
from flatout.storage.json_io import append_line
from flatout.training.run_dir.layout import read_config, write_config
from flatout.training.run_dir.runlog import RunLog

RESULT = {
    "steps": 500,
    "tokens": 2_048_000,
    "train_loss": 3.1,
    "val_loss": 3.25,
    "best_val_loss": 3.2,
    "best_step": 400,
    "bits_per_byte": 1.234,
    "tokens_per_s": 21_234.0,
    "wall_tokens_per_s": 17_000.0,
    "mfu": None,
    "mfu_of": "unknown GPU",
    "peak_gib": 0.9,
    "wall_s": 118.4,
    "elapsed_s": 200.0,
    "resumed_from": None,
    "weights_sha256": "0",
}


def shown(folder, **more):
    return TrainResult(**RESULT | {"run": str(folder)} | more).summary()


def test_the_result_shows_the_last_sample_and_the_numbers(tmp_path):
    for step in (250, 500):
        append_line(
            tmp_path / "events.jsonl",
            {"event": "sample", "step": step, "text": f"text {step}\n" * 60},
        )
    assert shown(tmp_path).splitlines() == [
        "A sample:",
        *["  | text 500"] * SAMPLE_LINES,
        "",
        f"Run      {tmp_path}",
        "Trained  500 steps, 2.0 M tokens in 1 min 58 s, 0.90 GiB peak",
        "Loss     training 3.1000, validation 3.2500 (perplexity 25.8), best in the run 3.2000 at "
        "step 400, 1.234 bits per byte",
        "Speed    21.2 K tokens/s steady, 17.0 K tokens/s in all",
        "MFU      unknown GPU",
    ]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"resumed_from": "step-250"}, "1 min 58 s (3 min 20 s in total)"),
        ({"mfu": 0.4, "mfu_of": "data sheet"}, "40.0% of the peak (data sheet)"),
        ({"skipped_steps": 1, "alarms": 2}, "Events   1 bad step, 2 alarms: see events.jsonl"),
        ({"steps": 1, "peak_gib": 0.004}, "1 step, 2.0 M tokens in 1 min 58 s, 4.1 MiB peak"),
        ({"mfu_of": None}, "MFU      unknown: no peak rate is known for this device"),
        ({"stopped_because": "No better loss."}, "\n\nNo better loss."),
    ],
)
def test_each_number_is_worded_as_it_is(tmp_path, more, line):
    (tmp_path / "events.jsonl").mkdir()  # cannot be read
    assert line in shown(tmp_path, **more)


@pytest.mark.parametrize(
    ("more", "word"),
    [({"best_step": 500}, "best "), ({"skipped_steps": 0, "alarms": 0}, "events.jsonl")],
)
def test_what_says_nothing_is_omitted(tmp_path, more, word):
    assert word not in shown(tmp_path, **more)


def test_an_old_summary_without_newer_fields_is_read(tiny_run):
    path = tiny_run / "events.jsonl"
    before = path.read_text()
    try:
        path.write_text(
            before.replace('"stopped_early"', '"of_old"').replace('"by_dataset"', '"of_older"')
        )
        result = train(read_config(tiny_run), run=tiny_run)
    finally:
        path.write_text(before)
    assert (result.stopped_early, result.by_dataset) == (False, ())


def test_a_sample_of_a_model_of_short_documents_has_several(tiny_config, tmp_path, monkeypatch):
    seeds = []

    def sample(model, tokenizer, prompt, sampling, **options):
        seeds.append(sampling.seed)
        return iter(["Ann, ", "Bob" if len(seeds) < 3 else "x" * chat.SAMPLE_TOKENS])

    monkeypatch.setattr(chat, "sample", sample)
    train(tiny_config(train__steps=1), run=tmp_path / "run")
    (text,) = (e["text"] for e in RunLog(tmp_path / "run").events if e["event"] == "sample")
    assert text.splitlines()[:2] == ["Ann, Bob"] * 2
    assert len(text.splitlines()) == len(set(seeds)) == 3


def test_a_prompt_that_cannot_be_encoded_is_an_error_before_the_run_starts(tiny_run, tmp_path):
    config = read_config(tiny_run).with_values({"train.sample_prompt": "\u00fc"})
    with pytest.raises(DataError, match=r"train\.sample_prompt='\u00fc': .*U\+00FC"):
        train(config, run=tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_processes_are_counted_with_the_layout_of_this_start(tiny, tiny_set, tmp_path):
    """A stored run may have had another layout: each start states its own."""
    sizes = {"batch.tokens_per_step": 96, "batch.rows_per_device": 2}
    config = load_config().with_values(tiny | sizes | {"data.path": str(tiny_set)})
    stored = config.with_values({"parallel.shard": 2})
    write_config(tmp_path / "run", stored, requested=stored)
    assert processes(config, ["train.devices=3"], run=tmp_path / "run") == 3
