"""`flatout list`: every open folder, and speedups with whether and why."""

from dataclasses import replace

import pytest

from flatout.commands.list import FOLDERS, list_entries
from flatout.errors import ConfigError
from flatout.hardware import probe
from flatout.registry import SPEEDUPS


@pytest.mark.parametrize("kind", [*FOLDERS, "machines", "speedups"])
def test_every_kind_lists_names_and_descriptions(kind):
    result = list_entries(kind)
    assert result.kind == kind
    assert len(result.items) >= 1
    assert all(item["name"] and item["description"] for item in result.items)
    for item in result.items:
        assert item["name"] in result.summary()


def test_speedups_say_on_or_off_and_why():
    items = {item["name"]: item for item in list_entries("speedups").items}
    assert set(items) == set(SPEEDUPS.names())
    assert all(item["reason"] for item in items.values())
    lines = list_entries("speedups").summary().splitlines()
    assert next(line for line in lines if " pretokenised" in line).startswith("on ")
    assert any(line.startswith("off") for line in lines)


def test_speedups_of_a_recipe(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("speedups: none\n")
    assert not any(item["on"] for item in list_entries("speedups", str(recipe)).items)


def test_a_gpu_that_a_recipe_asks_for_and_is_not_here_is_said_first(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.commands.list.probe", lambda: replace(probe(), gpus=()))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train: {device: cuda}\n")
    elsewhere, here = list_entries("speedups", str(recipe)), list_entries("speedups")
    assert elsewhere.summary().splitlines()[0] == elsewhere.note
    assert "asks for a GPU (train.device=cuda), which is not here" in elsewhere.model_dump()["note"]
    assert next(item["on"] for item in elsewhere.items if item["name"] == "bf16")
    assert here.note is None
    assert here.summary().splitlines()[0][:3] in {"on ", "off"}


def test_this_machine_comes_first():
    assert list_entries("machines").items[0]["name"] == "(this machine)"


def test_unknown_kind():
    with pytest.raises(ConfigError, match="Did you mean 'recipes'"):
        list_entries("recipe")
