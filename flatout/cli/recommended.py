"""Recommends a recipe for a dataset on this machine, with its length and time. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flatout.config.documents import read_document
from flatout.config.schema import RunConfig, load_config
from flatout.display import duration
from flatout.errors import FlatoutError, in_shell
from flatout.hardware.machine import ASSUMED_MFU, Machine
from flatout.training.run_dir.layout import REQUESTED

MAX_EPOCHS = 15
"""Passes over the text after which more training only memorises it."""
TOKENS_PER_PARAMETER = 20
"""Compute-optimal ratio of training tokens. Source: Hoffmann et al. 2022, arXiv:2203.15556."""
MAX_SYMBOLS = 1024
"""Largest vocabulary taken to be one of characters or bytes."""
CHAT, TUNE = "chat-demo", "chat-tune"
"""The recipes for chat data: from random weights, and from those of a model."""
UNKNOWN_TIME = "unknown before a run: train shows the time left once it has started"
GPT2_VOCABULARY = range(MAX_SYMBOLS, 50_304 + 1)
"""Vocabulary sizes that suit the recipes of GPT-2's shape."""
MIN_SEQUENCES = 8
"""A text with fewer sequences is too short for any recipe."""


@dataclass(frozen=True)
class Recommendation:
    """A run to start with."""

    command: str
    """The command line that starts it."""
    parameters: int | None
    """Approximate number of parameters. None for those of the model that it starts from."""
    epochs: float | None
    """Passes over the training text. None for those that the recipe states."""
    time: str
    """Approximate duration, and how it was estimated."""


def recommend(
    path: str,
    tokens: int,
    vocab_size: int,
    machine: Machine,
    runs: Path = Path("runs"),
    *,
    is_chat: bool = False,
    init_from: str | None = None,
) -> Recommendation | None:
    """Return a run for the dataset at `path`. None when its training text is too short.

    The recipe is the largest model that gets TOKENS_PER_PARAMETER tokens from MAX_EPOCHS passes
    over the text, or else the smallest one. Chat data has a recipe too. `init_from` is a
    model to tune instead. A run is tuned with its own settings. The time is estimated from a
    finished run in `runs` with the same model, or from the GPU's data sheet.
    """
    name = "demo-gpu" if machine.gpus else "demo"
    if is_chat:
        name = CHAT
    elif not machine.gpus and vocab_size <= MAX_SYMBOLS:
        name = "demo-char"
    elif machine.gpus and vocab_size in GPT2_VOCABULARY:
        for larger in ("gpt2-124m", "gpt2-350m"):
            needed = TOKENS_PER_PARAMETER * _parameters(load_config(larger), vocab_size)
            name = larger if needed <= MAX_EPOCHS * tokens else name
    config = load_config(TUNE if init_from else name)
    if tokens < MIN_SEQUENCES * config.data.seq_len:
        return None
    if init_from:
        settings = Path(init_from) / REQUESTED
        recipe = in_shell(settings) if settings.is_file() else TUNE
        start = f"data.path={in_shell(path)} train.init_from={in_shell(init_from)}"
        return Recommendation(f"flatout train {recipe} {start}", None, None, UNKNOWN_TIME)
    parameters, per_step = _parameters(config, vocab_size), config.batch.tokens_per_step or 1
    steps = max(round(min(TOKENS_PER_PARAMETER * parameters, MAX_EPOCHS * tokens) / per_step), 1)
    command = f"flatout train {name} data.path={in_shell(path)} train.steps={steps}"
    time = _time(config, vocab_size, parameters, steps * per_step, machine, runs)
    return Recommendation(command, parameters, round(steps * per_step / tokens, 1), time)


def _parameters(config: RunConfig, vocab_size: int) -> int:
    """Return the number of parameters of a transformer of this shape, without its vectors.

    All recommended recipes are transformers.
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
    peak = machine.row and machine.row.peak_tflops.get(machine.gpu_dtype)
    if machine.row is not None and peak:
        own = config.model.own()
        attention = 6 * int(own["num_layers"]) * int(own["d_model"]) * config.data.seq_len
        flops_per_s = peak.value * 1e12 * ASSUMED_MFU
        seconds = tokens * (6 * parameters + attention) / flops_per_s
        return f"about {duration(seconds)} at {ASSUMED_MFU:.0%} of the peak of {machine.row.name}"
    return UNKNOWN_TIME


def _measured(config: RunConfig, vocab_size: int, runs: Path) -> tuple[Path, float] | None:
    """Return the newest finished run with this model and vocabulary, and its tokens per second.

    None when there is no such run.
    """
    for summary in sorted(
        runs.glob("*/summary.json"), key=lambda path: path.stat().st_mtime, reverse=True
    ):
        try:
            stored = read_document(summary.with_name("config.yaml"))
            rate = read_document(summary).get("tokens_per_s")
        except FlatoutError:
            continue
        model = stored.get("model") or {}
        wanted = config.model.own() | {
            "kind": config.model.kind,
            "vocab_size": config.model.vocab_size or vocab_size,
        }
        same = all(model.get(key) == value for key, value in wanted.items() if key in model)
        if same and "d_model" in model and isinstance(rate, int | float) and rate > 0:
            return summary.parent, float(rate)
    return None
