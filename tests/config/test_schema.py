"""RunConfig: layers, overrides, rejected values and their messages, digests, differences."""

import pytest
from pydantic import ValidationError

from flatout.config import registry
from flatout.config.messages import all_keys
from flatout.config.schema import ALTERNATIVES, RunConfig, difference, load_config, validate
from flatout.config.sections import Section, Share
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
    for section in (config, config.optim):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, next(iter(type(section).model_fields)), 1.0)


def test_the_defaults_of_a_section_are_validated():
    """A wrong default is found when it is written, not when a user names the key."""

    class Wrong(Section):
        share: Share = 2.0

    with pytest.raises(ValidationError, match="less than 1"):
        Wrong()


def test_later_overrides_win_and_keys_of_a_model_are_kept_for_it():
    model = ["model.num_layers=4", "model.activation=swiglu", "model.kind=transformer"]
    assert load_config(None, model).model.own() == {"num_layers": 4, "activation": "swiglu"}
    assert load_config(None, ["train.seed=1", "train.seed=2"]).train.seed == 2


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
        ('train.sample_prompt="two\\nlines"', '"two\\nlines"'),
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


def test_a_recipe_is_found_by_path_and_by_name(recipe, monkeypatch):
    path = recipe("# Mine.\ntrain:\n  steps: 7\noptim:\n  lr: 3e-4\n")
    config = load_config(path, ["optim.lr=1e-3"])
    assert (config.name, config.train.steps, config.optim.lr) == ("mine", 7, 1e-3)
    assert load_config(str(path)).optim.lr == 3e-4
    monkeypatch.setitem(registry.RECIPES.__dict__, "_files", {"mine": path})
    assert load_config("mine").train.steps == 7
    with pytest.raises(ConfigError, match="Did you mean 'mine'"):
        load_config("mime")


def test_an_empty_section_gets_the_defaults(recipe):
    path = recipe("optim:\n#  lr: 3e-4\ntrain:\n  steps: 5\n")
    assert load_config(path).optim == RunConfig().optim
    assert load_config(path, ["optim.lr=2e-4"]).optim.lr == 2e-4


NUMBERS = [group for group in ALTERNATIVES if "data.path" not in group]


@pytest.mark.parametrize("group", NUMBERS, ids=lambda group: sorted(group)[0])
def test_a_later_layer_replaces_alternative_keys(recipe, group):
    first, second, *_ = sorted(group)
    section, _, name = first.partition(".")
    path = recipe(f"{section}:\n  {name}: 2\n")
    config = load_config(path, [f"{second}=3"])
    assert config.value(second) == 3
    assert not config.value(first)
    assert not RunConfig().with_values({first: 4}).with_values({second: 5}).value(first)
    together = f"{first} and {second} cannot be set together."
    assert error_of(f"{first}=1", f"{second}=2").what == together
    both = recipe(f"{path.read_text()}  {second.partition('.')[2]}: 2\n")
    with pytest.raises(ConfigError, match="cannot be set together"):
        load_config(both)


def test_a_later_layer_replaces_a_mix_as_a_whole(recipe):
    """data.mix and data.path also replace each other."""
    path, other = recipe("data:\n  mix: {data/a: 3, data/b: 1}\n"), "data.mix={data/c: 0.5}"
    config = load_config(path)
    assert config.data.mix == {"data/a": 3, "data/b": 1}
    assert load_config(path, [other]).data.mix == {"data/c": 0.5}
    assert load_config(path, ["data.path=data/c"]).data.mix is None
    named = recipe("data: {path: data/a}\n", "other.yaml")
    assert load_config(named, [other]).data.path is None
    assert config.with_values({"data.mix": {"x": 1}}).data.mix == {"x": 1}
    assert config.with_values({"data.path": "x"}).data.mix is None
    what = error_of("data.path=a", "data.mix={b: 1}").what
    assert "data.mix and data.path cannot be set together" in what
    assert difference(config, load_config(path, ["data.mix={data/a: 1}"])) == [
        "data.mix: {'data/a': 3.0, 'data/b': 1.0} -> {'data/a': 1.0}"
    ]


def test_patience_without_evaluations_is_rejected():
    found = error_of("train.patience=2", "train.eval_every=0")
    assert "train.eval_every=0 means that there are none" in found.what
    assert load_config(None, ["train.patience=2"]).train.patience == 2
    for every in ("train.eval_every=10", "train.eval_every_epochs=0.5"):
        assert load_config(None, ["train.patience=2", every]).train.patience == 2


def test_a_key_that_is_unset_or_off_leaves_room_for_its_alternatives(recipe):
    path = recipe("train: {eval_every: 0, eval_every_epochs: 2, epochs: 2}\n")
    assert load_config(path).train.eval_every_epochs == 2
    assert load_config(path, ["train.eval_every=0"]).train.eval_every_epochs is None
    assert load_config(path, ["train.steps=null"]).train.epochs == 2


def test_with_values_validates_and_does_not_change_the_original():
    config = load_config()
    changed = config.with_values({"optim.lr": 0.5, "model.num_layers": 3})
    assert (changed.optim.lr, changed.value("model.num_layers")) == (0.5, 3)
    assert config.optim.lr == 1e-3
    with pytest.raises(ConfigError, match=r"optim\.lr"):
        config.with_values({"optim.lr": -1})
    with pytest.raises(ConfigError, match="Did you mean"):
        config.with_values({"optim.lrr": 1})


def test_a_written_config_reads_back_equal():
    numbers = ["model.num_layers=4", "train.tokens=5", "schedule.warmup=3"]
    config = load_config(None, [*numbers, "speedups=[bf16]", "optim.betas=[0.8,0.9]"])
    again = validate(config.to_dict())
    assert again == config
    assert again.digest() == config.digest()


def test_the_digest_is_stable_and_depends_on_every_value():
    """Run directories are named after the digest, so equal configs must keep equal digests."""

    def digest(*overrides):
        return load_config(None, overrides).digest()

    assert digest() == digest("optim.lr=0.001") == digest("optim.lr=1e-3")
    assert digest("model.b=1", "model.a=2") == digest("model.a=2", "model.b=1")
    assert len(digest()) == 64
    changed = ["model.num_layers=1", "optim.lr=2e-3", "optim.betas=[0.9,0.96]", "train.seed=1"]
    changed += ["speedups=none", "name=other", "data.path=x"]
    assert len({digest(), *map(digest, changed)}) == len(changed) + 1


def test_difference_lists_the_changed_keys():
    rows, layers = "batch.rows_per_device=8", "model.num_layers=2"
    stored = load_config(None, ["optim.lr=1e-3", "train.steps=10", rows, layers])
    assert difference(stored, stored) == []
    expected = ["optim.lr=2e-3", "train.steps=10", "model.num_layers=3", "log.every=5"]
    expected = load_config(None, expected)
    rate = "optim.lr: 0.001 -> 0.002"
    assert difference(stored, expected) == ["model.num_layers: 2 -> 3", rate, "log.every: 10 -> 5"]
    assert difference(stored, expected, free=["log.", "model.num_layers"]) == [rate]
    chosen = ["train.precision=bf16", "speedups=[bf16]", "model.vocab_size=50"]
    resolved = load_config(None, ["train.steps=10", rows, *chosen])
    assert difference(resolved, load_config()) == [], "values left open"
    assert difference(load_config(), resolved) != []


def test_every_key_has_a_description():
    for key in all_keys(RunConfig):
        field, section = None, RunConfig
        for part in key.split("."):
            field = section.model_fields[part]
            section = field.annotation
        assert field.description, key
        assert field.description.endswith("."), key


def test_two_batch_sizes_in_a_layer_clear_the_third_below(recipe):
    path = recipe("batch: {tokens_per_step: 4096}")
    batch = load_config(path, ["batch.rows_per_device=4", "batch.accumulate=3"]).batch
    assert (batch.tokens_per_step, batch.rows_per_device, batch.accumulate) == (None, 4, 3)
    assert load_config(path, ["batch.rows_per_device=4"]).batch.tokens_per_step == 4096
    words = ["batch.rows_per_device=4", "batch.accumulate=null"]
    assert load_config(path, words).batch.tokens_per_step == 4096, "null sets nothing"


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


@pytest.mark.parametrize("text", ["none", "[none]", "[]", "null"])
def test_none_in_yaml_means_no_logger(tmp_path, text):
    (tmp_path / "my.yaml").write_text(f"log: {{to: {text}}}\n")
    assert load_config(tmp_path / "my.yaml").log.to == ()


def test_an_observer_is_a_reference():
    config = load_config(None, ["log.observers=mine:Observer, mine:Other"])
    assert config.log.observers == ("mine:Observer", "mine:Other")
    assert config.references() == {"mine:Observer", "mine:Other"}
    with pytest.raises(ConfigError, match=r"log\.observers names 'wandb'") as caught:
        load_config(None, ["log.observers=wandb"])
    assert "set log.to" in caught.value.fix
