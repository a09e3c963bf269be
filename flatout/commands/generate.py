"""Write text with a trained model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flatout.assembly.preflight import check_sampling
from flatout.commands import TRUST_CODE, Command, Result
from flatout.errors import ConfigError, Interrupted
from flatout.progress import SILENT, Progress
from flatout.training.run_dir.layout import trusted_config
from flatout.training.run_dir.lookup import run_or_newest


class GenerateResult(Result):
    """What a model wrote."""

    samples: list[str]
    """Each sample, its prompt first."""

    def summary(self) -> str:
        """Return nothing: the samples were shown as they were written."""
        return ""


MOST_SEED = 2**62
"""What random generators take as a seed, with room for those of several samples."""


def generate(
    run: Annotated[
        str | Path | None,
        typer.Argument(
            help="A run folder, or its name under runs/; by default the newest run there."
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option(help="Text to go on from; empty begins a new document.")
    ] = "",
    temperature: Annotated[
        float,
        typer.Option(help="0 always takes the likeliest token; 1 draws as the model believes."),
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from the K likeliest tokens only.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens that together have this probability."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds write equal text.")] = 0,
    num_samples: Annotated[int, typer.Option(help="How many texts to write.")] = 1,
    max_tokens: Annotated[
        int,
        typer.Option(
            help="Longest text, in tokens; it may be longer than the windows that the model was trained on."
        ),
    ] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, or a step.")] = "best",
    trust_code: Annotated[bool, TRUST_CODE] = False,
    *,
    write: Callable[[str], object] | None = None,
    progress: Progress = SILENT,
) -> GenerateResult:
    """Write text with a trained model, shown as it is written.

    A model with attention sees at most as many tokens as the windows it was trained on have, and a
    longer text goes on from their second half; an eigenstate network goes on for ever, with what it
    remembers of all it has read. Several samples follow one another.

    Returns: each text, its prompt first; `write` is handed the pieces as they come.
    Raises: CheckpointError when the run has no such checkpoint; ConfigError when a setting is out
            of range; DataError when the
    model's tokenizer cannot write the prompt; UntrustedCode when the run names code of its own that
    nobody allowed.
    """
    check(run, temperature, top_k, top_p, seed, num_samples, max_tokens, stop, trust_code)
    from flatout.inference.generate import sample
    from flatout.inference.load import load_run

    loaded = load_run(
        run_or_newest(run, progress=progress), checkpoint, trust_code=trust_code, progress=progress
    )
    loaded.tokenizer.encode(
        prompt
    )  # a prompt that it cannot write is refused before anything is shown
    show = write or (lambda _piece: None)
    samples = []
    for number in range(num_samples):
        pieces = [prompt]
        show(prompt if num_samples == 1 else f"--- sample {number + 1} ---\n{prompt}")
        written = sample(
            loaded.model,
            loaded.tokenizer,
            prompt,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed + number,
            max_tokens=max_tokens,
            stop=stop or (),
            max_context=loaded.config.data.seq_len,
        )
        try:
            for piece in written:
                show(piece)
                pieces.append(piece)
        except (KeyboardInterrupt, Interrupted):
            show("\n")  # what is said of it begins a line
            raise
        samples.append("".join(pieces))
        show("\n")
    return GenerateResult(samples=samples)


def check(
    run: str | Path | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    num_samples: int,
    max_tokens: int,
    stop: list[str] | None,
    trust_code: bool = False,
) -> None:
    """Do nothing when there is such a run and the settings make sense, as far as that can be told
    without torch.

    Raises: CheckpointError with the nearest run; ConfigError naming the setting; UntrustedCode.
    """
    check_sampling(temperature, top_k, top_p, max_tokens, stop or ())
    if num_samples < 1:
        raise ConfigError(f"num-samples {num_samples} asks for no text.", fix="Use 1 or more.")
    if abs(seed) >= MOST_SEED:
        raise ConfigError(f"seed {seed} is too large.", fix=f"Use a number below {MOST_SEED}.")
    trusted_config(run_or_newest(run), trust_code=trust_code)


COMMAND = Command(
    generate,
    example='flatout generate runs/demo --prompt "def main" --temperature 0.7',
    check=check,
    needs_torch=True,
)
