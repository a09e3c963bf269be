"""A user's torch module, adapted as docs/extend.md shows, works in every command."""

import importlib
import os
import re
import signal
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.assembly.choices import select
from flatout.cli.commands.eval import evaluate
from flatout.cli.commands.plan import plan
from flatout.config.registry import MODELS
from flatout.config.schema import load_config, validate
from flatout.config.sections import LoraConfig
from flatout.distributed.context import Context
from flatout.distributed.tensor import Split
from flatout.errors import ConfigError, ShapeError, Stopped
from flatout.hardware.machine import probe
from flatout.inference.generate import Sampling, sample
from flatout.inference.load import load_run
from flatout.models.adapter import adapt
from flatout.models.lora import with_adapters
from flatout.ops import Ops
from flatout.training.metrics.observers import Quiet
from flatout.training.run import run_training

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.fixture
def my_gpt(tmp_path, monkeypatch):
    """The guide's module, importable as my_gpt."""
    page = DOCUMENT.read_text(encoding="utf-8")
    for name in ("my_gpt.py", "my_gpt.yaml"):
        block = re.search(rf"^```\w+\n(# {name}\n.*?)^```", page, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block[1], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "my_gpt", raising=False)
    yield MODELS.get("my_gpt:MODEL")
    sys.modules.pop("my_gpt", None)


@pytest.fixture
def make_config(tiny_config, my_gpt, tmp_path):
    """Return the configuration of a tiny run of the guide's recipe."""

    def make(**changes):
        document = tiny_config(**changes).to_dict()
        document["model"] = load_config(tmp_path / "my_gpt.yaml").to_dict()["model"]
        return validate(document)

    return make


def test_it_trains_resumes_evaluates_and_samples(make_config, tmp_path):
    whole = run_training(make_config(), tmp_path / "whole")
    with pytest.raises(Stopped):
        run_training(make_config(), tmp_path / "run", observers=[StopAt(3)])
    resumed = run_training(make_config(), tmp_path / "run")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert evaluate(tmp_path / "run").val_loss == pytest.approx(whole["val_loss"], rel=1e-6)
    loaded = load_run(tmp_path / "run")
    pieces = sample(loaded.model, loaded.tokenizer, "", Sampling(1.0, max_tokens=70))
    assert "".join(pieces), "also beyond block_size"


def test_sequences_beyond_the_limit_are_rejected(make_config, my_gpt, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.seq_len=65 exceeds model\.block_size=64"):
        my_gpt.check({"vocab_size": 7}, seq_len=65)
    model = my_gpt(my_gpt.check({"vocab_size": 7, "block_size": 8}, seq_len=8), Ops.plain())
    with pytest.raises(ShapeError, match=r"9 tokens exceeds model\.block_size=8"):
        model.logits(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ConfigError, match="cannot mask attention between documents"):
        model.logits(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"model\.widht.*Did you mean 'model\.width'"):
        my_gpt.check({"vocab_size": 7, "widht": 8}, seq_len=8)


def test_loss_logits_kinds_and_flops_match_the_module(my_gpt):
    model = my_gpt(my_gpt.check({"vocab_size": 7, "width": 8}, seq_len=5), Ops.plain()).eval()
    tokens, targets = torch.randint(7, (2, 5)), torch.tensor([[1, 2, -1, 3, 4], [-1, 0, 1, 2, 3]])
    loss_sum, num_valid = model(tokens, targets)
    logits, mean = model.module(tokens, targets)
    assert int(num_valid) == 8
    torch.testing.assert_close(loss_sum / num_valid, mean)
    torch.testing.assert_close(model.next_logits(tokens), logits[:, -1])
    kinds = model.parameter_kinds()
    for name, kind in (
        ("tokens.weight", "embedding"),
        ("output.weight", "head"),
        ("block.norm1.weight", "vector"),
        ("block.linear1.weight", "hidden"),
        ("block.self_attn.in_proj_weight", "hidden"),
    ):
        assert kinds[f"module.{name}"] == kind
    parameters = model.named_parameters()
    matrices = sum(p.numel() for name, p in parameters if kinds[name] in ("hidden", "head"))
    attention = 2 * 2 * 5 * 8  # scores and values of every key
    assert model.flops_per_token(5).causal_exact == Fraction(3 * (2 * matrices + attention))


TRAIN = """
from dataclasses import dataclass
from torch import nn

@dataclass
class Config:
    vocab_size: int
    block_size: int
    n_layer: int
    n_embd: int

class CharTransformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(
            nn.Linear(config.n_embd, config.n_embd) for _ in range(config.n_layer)
        )
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, idx):
        hidden = self.embedding(idx)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)
"""


def test_the_model_of_a_script_with_a_config_class_moves_as_the_page_shows(tmp_path, monkeypatch):
    page = DOCUMENT.with_name("coming-from.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(# my_model\.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (recipe,) = re.findall(r"^```yaml\n(# my\.yaml\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_model.py").write_text(block, encoding="utf-8")
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_model", "train"):
        monkeypatch.setitem(sys.modules, name, None)  # both are as before afterwards
        del sys.modules[name]
    own = load_config(tmp_path / "my.yaml").to_dict()["model"]
    kind = MODELS.get(own.pop("kind"))
    model = kind(kind.check(own | {"vocab_size": 7}, seq_len=128), Ops.plain())
    tokens = torch.randint(7, (2, 128))
    loss_sum, num_valid = model(tokens, tokens)
    assert len(model.layers) == 2
    assert num_valid == 256
    torch.testing.assert_close(
        loss_sum,
        nn.functional.cross_entropy(model.logits(tokens).flatten(0, 1), tokens.flatten()) * 256,
    )


def test_speedups_of_unused_ops_are_off(make_config):
    decisions = {each.name: each for each in select(make_config(speedups="auto"), probe())}
    for name in ("fused-attention", "bf16-products", "onednn", "chunked-ce"):
        assert not decisions[name].on
    assert "calls none of the functions" in decisions["fused-attention"].reason


class StopAt(Quiet):
    def __init__(self, step):
        self.step = step

    def on_tick(self, step, last_step):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


class Masked(nn.Module):
    """Logits that are 0 wherever the mask is."""

    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, idx, mask=None):
        logits = self.table(idx)
        return logits if mask is None else logits * mask[..., None]


class WithOptions(Masked):
    def forward(self, idx, **options):
        return self.table(idx)


@pytest.mark.parametrize("module", [Masked, WithOptions])
def test_a_second_parameter_that_takes_no_targets_gets_none(module):
    model_class = adapt(lambda vocab_size: module(vocab_size))
    model = model_class(model_class.check({"vocab_size": 7}, seq_len=4), Ops.plain())
    tokens = torch.tensor([[0, 1, 2, 3]])
    torch.testing.assert_close(model.logits(tokens), model.module.table(tokens))


class Returns(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.forward = lambda idx: returned


@pytest.mark.parametrize(
    ("returned", "actual"),
    [
        (torch.zeros(()), r"\(\)"),
        (torch.zeros(1, 1, 7), r"\(1, 1, 7\)"),
        ({}, "dict"),
        ((), "tuple"),
    ],
)
def test_a_module_that_does_not_return_logits_is_named(returned, actual):
    def build(vocab_size: int) -> nn.Module:
        return Returns(returned)

    kind = adapt(build)
    model = kind(kind.check({"vocab_size": 7}, seq_len=4), Ops.plain())
    words = rf"forward\(\) of Returns returned {actual} instead of logits of shape \(1, 4, 7\)"
    with pytest.raises(ShapeError, match=words):
        model.embed(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("build", "limit", "message"),
    [
        (lambda width=3: None, None, "has no parameter 'vocab_size'"),
        (lambda vocab_size, width: None, None, "has no default for 'width'"),
        (lambda vocab_size: None, "block_size", "has no parameter 'block_size'"),
        (lambda vocab_size, z_loss=0.1: None, None, "the parameter 'z_loss', which flatout"),
    ],
)
def test_an_unsuitable_build_function_is_named(build, limit, message):
    with pytest.raises(ConfigError, match=message):
        adapt(build, limit=limit)


def test_a_tensor_on_another_device_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "my_rnn.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, vocab_size):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(vocab_size, vocab_size)\n"
        "    def forward(self, tokens):\n"
        "        x = self.table(tokens)\n"
        "        return torch.cat([x, torch.zeros(1, 1, x.shape[2])], 1)[:, 1:]\n"
        "def build(vocab_size: int):\n"
        "    return Net(vocab_size)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = adapt(importlib.import_module("my_rnn").build)
    with pytest.raises(ConfigError, match=r"my_rnn\.py:8: return torch\.cat") as caught:
        model(model.check({"vocab_size": 7}, seq_len=5), Ops.plain()).flops_per_token(5)
    assert "device=tokens.device" in caught.value.fix


STACKED = """
import torch
from torch import nn
from flatout.models.adapter import adapt
from flatout.models.lora import with_adapters

CALLS = []


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        )

    def forward(self, hidden, *, scale):
        if not torch.compiler.is_compiling() and hidden.device.type != "meta":
            CALLS.append(torch.is_grad_enabled())
        return hidden + scale * self.down(self.up(self.norm(hidden)).relu())


class Stacked(nn.Module):
    def __init__(self, vocab_size, width, depth):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.heads = nn.ModuleList([nn.Linear(width, vocab_size)])
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])

    def forward(self, idx):
        hidden = self.tokens(idx)
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        return self.heads[0](hidden)


def build(vocab_size: int, width: int = 16, depth: int = 3) -> nn.Module:
    return Stacked(vocab_size, width, depth)


MODEL = adapt(build)
"""


@pytest.fixture
def stacked(tmp_path, monkeypatch, tiny_config):
    """Return a function that trains a module with a list of three layers for 4 steps."""
    (tmp_path / "stacked.py").write_text(STACKED, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "stacked", raising=False)

    def run(name, **changes):
        document = tiny_config(train__steps=4, **changes).to_dict()
        document["model"] = {"kind": "stacked:MODEL", "width": 16, "depth": 3}
        calls = importlib.import_module("stacked").CALLS
        calls.clear()
        return run_training(validate(document), tmp_path / name), sum(calls)

    return run


def test_checkpointing_recomputes_the_modules_own_layers(stacked):
    plain, forward_calls = stacked("plain", speedups="none")
    recomputed, calls = stacked("recomputed", speedups=["checkpointing"])
    assert recomputed["weights_sha256"] == plain["weights_sha256"]
    assert calls == 2 * forward_calls


def test_compiling_by_layer_compiles_the_modules_own_layers(stacked, monkeypatch):
    monkeypatch.setitem(importlib.import_module("flatout.assembly.compiling").MOST_WHOLE, "cpu", 2)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain, _ = stacked("plain", speedups="none")
    compiled, calls = stacked("compiled", speedups=["compile"])
    assert calls == 0, "every training pass ran compiled layers"
    assert compiled["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-4)


def test_checkpointing_of_a_module_without_a_list_of_layers_is_refused(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"no nn\.ModuleList of several modules"):
        run_training(make_config(speedups=["checkpointing"]), tmp_path / "run")


@pytest.mark.quick_cases("words0")
@pytest.mark.parametrize("words", [["parallel.shard=2", "parallel.replicate=1"], []])
def test_a_plan_knows_its_memory_and_its_rate(stacked, tmp_path, words):
    recipe = tmp_path / "stacked.yaml"
    recipe.write_text("model: {kind: 'stacked:MODEL', depth: 3, vocab_size: 50304}\n")
    sizes = ["batch.tokens_per_step=65536", "train.steps=10"]
    found = plan(recipe, [*sizes, *words], machine="2x H100")
    assert found.memory["total"] > 0
    assert found.fits
    assert found.tokens_per_s > 0
    assert "start each of" in found.tokens_per_s_from, "it is small, and eager"


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda model: model.share_layers(Split(None, 0, 2), seq_len=8), "tensor=2 needs a model"),
        (
            lambda model: model.share_rows(Context(None, 0, 2, False), seq_len=8),
            "context=2 needs a model that divides rows",
        ),
        (lambda model: with_adapters(model, LoraConfig(rank=2)), "no linear layers that can be"),
    ],
)
def test_what_it_does_not_support_is_named(my_gpt, ask, why):
    model = my_gpt(my_gpt.check({"vocab_size": 7}, seq_len=8), Ops.plain())
    with pytest.raises(ConfigError, match=why):
        ask(model)
