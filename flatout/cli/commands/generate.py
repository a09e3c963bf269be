"""Write text with a trained model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated

from flatout.cli.commands import CheckpointName, Command, ModelName, TrustCode
from flatout.config.signature import Option, checked
from flatout.data.store.mix import members_of
from flatout.errors import ConfigError, DataError, Interrupted
from flatout.progress import SILENT, Progress
from flatout.storage.json_io import Result
from flatout.training.run_dir.lookup import is_run, run_or_newest

MAX_SEED = 2**62
"""Limit of the seed. It leaves room for the seeds of several samples."""

Temperature = Annotated[
    float,
    Option("0 always takes the most likely token, 1 samples the model's distribution.", min=0),
]
TopK = Annotated[int | None, Option("Sample from the K most likely tokens only.", min=1)]
TopP = Annotated[
    float | None, Option("Sample from the most likely tokens that together reach this probability.")
]


class GenerateResult(Result):
    """The text that a model wrote."""

    samples: list[str]
    """Each sample, starting with its prompt."""


@checked
def generate(
    run: ModelName = None,
    prompt: Annotated[
        str,
        Option(
            "Text to continue. Empty text starts a new document, or stands for the start of the "
            "validation text if the training text is a single one."
        ),
    ] = "",
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int, Option("Equal seeds give equal text.")] = 0,
    num_samples: Annotated[int, Option("How many texts to write.", min=1)] = 1,
    max_tokens: Annotated[
        int,
        Option(
            "Maximum tokens of a text. It may exceed the sequence length used in training.", min=1
        ),
    ] = 256,
    stop: Annotated[list[str] | None, Option("Stop before this text (repeatable).")] = None,
    checkpoint: CheckpointName = None,
    trust_code: TrustCode = False,
    *,
    write: Callable[[str], object] | None = None,
    progress: Progress = SILENT,
) -> GenerateResult:
    """Write text with a trained model, and print it as it is written.

    The model is that of a run, an export, or another tool's model: what train.init_from reads,
    with its tokenizer.json, which may start each text with a token such as <s>.

    A model with attention sees at most as many tokens as its training sequences had. A longer text
    continues from the second half of them. An eigenstate network has no such limit: its state
    summarises everything it has read. Several samples are printed one after another.

    Returns: each text, starting with its prompt; `write` receives the pieces as they are written.
    Raises: CheckpointError when the run has no such checkpoint; ConfigError when a setting is out
            of range; DataError when the model's tokenizer cannot encode the prompt; UntrustedCode
            when the run names code that is not allowed.
    """
    require_sampling(top_p, seed)
    if stop and not all(stop):
        raise ConfigError(
            "--stop must not be empty.", fix="Give the text that ends a sample, or remove it."
        )
    if is_run(run):
        run_or_newest(run)  # a wrong name fails before torch is loaded
    from flatout.inference.generate import Sampling, sample
    from flatout.inference.load import load_model

    loaded = load_model(run, checkpoint, trust_code=trust_code, progress=progress)
    with suppress(ConfigError, DataError):  # of another tool's model, or data that is not here
        prompt = prompt or members_of(loaded.dataset)[0].dataset.opening
    loaded.tokenizer.encode(prompt)  # rejects a bad prompt before anything is printed
    show = write or (lambda _piece: None)
    samples = []
    for number in range(num_samples):
        show(prompt if num_samples == 1 else f"--- sample {number + 1} ---\n{prompt}")
        pieces = sample(
            loaded.model,
            loaded.tokenizer,
            prompt,
            Sampling(temperature, top_k, top_p, seed + number, max_tokens),
            stop=stop or (),
            max_context=loaded.config.data.seq_len,
            opening=loaded.opening,
        )
        samples.append(prompt + show_pieces(pieces, show))
    return GenerateResult(samples=samples)


def require_sampling(top_p: float | None, seed: int) -> None:
    """Check what the signatures of `generate` and `chat` leave open.

    Raises: ConfigError that names the invalid setting.
    """
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(
            f"--top-p {top_p} must be greater than 0 and at most 1.",
            fix="Omit it to sample from all tokens. 0.9 is a usual value.",
        )
    if abs(seed) >= MAX_SEED:
        raise ConfigError(f"--seed {seed} is too large.", fix=f"Use a number below {MAX_SEED}.")


def show_pieces(pieces: Iterable[str], show: Callable[[str], object]) -> str:
    """Show the pieces of a text as they are written, end the line, and return the text."""
    text = []
    try:
        for piece in pieces:
            show(piece)
            text.append(piece)
    except (KeyboardInterrupt, Interrupted):
        show("\n")  # the error message starts on a new line
        raise
    show("\n")
    return "".join(text)


COMMAND = Command(
    generate,
    example='flatout generate runs/demo --prompt "def main" --temperature 0.7',
)
