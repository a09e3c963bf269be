"""`flatout list`: every kind of entry, and speedups with the reasons."""

from dataclasses import replace
from importlib.metadata import version

import pytest

from flatout.assembly.choices import Gain, all_speedups
from flatout.assembly.measured import keep
from flatout.cli.commands import list as list_command
from flatout.cli.commands.list import FOLDERS, list_entries
from flatout.config.registry import SPEEDUPS
from flatout.display import terminal_text
from flatout.errors import ConfigError
from flatout.hardware.machine import Gpu, probe

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
H200 = Gpu("NVIDIA H200", 141.0, (9, 0), "1")


@pytest.fixture
def with_gpus(monkeypatch, tmp_path):
    """Return a function that gives this machine some GPUs."""
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    machine = probe()

    def give(*gpus):
        monkeypatch.setattr(list_command, "probe", lambda: replace(machine, gpus=gpus))

    return give


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes a recipe and returns its path."""

    def write(text):
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


def by_name(result):
    return {item.name: item for item in result.items}


@pytest.mark.parametrize("kind", [*FOLDERS, "machines", "speedups", "tokenizers"])
def test_every_kind_lists_names_and_descriptions(kind):
    result = list_entries(kind)
    assert result.kind == kind
    assert len(result.items) >= 1
    assert all(item.name and item.description for item in result.items)
    for item in result.items:
        assert item.name in result.summary()


def test_tokenizers_are_listed_as_prepare_accepts_them():
    names = ["byte", "char", "ids:N", "train:N", "tokenizer.json, ORG/NAME", "FILE.tiktoken"]
    assert [item.name for item in list_entries("tokenizers").items] == names


def test_speedups_are_on_or_off_with_a_reason_that_is_never_cut():
    result = list_entries("speedups")
    assert set(by_name(result)) == set(SPEEDUPS.names())
    assert all(item.reason for item in result.items)
    assert max(map(len, terminal_text(result.display(), 80).splitlines())) <= 80
    lines = result.summary().splitlines()
    for item, line in zip(result.items, lines, strict=True):
        assert line.split()[:2] == ["on" if item.on else "off", item.name]
        assert item.reason in line
    assert [item.on for item in result.items] == sorted((i.on for i in result.items), reverse=True)


def test_a_speedup_of_your_own_is_listed(tmp_path, monkeypatch, recipe):
    (tmp_path / "listed_own.py").write_text(
        "from flatout.assembly.speedup import Speedup, Tolerance\n"
        'FAST = Speedup("fast", lambda parts: None, "time", Tolerance.exact())\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = by_name(list_entries("speedups", recipe("speedups: auto,+listed_own:FAST\n")))[
        "listed_own:FAST"
    ]
    assert (own.name, own.description, own.on) == ("listed_own:FAST", "time", True)
    assert not any(item.on for item in list_entries("speedups", recipe("speedups: none")).items)


def test_a_missing_gpu_is_noted_first(with_gpus, recipe):
    with_gpus()
    elsewhere = list_entries("speedups", recipe("train: {device: cuda}\n"))
    assert " ".join(elsewhere.summary().split()).startswith(elsewhere.note)
    assert "needs a GPU (train.device=cuda), and there is none here" in elsewhere.note
    assert by_name(elsewhere)["bf16"].on
    here = list_entries("speedups")
    assert here.note is None
    assert here.summary().splitlines()[0][:3] in {"on ", "off"}
    listed = list_entries("speedups", "gpt2-124m")
    assert listed.note.endswith("there is none here. On a GPU it would use:")


def test_recipes_are_listed_by_size():
    items = list_entries("recipes").items
    sizes = [item.parameters for item in items if item.parameters]
    assert sizes == sorted(sizes)
    assert len(sizes) > 20
    names = [item.name for item in items]
    assert names.index("demo") < names.index("gpt2-124m") < names.index("llama-8b")
    lines = terminal_text(list_entries("recipes").display(), 80).splitlines()
    assert max(map(len, lines)) <= 80
    start = "llama-8b                    8.0 B  Llama 3 8B: 8,030,261,248 parameters,"
    assert any(line.startswith(start) for line in lines)


@pytest.mark.parametrize(
    ("steps", "on", "reason"), [(2, False, "this run lasts about 0."), (100_000, True, "time: ")]
)
def test_the_rate_of_a_present_gpu_decides(with_gpus, recipe, steps, on, reason):
    with_gpus(H200)
    text = f"train: {{steps: {steps}, device: cuda}}\nmodel: {{vocab_size: 50304}}\n"
    found = by_name(list_entries("speedups", recipe(text)))["compile"]
    assert (found.on, found.reason.startswith(reason)) == (on, True)


@pytest.mark.parametrize("train", ["{epochs: 3, device: cuda}", "{steps: 2, device: cuda}"])
def test_an_unknown_length_is_not_guessed(with_gpus, recipe, train):
    with_gpus()
    found = by_name(list_entries("speedups", recipe(f"train: {train}\n")))["compile"]
    start = "pays off from 2 minutes, and the run's duration is unknown"
    assert found.reason.startswith(start)


def test_speedups_that_were_not_measured_on_a_gpu_are_labelled(with_gpus, tmp_path):
    with_gpus(H200)
    before = by_name(list_entries("speedups"))
    rows = {speedup.name for speedup in all_speedups() if "cuda" in speedup.auto}
    assert rows <= {name for name, item in before.items() if item.measured is False}
    lines = {line.split()[1]: line for line in list_entries("speedups").summary().splitlines()}
    assert {name for name in rows if lines[name].endswith(" (not measured)")} == rows

    slower = GAIN.model_copy(update={"gain": 0.9, "low": 0.85, "high": 0.95})
    other = GAIN.model_copy(update={"torch": "1.0.0"})
    gains = {"bf16": GAIN, "fused-adamw": slower, "tf32": other, "checkpointing": GAIN}
    keep(H200.name, tmp_path, gains)
    result = list_entries("speedups")
    after, reason = by_name(result), f"measured here: {GAIN.describe()}"
    here = {"measured": True, "gain": GAIN.describe(), "reason": reason}
    assert after["bf16"] == before["bf16"].model_copy(update=here)
    assert after["checkpointing"] == before["checkpointing"].model_copy(update=here | {"on": True})
    assert (after["fused-adamw"].on, before["fused-adamw"].on) == (False, True)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == gains.keys() - {"tf32"}, "that of tf32 was measured with another torch"
    assert result.summary().count(reason) == 2


def test_a_gain_of_one_model_decides_nothing_for_a_much_larger_one(with_gpus, recipe, tmp_path):
    with_gpus(H200)
    small, large = 5e6, 6 * 2e9  # FLOPs per token of 0.4 M and of some billion parameters
    slower = GAIN.model_copy(update={"gain": 0.9, "low": 0.85, "high": 0.95})
    keep(H200.name, tmp_path, {"compile": slower.model_copy(update={"flops_per_token": small})})

    def found(d_model, num_layers):
        model = f"{{d_model: {d_model}, num_layers: {num_layers}, num_heads: 4, vocab_size: 4096}}"
        path = recipe(f"model: {model}\ntrain: {{steps: 1000000}}\n")
        return by_name(list_entries("speedups", recipe=path))["compile"]

    assert found(64, 2).reason.startswith("measured here: x0.90")
    assert found(2048, 32).gain is None
    assert found(2048, 32).on
    keep(H200.name, tmp_path, {"compile": GAIN.model_copy(update={"flops_per_token": large})})
    assert found(64, 2).gain.startswith("x0.90"), "each size keeps its own"
    assert found(2048, 32).gain.startswith("x1.12")


def test_this_machine_is_listed_first_and_an_unknown_kind_rejected():
    assert list_entries("machines").items[0].name == "(this machine)"
    with pytest.raises(ConfigError, match="Did you mean 'recipes'"):
        list_entries("recipe")


def test_a_recipe_decides_on_speedups_alone():
    with pytest.raises(ConfigError, match="--recipe and `models` cannot be combined"):
        list_entries("models", recipe="demo")
