"""From a run folder to text: loads a trained model, samples from it, scores it.

Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatout.config import ParallelConfig, RunConfig
from flatout.data.loader import ShardWindows
from flatout.data.manifest import TOKENIZER
from flatout.data.shards import Dataset
from flatout.data.tokenizer import load_tokenizer
from flatout.errors import CheckpointError, ConfigError, DataError
from flatout.hardware import pick_device, probe
from flatout.models.language_model import LanguageModel
from flatout.parallel.mesh import make_mesh
from flatout.parallel.rendezvous import Ranks
from flatout.progress import SILENT, Progress
from flatout.recipe import Recipe
from flatout.registry import MODELS, SPEEDUPS, nearest
from flatout.run import ops_of
from flatout.selection import Decision, assemble
from flatout.training import catalog
from flatout.training.checkpoint import read_weights
from flatout.training.evaluation import Judge
from flatout.training.folder import list_runs, read_config

if TYPE_CHECKING:
    from flatout.data.tokenizer import Tokenizer

ONLY_IN_TRAINING = frozenset({"compile"})
"""Speedups that cost more than they save when a model is called a few times."""


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with what it needs to read and write text."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    recipe: Recipe
    folder: Path
    checkpoint: Path

    @cached_property
    def dataset(self) -> Dataset:
        """The data set it was trained on; sampling does not need it.

        Raises: DataError when it is no longer there.
        """
        return Dataset.open(self.config.data.path or "")


@dataclass(frozen=True)
class Score:
    """How well a model predicts a validation split."""

    val_loss: float
    """Mean loss a token, in nats."""
    perplexity: float
    bits_per_byte: float | None
    """Bits a byte of text; comparable between tokenizers. None when the data set does not say how many bytes its text has."""
    tokens: int


def find_run(run: str | Path) -> Path:
    """Return the run folder that `run` names: a path, or a name under `runs/`.

    Raises: CheckpointError with the nearest run there is.
    """
    for folder in (Path(run), Path("runs") / run):
        if (folder / "config.yaml").exists():
            return folder
    known = [path.name for path in list_runs(Path("runs"))] if Path("runs").is_dir() else []
    guess = nearest(Path(run).name, known)
    raise CheckpointError(
        f"{run} is not a run folder: it has no config.yaml.",
        fix=f"Did you mean runs/{guess}?" if guess else "`flatout runs` shows the runs there are; `flatout demo` makes one.",
    )


def find_checkpoint(folder: Path, checkpoint: str = "best", *, progress: Progress = SILENT) -> Path:
    """Return the checkpoint folder that `best`, `last` or a step names; `best` is the last one while no loss is known.

    Raises: CheckpointError when there is none, or it is not whole; ConfigError when `checkpoint` is none of these.
    """
    if checkpoint in {"best", "last"}:
        found = catalog.best(folder, progress=progress) if checkpoint == "best" else None
        found = found or catalog.latest(folder, progress=progress)
        if found is None:
            raise CheckpointError(
                f"The run {folder} has no checkpoint yet.", fix="Train it first: `flatout train` saves every ten minutes and at the end."
            )
        return found
    if not checkpoint.isdecimal():
        raise ConfigError(f"{checkpoint!r} is not a checkpoint.", fix="Use best, last, or the number of a step.")
    path = catalog.checkpoint_path(folder, int(checkpoint))
    if not path.is_dir():
        known = ", ".join(str(step) for step in catalog.steps(folder)) or "none"
        raise CheckpointError(f"The run {folder} has no checkpoint of step {checkpoint}.", fix=f"Steps that have one: {known}.")
    catalog.require_whole(path, progress=progress)
    return path


def load_run(run: str | Path, checkpoint: str = "best", *, device: str = "auto", progress: Progress = SILENT) -> LoadedRun:
    """Return the model of a run with the weights of a checkpoint (`best`, `last` or a step), its tokenizer and its data set.

    Raises: CheckpointError, DataError or ConfigError when one of them cannot be used.
    """
    folder = find_run(run)
    config = read_config(folder)
    if config is None or config.data.path is None:
        raise CheckpointError(f"{folder}/config.yaml names no data set.", fix="Use the folder of a run that `flatout train` made.")
    path = find_checkpoint(folder, checkpoint, progress=progress)
    where, _ = pick_device(device, probe())
    with progress.task(f"Loading {path.name} of {folder.name}"):
        recipe = assemble(_usable_speedups(config))
        model_class = MODELS.get(config.model.kind)
        own = model_class.check(config.model.own() | {"vocab_size": config.model.vocab_size}, seq_len=config.data.seq_len)
        model: LanguageModel = model_class(own, ops_of(recipe))
        model.load_state_dict(read_weights(path))
        model.to(where).eval()
        tokenizer = load_tokenizer(folder / TOKENIZER)
    return LoadedRun(model, tokenizer, config, recipe, folder, path)


def _usable_speedups(config: RunConfig) -> Iterator[Decision]:
    """Yield the run's own speedups that also work here: a model trained on a GPU can be tried on a laptop."""
    machine = probe()
    names = () if isinstance(config.speedups, str) else config.speedups
    for name in names:
        if name not in ONLY_IN_TRAINING and SPEEDUPS.get(name).why_not(machine, config) is None:
            yield Decision(name, True, "as trained")


def evaluate(loaded: LoadedRun, *, max_tokens: int | None = None, progress: Progress = SILENT) -> Score:
    """Return loss, perplexity and bits a byte on the validation split, as the run itself evaluates.

    Raises: DataError when the data set has no validation text.
    """
    split = loaded.dataset.split("val")
    if split.num_tokens < 2:
        raise DataError(f"{loaded.dataset.path} has no validation text.", fix="Prepare it with a larger share, for example --split 'tail 0.1'.")
    mesh = make_mesh(ParallelConfig(), str(next(loaded.model.parameters()).device), Ranks())
    data, precision = loaded.config.data, loaded.recipe.part("precision")
    rows = int(loaded.config.batch.rows_per_device)
    judge = Judge(loaded.model, mesh, ShardWindows(), partial(precision.context, mesh.device.type), data.seq_len, rows, data.document_mask)
    result = judge.score(split, max_tokens=max_tokens, progress=progress)
    return Score(result.loss, result.perplexity, result.bits_per_byte(split.text_bytes), result.tokens)


@torch.no_grad()
def sample(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    max_tokens: int = 256,
    stop: Sequence[str] = (),
    window: int | None = None,
) -> Iterator[str]:
    """Yield the text that follows `prompt` (empty: a new document), piece by piece, never half a character.

    Ends at the end of the document, before a `stop` string, or after `max_tokens`. It draws from a generator of its own, so
    a run that samples trains on as if it had not. The model sees the last `window` tokens, as many as it takes when None: give
    the length of the windows it was trained on, where it could take more than it has learned to.
    Raises: ConfigError when a setting is out of range; DataError when the prompt cannot be encoded.
    """
    check_settings(temperature, top_k, top_p, max_tokens)
    known = min(window or model.max_seq_len, model.max_seq_len)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    ids = tokenizer.encode(prompt) if prompt else [tokenizer.eot_id]
    context_BT = torch.tensor([ids[-known:]], dtype=torch.int64, device=device)
    text, written = _StoppedText(stop), _WrittenText(tokenizer, ids if prompt else [])
    with _evaluating(model):
        for _ in range(max_tokens):
            token = _next_token(model.next_logits(context_BT)[0], tokenizer.vocab_size, temperature, top_k, top_p, generator)
            if token == tokenizer.eot_id:
                break
            context_BT = torch.cat([context_BT, torch.tensor([[token]], device=device)], dim=1)[:, -known:]
            piece = text.take(written.take(token))
            if piece:
                yield piece
            if text.stopped:
                return
    rest = text.take(written.rest()) + text.rest()
    if rest:
        yield rest


def check_settings(temperature: float, top_k: int | None, top_p: float | None, max_tokens: int) -> None:
    """Do nothing when the settings of a sample make sense.

    Raises: ConfigError naming the one that does not.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"A temperature of {temperature} cannot be used.", fix="Use 0 (always the likeliest token) to about 1.5.")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top-k {top_k} leaves no token to draw.", fix="Use 1 or more, or leave it out.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top-p {top_p} is not a share of the probability.", fix="Use a number above 0 and at most 1, or leave it out.")
    if max_tokens < 1:
        raise ConfigError(f"max-tokens {max_tokens} asks for no text.", fix="Use 1 or more.")


def _next_token(logits_V: Tensor, vocab_size: int, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator) -> int:
    """Draw one token. A padded vocabulary has rows no token stands for: they are never drawn."""
    scores_V = logits_V[:vocab_size].float()
    if temperature == 0:
        return int(scores_V.argmax())
    sorted_V, order_V = (scores_V / temperature).softmax(-1).sort(descending=True, stable=True)
    if top_k is not None:
        sorted_V[top_k:] = 0
    if top_p is not None:
        before_V = sorted_V.cumsum(-1) - sorted_V
        sorted_V[before_V >= top_p] = 0
    return int(order_V[torch.multinomial(sorted_V, 1, generator=generator)])


@contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class _WrittenText:
    """The text of ids that come one by one, after those of a prompt.

    What an id stands for can depend on its neighbours: a word's space is left out at the beginning of a text, bytes make a
    character only together. So all ids are decoded each time, and what could still change is held back: U+FFFD at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids)
        self._text = tokenizer.decode(self._ids)
        self._shown = len(self._text)

    def take(self, token: int) -> str:
        """Return what is certain now that `token` has come."""
        self._ids.append(token)
        self._text = self._tokenizer.decode(self._ids)
        return self._show(len(self._text.rstrip("\ufffd")))

    def rest(self) -> str:
        """Return what was held back."""
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        start, self._shown = self._shown, max(self._shown, end)
        return self._text[start:end]


class _StoppedText:
    """Text that ends before a stop string, which may arrive in several pieces: what could be its beginning is held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = [s for s in stop if s]
        self._held = ""
        self.stopped = False

    def take(self, piece: str) -> str:
        """Return what can be shown now that `piece` has come."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for place in (text.find(s) for s in self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """Return what was held back, when no stop string came."""
        held, self._held = self._held, ""
        return held
