"""A run on a mix resumes bit for bit, also with moved data. A changed mix is rejected."""

import json
import shutil

import pytest

from flatout.data.store.mix import open_data
from flatout.errors import ConfigError, DataError, Stopped
from flatout.inference.load import load_run
from flatout.progress import SILENT
from flatout.training.run import run_training
from flatout.training.run_dir.layout import read_config
from flatout.training.run_dir.runlog import RunLog

pytestmark = pytest.mark.slow


@pytest.fixture
def mix(tiny_set, ragged_set):
    """Three sequences of the plain dataset for one of the dataset with a loss mask."""
    return {str(tiny_set): 3, str(ragged_set): 1}


@pytest.fixture
def mixed_config(tiny_config, mix):
    def make(**changes):
        return tiny_config(**{"data__path": None, "data__mix": mix} | changes)

    return make


def train_losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (r["step"], r["train/loss"], r["train/grad_norm"]) for r in records if "train/loss" in r
    ]


@pytest.mark.parametrize("document_mask", [False, True])
def test_ten_steps_on_a_mix_equal_five_and_five_bit_for_bit(
    mixed_config, tmp_path, stop_at, document_mask
):
    config = mixed_config(train__steps=10, data__document_mask=document_mask, train__eval_every=5)
    whole = run_training(config, tmp_path / "whole")
    with pytest.raises(Stopped, match="step 5 of 10"):
        run_training(config, tmp_path / "parts", observers=[stop_at(5)])
    resumed = run_training(config, tmp_path / "parts")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert train_losses(tmp_path / "parts") == train_losses(tmp_path / "whole")


def test_the_micro_batch_the_prefetch_and_the_baseline_read_the_same_mix(mixed_config, tmp_path):
    plain = run_training(mixed_config(), tmp_path / "plain")
    others = {"data__prefetch": 1}, {"batch__rows_per_device": 1}, {"speedups": "none"}
    for number, changes in enumerate(others):
        found = run_training(mixed_config(**changes), tmp_path / str(number))
        assert found["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-5), changes


def test_of_a_large_mix_the_five_largest_are_reported(mixed_config, tiny_set, tmp_path):
    weights = {}
    for number in range(8):
        shutil.copytree(tiny_set, tmp_path / f"set-{number}")
        weights[str(tmp_path / f"set-{number}")] = number + 1
    said = []

    class Listener(type(SILENT)):
        say = staticmethod(said.append)

    config = mixed_config(data__mix=weights, train__steps=1)
    run_training(config, tmp_path / "run", progress=Listener())
    (lines,) = (line for line in said if "of the sequences, read" in line)
    names = [line.partition(":")[0] for line in lines.splitlines()]
    assert names == ["set-7", "set-6", "set-5", "set-4", "set-3", "and 3 more"]
    events = [
        event["name"] for event in RunLog(tmp_path / "run").events if event["event"] == "data"
    ]
    assert sorted(events) == [f"set-{number}" for number in range(8)]


def test_a_mix_is_stored_with_absolute_paths_and_its_shares_are_reported(
    mixed_config, tiny_set, ragged_set, tmp_path, monkeypatch
):
    monkeypatch.chdir(tiny_set.parent)
    summary = run_training(
        mixed_config(data__mix={"tiny": 6, str(ragged_set): 2}), tmp_path / "run"
    )
    stored = read_config(tmp_path / "run")
    assert list(stored.data.mix) == [str(tiny_set), str(ragged_set)]
    assert stored.data.path is None
    events = [event for event in RunLog(tmp_path / "run").events if event["event"] == "data"]
    assert [(one["name"], one["share"]) for one in events] == [("tiny", 0.75), ("ragged", 0.25)]
    dataset = open_data(stored.data)
    for one, part in zip(events, dataset.members, strict=True):
        assert one["passes"] == pytest.approx(
            one["share"] * summary["tokens"] / (part.dataset.split("train").num_sequences(16) * 16)
        )


def test_an_epoch_of_a_mix_has_the_tokens_of_all_its_datasets(mixed_config, mix, tmp_path):
    summary = run_training(mixed_config(train__steps=None, train__epochs=0.5), tmp_path / "run")
    tokens = sum(
        part.dataset.split("train").num_sequences(16) * 16
        for part in open_data(mixed_config().data).members
    )
    assert summary["steps"] == -(-tokens // 2 // 128)


def test_datasets_may_be_given_in_any_order_and_move(mixed_config, mix, tmp_path, stop_at):
    """The stored order of the datasets is kept; weights may be scaled, but not change."""
    whole = run_training(mixed_config(), tmp_path / "whole")
    moved = {
        str(shutil.copytree(path, tmp_path / "before" / path.rpartition("/")[2])): weight
        for path, weight in mix.items()
    }
    with pytest.raises(Stopped):
        run_training(mixed_config(data__mix=moved), tmp_path / "run", observers=[stop_at(2)])
    backwards = {path: weight / 4 for path, weight in reversed(moved.items())}
    with pytest.raises(Stopped):
        run_training(mixed_config(data__mix=backwards), tmp_path / "run", observers=[stop_at(4)])
    (tmp_path / "before").rename(tmp_path / "after")
    after = {path.replace("/before/", "/after/"): weight for path, weight in moved.items()}
    resumed = run_training(mixed_config(data__mix=after), tmp_path / "run")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert load_run(tmp_path / "run").dataset.members[0].dataset.path.parent == tmp_path / "after"
    assert not [
        event for event in RunLog(tmp_path / "run").events if event["event"] == "difference"
    ]


def test_resume_rejects_another_mix_and_names_the_difference(
    mixed_config, tiny_config, mix, tmp_path
):
    run_training(mixed_config(), tmp_path / "run")
    first, second = mix
    for changes in ({first: 1, second: 1}, {first: 3}, {first: 1, second: 3}):
        with pytest.raises(ConfigError, match=r"different settings: data\.mix: "):
            run_training(mixed_config(data__mix=changes), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"different settings: data\.path: None -> "):
        run_training(tiny_config(), tmp_path / "run")


def test_bad_mixes_are_rejected_before_anything_is_written(
    mixed_config, tiny_set, write_tiny, tmp_path
):
    short = write_tiny(tmp_path / "short", num_documents=1)
    for mix, seq_len, message in (
        ({str(tiny_set): 1, str(tmp_path / "nowhere"): 1}, 16, "nowhere"),
        ({str(tiny_set): 1, f"{tiny_set}/../tiny": 1}, 16, "twice"),
        ({str(tiny_set): 1, str(short): 1}, 1024, "short has .* tokens"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            run_training(
                mixed_config(
                    data__mix=mix, data__seq_len=seq_len, batch__tokens_per_step=8 * seq_len
                ),
                tmp_path / "run",
            )
    assert not (tmp_path / "run").exists()
