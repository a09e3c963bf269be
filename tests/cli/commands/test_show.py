"""`flatout show` prints a recipe to copy."""

import pytest

from flatout.cli import main as cli
from flatout.config.registry import RECIPES
from flatout.config.schema import load_config


def shown(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["show", *words])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("overrides", [(), ("optim.lr=1e-4", "train.steps=3", "name=mine")])
def test_the_printed_recipe_is_the_same_run(capsys, tmp_path, overrides):
    path = tmp_path / "gpt2-124m.yaml"
    path.write_text(shown(capsys, "gpt2-124m", *overrides))
    assert load_config(path) == load_config("gpt2-124m", overrides)


def test_the_comments_of_a_packaged_recipe_stay(capsys):
    text = RECIPES.path("demo").read_text(encoding="utf-8")
    assert text.startswith("#")
    assert shown(capsys, "demo") == text
