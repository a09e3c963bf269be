"""RunConfig: layers, overrides, rejected values and their messages, digests, differences."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from flatout import registry
from flatout.config.messages import all_keys
from flatout.config.schema import (
    ALTERNATIVES,
    RunConfig,
    difference,
    load_config,
    merge,
    nested,
    validate,
)
from flatout.errors import ConfigError


def error_of(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return caught.value


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe and return its path."""

    def write(text: str, name: str = "mine.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_defaults_are_valid_and_frozen():
    config = load_config()
    assert config == RunConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.optim.lr = 1.0
    with pytest.raises(ValidationError, match="frozen"):
        config.model = config.model


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=3e-4", 3e-4),
        ("optim.lr=1", 1.0),
        ("optim.betas=[0.9,0.99]", (0.9, 0.99)),
        ("batch.rows_per_device=8", 8),
        ("batch.rows_per_device=auto", "auto"),
        ("train.steps=1e3", 1000),
        ("train.steps=1_000", 1000),
        ("train.deterministic=yes", True),
        ("train.eval_tokens=all", "all"),
        ("train.eval_tokens=4096", 4096),
        ("schedule.warmup=100", 100),
        ("schedule.warmup=0.1", 0.1),
        ("speedups=auto,-compile", "auto,-compile"),
        ("speedups=[bf16,compile]", ("bf16", "compile")),
        ("model.vocab_size=null", None),
        ("train.device=cuda:1", "cuda:1"),
        # The values of text keys stay text, whatever YAML would parse them as.
        ("train.sample_prompt=ROMEO:", "ROMEO:"),
        ("train.sample_prompt=# a heading", "# a heading"),
        ("train.sample_prompt=a=b", "a=b"),
        ("train.sample_prompt=[draft", "[draft"),
        ("train.sample_prompt='two\\nlines'", "two\\nlines"),
        ('train.sample_prompt="two\\nlines"', "two\nlines"),
        ("train.sample_prompt=", ""),
        ("data.path=12", "12"),
        ("data.path=no", "no"),
        ("data.path=a folder/with: colon", "a folder/with: colon"),
        ("data.path=null", None),
    ],
)
def test_overrides_are_parsed_by_the_type_of_their_key(override, value):
    actual = load_config(None, [override]).value(override.partition("=")[0])
    assert actual == value
    assert type(actual) is type(value)


def test_model_keys_are_kept_for_the_model_to_check():
    config = load_config(
        None, ["model.num_layers=4", "model.activation=swiglu", "model.kind=transformer"]
    )
    assert config.model.own() == {"num_layers": 4, "activation": "swiglu"}


def test_later_overrides_win_over_earlier_ones():
    assert load_config(None, ["train.seed=1", "train.seed=2"]).train.seed == 2


def test_a_recipe_is_found_by_path_and_by_name(recipe, monkeypatch):
    path = recipe("# Mine.\ntrain:\n  steps: 7\noptim:\n  lr: 3e-4\n")
    config = load_config(path, ["optim.lr=1e-3"])
    assert (config.name, config.train.steps, config.optim.lr) == ("mine", 7, 1e-3)
    assert load_config(str(path)).optim.lr == 3e-4
    monkeypatch.setitem(registry.RECIPES.__dict__, "_files", {"mine": path})
    assert load_config("mine").train.steps == 7
    with pytest.raises(ConfigError, match="Did you mean 'mine'"):
        load_config("mime")


def test_mistakes_in_a_recipe_are_reported(recipe):
    with pytest.raises(ConfigError, match=r"mine.yaml, line 3: the key 'lr' is given twice"):
        load_config(recipe("optim:\n  lr: 1e-3\n  lr: 2e-3\n"))
    with pytest.raises(ConfigError, match=r"Did you mean 'optim.lr'"):
        load_config(recipe("optim:\n  lrr: 1e-3\n"))
    with pytest.raises(ConfigError, match="There is no file"):
        load_config("nowhere/my.yaml")


def test_an_empty_section_gets_the_defaults(recipe):
    path = recipe("optim:\n#  lr: 3e-4\ntrain:\n  steps: 5\n")
    assert load_config(path).optim == RunConfig().optim
    assert load_config(path, ["optim.lr=2e-4"]).optim.lr == 2e-4


NUMBERS = [group for group in ALTERNATIVES if "data.path" not in group]


@pytest.mark.parametrize("group", NUMBERS, ids=lambda group: sorted(group)[0])
def test_a_later_layer_replaces_alternative_keys(recipe, group):
    first, second, *_ = sorted(group)
    section, _, name = first.partition(".")
    config = load_config(recipe(f"{section}:\n  {name}: 2\n"), [f"{second}=3"])
    assert config.value(second) == 3
    assert not config.value(first)
    assert not RunConfig().with_values({first: 4}).with_values({second: 5}).value(first)


@pytest.mark.parametrize("group", NUMBERS, ids=lambda group: sorted(group)[0])
def test_alternative_keys_in_one_layer_are_rejected(recipe, group):
    first, second, *_ = sorted(group)
    assert (
        error_of(f"{first}=1", f"{second}=2").what
        == f"{first} and {second} cannot be set together."
    )
    section = first.partition(".")[0]
    with pytest.raises(ConfigError, match="cannot be set together"):
        load_config(
            recipe(f"{section}:\n  {first.partition('.')[2]}: 1\n  {second.partition('.')[2]}: 2\n")
        )


def test_a_later_layer_replaces_a_mix_as_a_whole(recipe):
    """data.mix and data.path also replace each other."""
    path = recipe("data:\n  mix: {data/a: 3, data/b: 1}\n")
    assert load_config(path).data.mix == {"data/a": 3, "data/b": 1}
    assert load_config(path, ["data.mix={data/c: 0.5}"]).data.mix == {"data/c": 0.5}
    assert load_config(path, ["data.path=data/c"]).data.mix is None
    assert (
        load_config(
            recipe("data: {path: data/a}\n", "other.yaml"), ["data.mix={data/c: 1}"]
        ).data.path
        is None
    )
    assert load_config(path).with_values({"data.mix": {"x": 1}}).data.mix == {"x": 1}
    assert load_config(path).with_values({"data.path": "x"}).data.mix is None
    assert (
        "data.mix and data.path cannot be set together"
        in error_of("data.path=a", "data.mix={b: 1}").what
    )
    assert difference(load_config(path), load_config(path, ["data.mix={data/a: 1}"])) == [
        "data.mix: {'data/a': 3.0, 'data/b': 1.0} -> {'data/a': 1.0}"
    ]


@pytest.mark.parametrize(
    "mix",
    [
        "data/a",
        "{}",
        "[a, b]",
        "{a:3,b:1}",
        "{a: -1}",
        "{a: 0}",
        "{a: many}",
        "{a: true}",
        "{a: .inf}",
        "{a: .nan}",
    ],
)
def test_an_invalid_mix_is_rejected_with_an_example(mix):
    error = error_of(f"data.mix={mix}")
    assert "data.mix" in error.what
    assert "{data/book: 3, data/code: 1}" in error.fix


def test_patience_without_evaluations_is_rejected():
    found = error_of("train.patience=2", "train.eval_every=0")
    assert "train.eval_every=0 means that there are none" in found.what
    assert load_config(None, ["train.patience=2"]).train.patience == 2
    for every in ("train.eval_every=10", "train.eval_every_epochs=0.5"):
        assert load_config(None, ["train.patience=2", every]).train.patience == 2


def test_evaluations_that_are_off_leave_room_for_epochs(recipe):
    path = recipe("train: {eval_every: 0, eval_every_epochs: 2}\n")
    assert load_config(path).train.eval_every_epochs == 2
    assert load_config(path, ["train.eval_every=0"]).train.eval_every_epochs is None


def test_an_unset_key_clears_no_alternatives(recipe):
    path = recipe("train:\n  epochs: 2\n")
    assert load_config(path, ["train.steps=null"]).train.epochs == 2


def test_contradictory_overrides_are_rejected():
    assert "contradicts" in error_of("optim.lr=1", "optim.lr.x=2").what


def test_merge_replaces_values_and_keeps_the_rest():
    document = {"a": {"b": 1, "c": 2}, "d": 3}
    merge(document, nested({"a.b": 5, "e.f.g": 6, "d": {"h": 1}}))
    assert document == {"a": {"b": 5, "c": 2}, "d": {"h": 1}, "e": {"f": {"g": 6}}}


def test_with_values_validates_and_does_not_change_the_original():
    config = load_config()
    assert (
        config.with_values({"optim.lr": 0.5, "model.num_layers": 3}).value("model.num_layers") == 3
    )
    assert config.optim.lr == 1e-3
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        config.with_values({"optim.lr": -1})
    with pytest.raises(ConfigError, match="Did you mean"):
        config.with_values({"optim.lrr": 1})


def test_a_written_config_reads_back_equal():
    config = load_config(
        None,
        [
            "model.num_layers=4",
            "speedups=[bf16]",
            "optim.betas=[0.8,0.9]",
            "train.tokens=5",
            "schedule.warmup=3",
        ],
    )
    again = validate(config.to_dict())
    assert again == config
    assert again.digest() == config.digest()


def test_the_digest_is_stable_and_depends_on_every_value():
    """Run directories are named after the digest, so equal configs must keep equal digests."""
    config = load_config()
    assert (
        config.digest()
        == load_config(None, ["optim.lr=0.001"]).digest()
        == load_config(None, ["optim.lr=1e-3"]).digest()
    )
    assert len(config.digest()) == 64
    changed = {
        "model.num_layers=1",
        "optim.lr=2e-3",
        "optim.betas=[0.9,0.96]",
        "train.seed=1",
        "speedups=none",
        "name=other",
        "data.path=x",
    }
    digests = {config.digest(), *(load_config(None, [one]).digest() for one in changed)}
    assert len(digests) == len(changed) + 1
    order = ["model.b=1", "model.a=2"]
    assert load_config(None, order).digest() == load_config(None, order[::-1]).digest()


def test_difference_lists_the_changed_keys():
    stored = load_config(
        None, ["optim.lr=1e-3", "train.steps=10", "batch.rows_per_device=8", "model.num_layers=2"]
    )
    assert difference(stored, stored) == []
    expected = load_config(
        None, ["optim.lr=2e-3", "train.steps=10", "model.num_layers=3", "log.every=5"]
    )
    assert difference(stored, expected) == [
        "model.num_layers: 2 -> 3",
        "optim.lr: 0.001 -> 0.002",
        "log.every: 10 -> 5",
    ]
    assert difference(stored, expected, free=["log.", "model.num_layers"]) == [
        "optim.lr: 0.001 -> 0.002"
    ]


def test_difference_ignores_values_left_open():
    stored = load_config(
        None,
        [
            "train.steps=10",
            "batch.rows_per_device=8",
            "train.precision=bf16",
            "speedups=[bf16]",
            "model.vocab_size=50",
        ],
    )
    assert difference(stored, load_config()) == []
    assert difference(load_config(), stored) != []


def test_every_key_has_a_description():
    for key in all_keys(RunConfig):
        field, section = None, RunConfig
        for part in key.split("."):
            field = section.model_fields[part]
            section = field.annotation
        assert field.description, key
        assert field.description.endswith("."), key


def test_two_batch_sizes_in_a_layer_clear_the_third_below(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("batch: {tokens_per_step: 4096}")
    batch = load_config(path, ["batch.rows_per_device=4", "batch.accumulate=3"]).batch
    assert (batch.tokens_per_step, batch.rows_per_device, batch.accumulate) == (None, 4, 3)
    assert load_config(path, ["batch.rows_per_device=4"]).batch.tokens_per_step == 4096


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("csv", ("csv",)),
        ("tensorboard,wandb", ("tensorboard", "wandb")),
        ("[csv, csv, mlflow]", ("csv", "mlflow")),
        ("none", ()),
        ("", ()),
        ("mine:Logger", ("mine:Logger",)),
    ],
)
def test_loggers_are_a_list_or_words(text, wanted):
    assert load_config(None, [f"log.to={text}"]).log.to == wanted


def test_an_observer_is_a_reference():
    config = load_config(None, ["log.observers=mine:Observer, mine:Other"])
    assert config.log.observers == ("mine:Observer", "mine:Other")
    assert config.references() == {"mine:Observer", "mine:Other"}
    with pytest.raises(ConfigError, match=r"log\.observers names 'wandb'") as caught:
        load_config(None, ["log.observers=wandb"])
    assert "set log.to" in caught.value.fix
