"""Resume rejects an edited config.yaml, names the difference, and says how to change a setting."""

from __future__ import annotations

import re

import pytest
import yaml

from flatout.errors import ConfigError, Stopped
from flatout.training.run import run_training
from flatout.training.run_dir.config_seal import COPY
from flatout.training.run_dir.resume import settings_file

pytestmark = pytest.mark.slow


@pytest.fixture
def stopped(tiny_config, tmp_path, stop_at):
    """Return the directory of a run of six steps that was stopped after the second."""
    with pytest.raises(Stopped):
        run_training(tiny_config(), tmp_path / "run", observers=[stop_at(2)])
    return tmp_path / "run"


def edit(folder, key, value):
    """Change one setting as an editor would, and no other line."""
    path, (section, name) = folder / "config.yaml", key.split(".")
    document = yaml.safe_load(path.read_text())
    before = f"{name}: {yaml.safe_dump(document[section][name]).splitlines()[0]}"
    head, _, tail = path.read_text().partition(f"\n{section}:\n")
    assert tail.count(before) >= 1
    path.write_text(f"{head}\n{section}:\n{tail.replace(before, f'{name}: {value}', 1)}")


@pytest.mark.parametrize(
    ("key", "value"),
    [("optim.lr", 0.02), ("train.steps", 8), ("data.seq_len", 32)],
)
def test_resume_rejects_an_edited_setting_and_says_how_to_change_it(
    tiny_config, stopped, key, value
):
    written = yaml.safe_load((stopped / "config.yaml").read_text())
    before = written[key.split(".")[0]][key.split(".")[1]]
    edit(stopped, key, value)
    difference = re.escape(f"{key}: {before} -> {value}")
    with pytest.raises(
        ConfigError, match=rf"config\.yaml was changed after the run had started: {difference}\."
    ) as refused:
        run_training(tiny_config(), stopped)
    assert f"--resume {stopped} --run-dir DIR {key}={value}" in refused.value.fix


@pytest.mark.parametrize("key", ["lr", "steps"])
def test_resume_rejects_a_removed_setting(tiny_config, stopped, key):
    path = stopped / "config.yaml"
    path.write_text(
        "".join(
            line
            for line in path.read_text().splitlines(keepends=True)
            if not line.startswith(f"  {key}: ")
        )
    )
    with pytest.raises(ConfigError, match=rf"was changed after the run had started: \w+\.{key}: "):
        run_training(tiny_config(), stopped)


def test_a_setting_can_be_changed_as_the_message_says(tiny_config, stopped, tmp_path):
    summary = run_training(tiny_config(optim__lr=0.02), tmp_path / "other", resume=str(stopped))
    assert summary["steps"] == 6


def test_comments_order_and_free_settings_may_change(tiny_config, stopped):
    path = stopped / "config.yaml"
    document = yaml.safe_load(path.read_text())
    document["log"]["every"] = 2
    path.write_text("# mine\n" + yaml.safe_dump(document, sort_keys=True))
    assert run_training(tiny_config(), stopped)["steps"] == 6


def test_a_damaged_digest_with_an_intact_copy_is_accepted(tiny_config, stopped):
    path = stopped / "config.yaml"
    text = path.read_text()
    first, _, rest = text.partition("\n")
    path.write_text(f"{first[:-1]}{'0' if first[-1] != '0' else '1'}\n{rest}")
    assert run_training(tiny_config(), stopped)["steps"] == 6


def test_without_the_copy_an_edit_is_still_rejected(tiny_config, stopped):
    edit(stopped, "optim.lr", 0.02)
    (stopped / COPY).unlink()
    with pytest.raises(
        ConfigError,
        match=r"config\.copy\.yaml, which shows the original settings, is missing or damaged",
    ):
        run_training(tiny_config(), stopped)


def test_a_file_without_its_digest_and_copy_is_accepted_as_it_is(tiny_config, stopped):
    path = stopped / "config.yaml"
    path.write_text(
        "".join(
            line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#")
        )
    )
    (stopped / COPY).unlink()
    assert run_training(tiny_config(), stopped)["steps"] == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("lr: 0.01", "lr: 0.03"),
        lambda text: text[: len(text) // 2],
        lambda text: text[:20],
        lambda text: text.replace("sha256", "sha257", 1),
    ],
)
def test_a_changed_request_is_rejected_by_name(tiny_config, stopped, damage):
    path = stopped / "asked.yaml"
    assert damage(path.read_text()) != path.read_text()
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=r"asked\.yaml was changed .* or is damaged"):
        run_training(tiny_config(), stopped)


def test_a_request_without_its_digest_is_accepted_as_it_is(tiny_config, stopped):
    path = stopped / "asked.yaml"
    path.write_text(path.read_text().partition("\n")[2])
    assert run_training(tiny_config(), stopped)["steps"] == 6


def test_settings_to_train_again_are_checked_like_those_of_a_resume(stopped):
    asked, config = stopped / "asked.yaml", stopped / "config.yaml"
    assert settings_file(stopped) == asked
    whole = asked.read_text()
    asked.write_text(whole.replace("lr: 0.01", "lr: 0.03"))
    with pytest.raises(ConfigError, match=r"asked\.yaml was changed"):
        settings_file(stopped)
    asked.unlink()
    assert settings_file(stopped) == config, "an earlier version wrote no asked.yaml"
    config.write_text(config.read_text().replace("lr: 0.01", "lr: 0.03"))
    with pytest.raises(ConfigError, match=r"config\.yaml was changed .*lr: 0\.01 -> 0\.03"):
        settings_file(stopped)
