import json
import shutil

import numpy as np
import pytest

from flatout.cli import main as cli
from flatout.cli.commands.verify import verify
from flatout.data.prepare.import_tokens import DatasetWriter
from flatout.data.tokenizers import make_tokenizer
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.training.run_dir import lookup


@pytest.fixture
def folder(tmp_path):
    tokenizer = make_tokenizer("byte", lambda _: iter([]))
    with DatasetWriter(tmp_path / "set", tokenizer) as writer:
        for split in ("train", "val"):
            writer.append(
                split, np.array([72, 105, tokenizer.eot_id] * 50), [3, 150], text_bytes=100
            )
        writer.finish(source={}, split_rule="named")
    return tmp_path / "set"


def test_an_intact_dataset_is_ok(folder, tmp_path):
    result = verify(folder)
    assert (result.ok, result.exit_code) == (True, 0)
    assert result.summary().startswith(f"{folder} is intact. 3 files read")
    with pytest.raises(DataError, match=r"s3://bucket/set is a URL.*flatout pull"):
        verify("s3://bucket/set")
    with pytest.raises(DataError, match="flatout prepare"):
        verify(tmp_path)


@pytest.mark.slow
def test_a_damaged_dataset_gives_exit_code_1_and_lists_the_problems(folder, capsys):
    shard = folder / "00000.bin"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    assert cli.execute(["verify", str(folder), "--json"]) == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out.splitlines()[-1])
    assert found["ok"] is False
    assert found["problems"] == [f"{shard} is damaged: its content does not match its checksum."]
    assert "is damaged: 1 problem" in shown.err
    assert "Fix:" in shown.err


@pytest.fixture
def run(fox_run, tmp_path, monkeypatch):
    """A copy of a run with checkpoints of the steps 1, 2 and 3, as runs/fox of this directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(fox_run[0] / "runs/fox", tmp_path / "runs/fox")


@pytest.mark.slow
def test_an_intact_run_is_ok_and_its_newest_checkpoint_named(run):
    result = verify(run)
    assert (result.kind, result.ok, result.exit_code) == ("run", True, 0)
    assert [item.step for item in result.checkpoints] == [1, 2, 3]
    assert result.newest_valid == str(run / "checkpoints/step-3")
    assert result.files == sum(item.files for item in result.checkpoints) == 18
    assert result.summary().startswith(f"{run} is intact. 18 files read")
    assert verify("fox").path == lookup.RUNS.joinpath("fox").as_posix()
    assert verify(run / "checkpoints").path == str(run)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        verify(run)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_newest_valid_one_stated(run):
    damaged = run / "checkpoints/step-3"
    (damaged / "model-00000.safetensors").write_bytes(b"torn")
    result = verify(run)
    assert result.exit_code == 1
    assert result.newest_valid == str(run / "checkpoints/step-2")
    (problem,) = result.problems
    assert problem.startswith(f"{damaged / 'model-00000.safetensors'} has 4 bytes")
    text = result.summary()
    assert "is damaged: 1 problem" in text
    assert [item.valid for item in result.checkpoints] == [True, True, False]
    assert [line.endswith("not valid") for line in text.splitlines()[2:5]] == [False, False, True]
    assert f"The run resumes from the newest valid one, {result.newest_valid}." in text
    alone = verify(damaged)
    assert (alone.kind, alone.ok, alone.newest_valid) == ("checkpoint", False, None)
    assert verify(run / "checkpoints/step-2").ok


@pytest.mark.slow
def test_a_damaged_configuration_or_tokenizer_is_a_problem_of_the_run(run):
    config = run / "config.yaml"
    config.write_text("")
    (run / "tokenizer.json").write_text("{}")
    result = verify(run)
    assert not result.ok
    assert "config.yaml has no settings" in result.problems[0]
    assert "tokenizer.json is damaged or was replaced" in result.problems[1]
    assert result.newest_valid == str(run / "checkpoints/step-3")


def test_damaged_and_lost_lines_of_a_run_are_problems(run):
    metrics = run / "metrics.jsonl"
    recorded = metrics.read_bytes()
    metrics.write_bytes(b"{torn\n" + recorded[: len(recorded) // 2])
    found = "\n".join(verify(run).problems)
    assert "metrics.jsonl has 1 damaged line (the first is line 1)" in found
    assert "metrics.jsonl has lost" in found
    (run / "events.jsonl").unlink()
    assert any("events.jsonl is missing" in problem for problem in verify(run).problems)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"overrides": ["optim.lr=1"]}, "optim.lr=1"),
        ({"steps": "5,5"}, "--steps"),
        ({"trust_code": True}, "--trust-code"),
    ],
)
def test_what_only_resume_uses_is_rejected_without_it(folder, more, word):
    with pytest.raises(ConfigError, match=f"uses {word} only with --resume"):
        verify(folder, **more)
