"""Which recipe suits a dataset on this machine, for how many steps, and about how long that takes.
No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.config.schema import RunConfig, load_config
from flatout.documents import read_document
from flatout.errors import FlatoutError, in_shell
from flatout.hardware import ASSUMED_MFU, Machine
from flatout.terminal import duration

MOST_EPOCHS = 15
"""Passes over the text after which more training only learns it by heart."""
TOKENS_PER_PARAMETER = 20
"""Where a step more and a parameter more gain the same: Hoffmann et al. 2022, arXiv:2203.15556."""
FEW_SYMBOLS = 1024
"""A vocabulary up to so large is one of characters or bytes."""
GPT2_VOCABULARY = range(FEW_SYMBOLS, 50_304 + 1)
"""Sizes of vocabularies that recipes of GPT-2's shape take."""
LEAST_WINDOWS = 8
"""Of a text with fewer of them, no recipe makes anything."""


@dataclass(frozen=True)
class Recommendation:
    """A run to begin with."""

    command: str
    """What starts it."""
    parameters: int
    """About how many the model has."""
    epochs: float
    """Passes over the training text."""
    time: str
    """About how long it takes, and how that is known."""


def recommend(
    path: str, tokens: int, vocab_size: int, machine: Machine, runs: Path = Path("runs")
) -> Recommendation | None:
    """Return a run for the dataset at `path`, which has so many training tokens; None where that is
    too little text for any recipe.

    It is the largest model that the text can feed with TOKENS_PER_PARAMETER tokens in MOST_EPOCHS
    passes, or the smallest there is. The time is that of a finished run in `runs` with the same
    model, else it follows from the GPU's data sheet.
    """
    name = _recipe(tokens, vocab_size, machine)
    config = load_config(name)
    if tokens < LEAST_WINDOWS * config.data.seq_len:
        return None
    parameters, per_step = _parameters(config, vocab_size), config.batch.tokens_per_step or 1
    steps = max(round(min(TOKENS_PER_PARAMETER * parameters, MOST_EPOCHS * tokens) / per_step), 1)
    command = f"flatout train {name} data.path={in_shell(path)} train.steps={steps}"
    time = _time(config, vocab_size, parameters, steps * per_step, machine, runs)
    return Recommendation(command, parameters, round(steps * per_step / tokens, 1), time)


def _recipe(tokens: int, vocab_size: int, machine: Machine) -> str:
    if not machine.gpus:
        return "demo-char" if vocab_size <= FEW_SYMBOLS else "demo"
    larger = ("gpt2-350m", "gpt2-124m") if vocab_size in GPT2_VOCABULARY else ()
    fed = (
        name
        for name in larger
        if TOKENS_PER_PARAMETER * _parameters(load_config(name), vocab_size) <= MOST_EPOCHS * tokens
    )
    return next(fed, "demo-gpu")


def _parameters(config: RunConfig, vocab_size: int) -> int:
    """Return how many parameters a transformer of this shape has, less vectors: the recipes above
    are such.
    """
    own = config.model.own()
    width = int(own["d_model"])
    return 12 * int(own["num_layers"]) * width**2 + (config.model.vocab_size or vocab_size) * width


def _time(
    config: RunConfig, vocab_size: int, parameters: int, tokens: int, machine: Machine, runs: Path
) -> str:
    found = _measured(config, vocab_size, runs)
    if found is not None:
        run, rate = found
        return f"about {duration(tokens / rate)}, at the {rate:,.0f} tokens/s of {run}"
    if machine.row is not None and "bf16" in machine.row.peak_tflops:
        attention = (
            6
            * int(config.model.own()["num_layers"])
            * int(config.model.own()["d_model"])
            * config.data.seq_len
        )
        flops_per_s = machine.row.peak_tflops["bf16"].value * 1e12 * ASSUMED_MFU
        return f"about {duration(tokens * (6 * parameters + attention) / flops_per_s)}, if it reaches {ASSUMED_MFU:.0%} of {machine.row.name}'s peak"
    return "not known before a run: no finished one here has this model; train shows the time left from its first steps on"


def _measured(config: RunConfig, vocab_size: int, runs: Path) -> tuple[Path, float] | None:
    """Return the newest finished run of the recipe's model and vocabulary, and its tokens a second;
    None where there is none.
    """
    for summary in sorted(
        runs.glob("*/summary.json"), key=lambda path: path.stat().st_mtime, reverse=True
    ):
        try:
            there, rate = (
                read_document(summary.with_name("config.yaml")),
                read_document(summary).get("tokens_per_s"),
            )
        except FlatoutError:
            continue
        model = there.get("model") or {}
        wanted = config.model.own() | {
            "kind": config.model.kind,
            "vocab_size": config.model.vocab_size or vocab_size,
        }
        same = all(model.get(key) == value for key, value in wanted.items() if key in model)
        if same and "d_model" in model and isinstance(rate, int | float) and rate > 0:
            return summary.parent, float(rate)
    return None
