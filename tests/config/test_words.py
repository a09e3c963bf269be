"""Another tool's word is answered with its counterpart."""

import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from flatout.assembly.preflight import check_names
from flatout.cli import main as cli
from flatout.cli.parser import build, parse
from flatout.config.documents import parse_yaml
from flatout.config.messages import all_keys, unknown_key
from flatout.config.registry import (
    COMMANDS,
    DATASETS,
    MODELS,
    OPTIMIZERS,
    RECIPES,
    SPEEDUPS,
    recipe_path,
    unknown_name,
)
from flatout.config.schema import RunConfig, load_config, validate
from flatout.config.words import TABLE, listings, name_for, removed, value_for, word_for, words
from flatout.errors import ConfigError
from flatout.models.language_model import model_of
from flatout.optim.schedule import SCHEDULES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "coming-from.md"
ISSUES = """
gradient_clip num_eigenstates hten_scales gradient_checkpointing num_hidden_layers subset_size
output_dir intermediate_size rotary_pct no_compile use_hten chunk_size cache_size val_split
use_gradient_checkpointing pin_memory pretokenized use_8bit_optim drop_last deepspeed num_workers
max_chars bf16 wandb attn_implementation
"""
"""Keys that users typed and that had no answer, or a wrong one."""


def removed_names() -> list[str]:
    return [*yaml.safe_load(TABLE.read_text(encoding="utf-8"))["removed"]]


def fix_of(*overrides: str) -> str:
    with pytest.raises(ConfigError, match="There is no config key") as caught:
        load_config(None, overrides)
    return caught.value.fix


GROUPS = ("keys", "left_out", "missing", "prepare")


def meant(name: str) -> str:
    """Return the fix for an unknown key."""
    return unknown_key(name, True, all_keys(RunConfig)).fix


def test_every_key_is_answered_with_its_counterpart():
    wrong, seen = [], 0
    for word in words("keys"):
        for name in word.names:
            seen += 1
            fix = meant(name)
            if not fix.startswith(f"Did you mean {word.key!r}?"):
                wrong.append(f"{name}: {fix}")
    assert seen > 200
    assert wrong == []


@pytest.mark.parametrize("value", [False, True, None, "no", "none", "0", {"a": 1}, [1], 7, 0.5])
def test_every_key_is_answered_for_any_value(value):
    known = all_keys(RunConfig)
    for group in GROUPS:
        for word in words(group):
            assert unknown_key(word.names[0], value, known).fix.startswith(STARTS)


STARTS = ("Did you mean", "Leave it out", "`flatout prepare` has it")


@pytest.mark.parametrize("group", ["left_out", "missing"])
def test_every_key_without_a_counterpart_is_answered_with_the_reason(group):
    assert len(words(group)) > 10
    assert [
        f"{name}: {fix}"
        for word in words(group)
        for name in word.names
        if not (fix := meant(name)).endswith(f": {word.note}")
    ] == []


def test_every_option_of_preparation_is_answered():
    known = {option for param in build("prepare").params for option in param.opts}
    for word in words("prepare"):
        for name in word.names:
            if f"--{name}" in known:
                continue
            with pytest.raises(ConfigError) as caught:
                parse("prepare", ["book.txt", "--out", "data/book", f"--{name}", "1"])
            assert caught.value.fix == word.advice


def test_every_name_and_value_is_known():
    document = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    for noun, names in document["names"].items():
        for theirs, ours in names.items():
            assert name_for(noun, theirs, [ours]) == ours
    for key, names in document["values"].items():
        for theirs, ours in names.items():
            assert value_for(key, theirs) == ours


def test_every_listed_key_is_answered():
    for keys in listings().values():
        assert [key for key in keys if word_for(key) is None] == []


def test_code_on_the_page_uses_keys_that_are_answered():
    text = PAGE.read_text(encoding="utf-8").partition("\n## Code you no longer need\n")[2]
    cells = [line.split(" | ")[0] for line in text.partition("\n## ")[0].splitlines()]
    names = [name for cell in cells for name in re.findall(r"\b([a-z_]+)=", cell)]
    assert len(names) > 2
    assert [name for name in names if word_for(name) is None] == []


@pytest.mark.parametrize(("page", "recipes"), [("coming-from", 7), ("recipe", 1)])
def test_the_recipes_on_the_page_are_valid(page, recipes):
    text = PAGE.with_stem(page).read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.S)
    assert len(blocks) == recipes
    for block in blocks:
        # the module on the page is tested in tests/models/test_adapter.py
        builtin = re.sub(r'"my_model:MODEL", n_layer: \d+', "transformer", block)
        check_names(validate(parse_yaml(builtin, name="the page")))


@pytest.mark.parametrize("key", ISSUES.split())
def test_keys_that_users_typed_are_answered(key):
    fix = fix_of(f"{key}=1")
    assert fix.startswith(STARTS)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("small", "eigenstate-small-32k"),
        ("small_32k", "eigenstate-small-32k"),
        ("medium", "eigenstate-medium-16k"),
        ("large", "eigenstate-large-32k"),
        ("test", "neox-1.2b-test"),
        ("production", "neox-1.2b-production"),
        ("gpt2", "gpt2-124m"),
    ],
)
def test_presets_are_answered_with_a_recipe(name, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"Did you mean '{recipe}'"):
        recipe_path(name)


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("--config", "name the recipe itself"),
        ("--checkpoint_dir", "--run-dir"),
        ("--mixed-precision", "train.precision=VALUE"),
        ("--pretokenized", "flatout prepare"),
        ("--num_workers", "memory-mapped"),
        ("--val_split", "--split"),
    ],
)
def test_options_of_other_trainers_are_answered(option, fix):
    with pytest.raises(ConfigError, match="has no option") as caught:
        parse("train", ["my.yaml", option, "1"])
    assert fix in caught.value.fix


def test_a_name_is_suggested_only_if_it_exists():
    assert name_for("recipe", "gpt2", ["demo"]) is None
    assert name_for("recipe", "gpt2", ["demo", "gpt2-124m"]) == "gpt2-124m"


def test_all_counterparts_exist():
    models = {key for kind in MODELS.names() for key in all_keys(MODELS.get(kind).Config, "model.")}
    known = {*all_keys(RunConfig), *models}
    assert {word.key for word in words("keys")} - known == set()
    options = {option for param in build("prepare").params for option in param.opts}
    assert {word.option for word in words("prepare")} - options - {"", "SOURCE"} == set()
    document = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    entries = {
        "recipe": RECIPES.names(),
        "dataset": DATASETS.names(),
        "optimizer": OPTIMIZERS.names(),
        "model": MODELS.names(),
        "speedup": [*SPEEDUPS.names(), "auto", "none"],
    }
    for noun, existing in entries.items():
        assert set(document["names"][noun].values()) - set(existing) == set()
    assert set(document["values"]["schedule.kind"].values()) <= set(SCHEDULES)
    for word in words("keys"):
        for written in filter(None, (word.if_true, word.if_false)):
            check_names(load_config(None, ["lora.rank=8", *written.split()]))


def use(what: str) -> None:
    """Use a removed command, option, value, or entry of a list."""
    first, _, rest = what.partition(" --")
    if rest:
        parse(first, f"--{rest}".split())
    elif " " in what:
        noun, _, name = what.rpartition(" ")
        raise unknown_name(noun, name, ())
    elif "." in what:
        model_of(load_config(None, [f"{what}=1", "model.vocab_size=8"]))
    else:
        cli.call([what], ExitStack(), False)


@pytest.mark.parametrize("what", removed_names())
def test_what_was_removed_is_answered_and_gone(what):
    with pytest.raises(ConfigError) as answered:
        use(what)
    assert what not in COMMANDS.names()
    assert answered.value.fix == removed(what)


def test_no_name_has_two_meanings():
    for groups in (("keys", "left_out", "missing"), ("prepare",)):
        counts = Counter(name for group in groups for word in words(group) for name in word.names)
        assert [name for name, count in counts.items() if count > 1] == []


def test_a_section_without_a_counterpart_answers_for_its_keys():
    assert word_for("deepspeed.stage") is word_for("deepspeed")
    assert word_for("checkpoint.interval").key == "checkpoint.every_steps"
    assert word_for("model.num_layer") is None
