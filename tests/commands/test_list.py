"""`flatout list`: every kind of entry, and speedups with the reasons."""

from dataclasses import replace
from importlib.metadata import version

import pytest

from flatout.assembly.prediction import keep
from flatout.assembly.selection import Gain, all_speedups
from flatout.commands import list as list_command
from flatout.commands.list import FOLDERS, list_entries
from flatout.errors import ConfigError
from flatout.hardware import Gpu, probe
from flatout.registry import SPEEDUPS

GAIN = Gain(
    gain=1.12,
    low=1.05,
    high=1.2,
    where="in the full set",
    recipe="gpt2-124m",
    date="2026-11-22T08:00:00",
    commit="abc1234",
    torch=version("torch"),
)


@pytest.mark.parametrize("kind", [*FOLDERS, "machines", "speedups", "tokenizers"])
def test_every_kind_lists_names_and_descriptions(kind):
    result = list_entries(kind)
    assert result.kind == kind
    assert len(result.items) >= 1
    assert all(item["name"] and item["description"] for item in result.items)
    for item in result.items:
        assert item["name"] in result.summary()


def test_tokenizers_are_listed_as_prepare_accepts_them():
    assert [item["name"] for item in list_entries("tokenizers").items] == [
        "train:N, FILE.tiktoken",
        "byte",
        "char",
        "tokenizer.json, ORG/NAME",
        "ids:N",
    ]


def test_speedups_are_on_or_off_with_a_reason():
    items = {item["name"]: item for item in list_entries("speedups").items}
    assert set(items) == set(SPEEDUPS.names())
    assert all(item["reason"] for item in items.values())
    lines = list_entries("speedups", all=True).summary().splitlines()
    assert next(line for line in lines if " pretokenised" in line).startswith("on ")
    assert any(line.startswith("off") for line in lines)


def test_speedups_fit_one_screen():
    result = list_entries("speedups")
    lines = result.summary().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if line.startswith("on ")] == [
        item["name"] for item in result.items if item["on"]
    ]
    assert all(item["name"] in result.summary() for item in result.items)


def test_a_speedup_of_your_own_is_listed(tmp_path, monkeypatch):
    (tmp_path / "listed_own.py").write_text(
        "from flatout.assembly.recipe import Promise, Speedup\n"
        'FAST = Speedup(name="fast", saves="time", promise=Promise.exact())\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = tmp_path / "own.yaml"
    recipe.write_text("speedups: auto,+listed_own:FAST\n")
    own = list_entries("speedups", str(recipe)).items[-1]
    assert (own["name"], own["description"], own["on"]) == ("listed_own:FAST", "time", True)


def test_speedups_of_a_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("speedups: none\n")
    assert not any(item["on"] for item in list_entries("speedups", str(recipe)).items)


def test_a_missing_gpu_is_noted_first(tmp_path, monkeypatch):
    monkeypatch.setattr(list_command, "probe", lambda: replace(probe(), gpus=()))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train: {device: cuda}\n")
    elsewhere, here = list_entries("speedups", str(recipe)), list_entries("speedups")
    assert elsewhere.summary().splitlines()[0] == elsewhere.note
    assert (
        "needs a GPU (train.device=cuda), and there is none here" in elsewhere.model_dump()["note"]
    )
    assert next(item["on"] for item in elsewhere.items if item["name"] == "bf16")
    assert here.note is None
    assert here.summary().splitlines()[0][:3] in {"on ", "off"}


def test_a_long_recipe_shows_the_speedups_of_its_run(monkeypatch):
    monkeypatch.setattr(list_command, "probe", lambda: replace(probe(), gpus=()))
    listed = list_entries("speedups", "gpt2-124m")
    assert next(item["on"] for item in listed.items if item["name"] == "compile")
    assert "A run takes at least 53 min" in listed.note


@pytest.mark.parametrize(
    ("steps", "on", "reason"), [(2, False, "this run lasts about 0."), (100_000, True, "time: ")]
)
def test_the_rate_of_a_present_gpu_decides(monkeypatch, tmp_path, steps, on, reason):
    gpu = Gpu("NVIDIA H200", 141.0, (9, 0), "1")
    monkeypatch.setattr(list_command, "probe", lambda: replace(probe(), gpus=(gpu,)))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"train: {{steps: {steps}, device: cuda}}\nmodel: {{vocab_size: 50304}}\n")
    listed = list_entries("speedups", str(recipe))
    found = next(item for item in listed.items if item["name"] == "compile")
    assert (found["on"], found["reason"].startswith(reason)) == (on, True)
    assert "at 30% of the peak of one NVIDIA H200" in listed.note


@pytest.mark.parametrize("train", ["{epochs: 3, device: cuda}", "{steps: 2, device: cuda}"])
def test_an_unknown_length_is_not_guessed(monkeypatch, tmp_path, train):
    monkeypatch.setattr(list_command, "probe", lambda: replace(probe(), gpus=()))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"train: {train}\n")
    reason = next(
        item["reason"]
        for item in list_entries("speedups", str(recipe)).items
        if item["name"] == "compile"
    )
    assert reason.startswith("pays off from 2 minutes, and the run's duration is unknown")


def test_speedups_that_were_not_measured_on_a_gpu_are_labelled(monkeypatch, tmp_path):
    gpu = Gpu("NVIDIA H200", 141.0, (9, 0), "1")
    monkeypatch.setattr(list_command, "probe", lambda: replace(probe(), gpus=(gpu,)))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    before = {item["name"]: item for item in list_entries("speedups").items}
    rows = {speedup.name for speedup in all_speedups() if "cuda" in speedup.auto}
    assert rows <= {name for name, item in before.items() if item["measured"] is False}
    lines = {
        line.split()[3]: line
        for line in list_entries("speedups", all=True).summary().splitlines()
        if line[5:17] == "not measured"
    }
    assert rows <= set(lines)
    assert lines["bf16"] == "on   not measured  bf16"

    slower = GAIN.model_copy(update={"gain": 0.9, "low": 0.85, "high": 0.95})
    other = GAIN.model_copy(update={"torch": "1.0.0"})
    gains = {"bf16": GAIN, "fused-adamw": slower, "tf32": other, "checkpointing": GAIN}
    keep(gpu.name, tmp_path, gains)
    result = list_entries("speedups", all=True)
    after = {item["name"]: item for item in result.items}
    reason = f"measured here: {GAIN.describe()}"
    here = {"measured": True, "gain": GAIN.describe(), "reason": reason}
    assert after["bf16"] == before["bf16"] | here
    assert after["checkpointing"] == before["checkpointing"] | here | {"on": True}
    assert (after["fused-adamw"]["on"], before["fused-adamw"]["on"]) == (False, True)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"bf16", "fused-adamw", "checkpointing"}, (
        "the gain of tf32 was measured with another torch"
    )
    assert "on   measured      bf16\n" in result.summary()
    assert result.summary().count(reason) == 2


def test_the_predicted_gain_is_shown_until_one_is_measured(monkeypatch, tmp_path):
    gpu = Gpu("NVIDIA H200", 141.0, (9, 0), "1")
    monkeypatch.setattr(list_command, "probe", lambda: replace(probe(), gpus=(gpu,)))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    foreseen = replace(SPEEDUPS.get("bf16"), predicted="2%: half of 4%")
    monkeypatch.setattr(
        list_command,
        "speedup_named",
        lambda name: foreseen if name == "bf16" else SPEEDUPS.get(name),
    )
    result = list_entries("speedups", all=True)
    assert (
        next(item["predicted"] for item in result.items if item["name"] == "bf16")
        == "2%: half of 4%"
    )
    assert "  bf16  (predicted: 2%)\n" in result.summary()
    keep(gpu.name, tmp_path, {"bf16": GAIN})
    assert "2%: half of 4%" not in list_entries("speedups", all=True).summary()


def test_this_machine_is_listed_first():
    assert list_entries("machines").items[0]["name"] == "(this machine)"


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="Did you mean 'recipes'"):
        list_entries("recipe")
