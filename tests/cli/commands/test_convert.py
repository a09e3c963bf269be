"""`flatout convert` writes a recipe that loads, and answers every key."""

import json
import shlex

import pytest

from flatout.cli import main as cli
from flatout.cli.commands.convert import MARK, convert_config
from flatout.cli.parser import parse
from flatout.config.registry import RECIPES
from flatout.config.schema import load_config
from flatout.config.words import listings
from flatout.errors import ConfigError, UsageError


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(
        json.dumps(
            {"learning_rate": 3e-4, "batch_size": 8, "rope_scaling": {"factor": 2}, "pin_memory": 1}
        )
    )
    return path


def test_the_recipe_loads_and_says_what_it_lacks(old, tmp_path):
    out = tmp_path / "new" / "my.yaml"
    result = convert_config(old, out)
    text = out.read_text()
    assert text.startswith(f"{MARK} from old.json\n# Not converted: rope_scaling=")
    config = load_config(out)
    assert (config.optim.lr, config.batch.rows_per_device, config.name) == (3e-4, 8, "my")
    counts = (result.mapped, result.unnecessary, result.missing, result.unknown)
    assert counts == (2, 1, 1, 0)
    assert result.tool is None
    for heading in ("Mapped: 2", "Not in flatout: 1", "Nothing to set: 1", "Next: flatout plan"):
        assert heading in result.summary()


def test_only_its_own_file_is_written_again(old, tmp_path):
    out = tmp_path / "my.yaml"
    convert_config(old, out)
    convert_config(old, out)
    out.write_text("name: mine\n")
    with pytest.raises(ConfigError, match="did not write it"):
        convert_config(old, out)
    assert out.read_text() == "name: mine\n"


def test_the_command_prints_every_key_as_json(old, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["convert", str(old), "--out", str(tmp_path / "my.yaml"), "--json"])
    assert stopped.value.code == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [item["key"] for item in answer["items"]] == [
        "learning_rate",
        "batch_size",
        "rope_scaling",
        "pin_memory",
    ]
    assert answer["items"][0]["becomes"] == {"optim.lr": 3e-4}
    assert "closing" not in answer


def test_nothing_is_written_when_no_key_is_known(tmp_path):
    (tmp_path / "old.yaml").write_text("colour: red\n")
    with pytest.raises(ConfigError, match="no key with a counterpart"):
        convert_config(tmp_path / "old.yaml", tmp_path / "my.yaml")
    assert not (tmp_path / "my.yaml").exists()


def test_a_recipe_of_flatout_needs_no_conversion(tmp_path):
    with pytest.raises(UsageError, match="is a recipe of flatout already") as refused:
        convert_config(RECIPES.path("shakespeare-char"), tmp_path / "my.yaml")
    assert "`flatout train " in refused.value.fix


def test_the_printed_prepare_has_what_the_config_asks_for(tmp_path):
    (tmp_path / "old.yaml").write_text(
        "base_model: ORG/Small\nval_set_size: 0.1\nsequence_len: 64\ndatasets:\n"
        "  - {path: talks.jsonl, type: chat_template}\n"
    )
    result = convert_config(tmp_path / "old.yaml", tmp_path / "my.yaml")
    command = (
        "flatout prepare talks.jsonl --out data/talks.jsonl --split 'hash 0.1' --chat auto "
        "--tokenizer ORG/Small"
    )
    assert result.prepare == [command]
    assert f"Prepare the data first: {command}" in result.summary()
    assert f"# Prepare the data first: {command}\n" in (tmp_path / "my.yaml").read_text()
    words = shlex.split(command)[2:]
    assert parse("prepare", words)["split"] == "hash 0.1"


def test_each_dataset_of_a_mix_is_prepared(tmp_path):
    (tmp_path / "old.json").write_text(json.dumps({"blend": {"a": 1, "b": 2}, "test_size": 0.1}))
    result = convert_config(tmp_path / "old.json", tmp_path / "my.yaml")
    assert [command.split("--out ")[1] for command in result.prepare] == [
        "data/a --split 'hash 0.1'",
        "data/b --split 'hash 0.1'",
    ]


@pytest.mark.parametrize("tool", listings())
def test_every_key_of_a_tool_is_shown_with_its_counterpart(tool):
    result = convert_config(keys=tool)
    assert [one.key for one in result.keys] == listings()[tool]
    for one in result.keys:
        assert (one.outcome == "mapped") == bool(one.counterpart)
        assert one.counterpart or one.note
        assert f"  {one.key} " in result.summary()


def test_the_counterparts_are_printed_as_a_table_or_as_json(capsys):
    for words in (["--keys", "nanoGPT"], ["--keys", "nanogpt", "--json"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["convert", *words])
        assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for line in ("Keys of nanogpt", "Mapped: 28", "Nothing to set: 5", "  n_embd"):
        assert line in shown
    keys = {one["key"]: one["counterpart"] for one in json.loads(shown.splitlines()[-1])["keys"]}
    assert keys["batch_size"] == "batch.rows_per_device"
    assert keys["out_dir"] == ""


def test_the_help_names_every_tool_with_keys(capsys):
    with pytest.raises(SystemExit):
        cli.main(["convert", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert [tool for tool in listings() if tool not in shown] == []
