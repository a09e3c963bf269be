"""Talk to a trained model, turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

from flatout.cli.commands import CheckpointName, Command, ModelName, TrustCode
from flatout.cli.commands.generate import Temperature, TopK, TopP, require_sampling, show_pieces
from flatout.config.signature import Option, checked
from flatout.data.conversation.templates import (
    CHAT_TEMPLATE,
    CONFIG_FILE,
    TEMPLATE_FILE,
    ChatTemplate,
    load_template,
    named_template,
    template_beside,
)
from flatout.data.store.manifest import TOKENIZER
from flatout.data.tokenizers import Tokenizer, load_tokenizer
from flatout.errors import ConfigError, DataError
from flatout.progress import SILENT, Progress
from flatout.storage.files import Stored
from flatout.storage.json_io import Result
from flatout.training.run_dir.lookup import is_run, run_or_newest

RESET, QUIT = "/reset", "/quit"
"""Lines that are commands: start a new conversation, and end."""


class ChatTurn(Stored):
    """One turn of a conversation."""

    role: str
    """system, user or assistant."""
    content: str
    """Its text."""


class ChatResult(Result):
    """The turns, in the form of chat data."""

    conversations: list[list[ChatTurn]]
    """The conversations. /reset starts a new one."""


@checked
def chat(
    run: ModelName = None,
    system: Annotated[str | None, Option("System prompt, the first turn.")] = None,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Annotated[int, Option("Equal seeds give equal replies to equal turns.")] = 0,
    max_tokens: Annotated[int, Option("Maximum tokens of a reply.", min=1)] = 256,
    chat_template: Annotated[
        str | None,
        Option("chatml, plain or a Jinja file, for a run that was not trained on chat data."),
    ] = None,
    checkpoint: CheckpointName = None,
    trust_code: TrustCode = False,
    *,
    lines: Iterable[str] | None = None,
    write: Callable[[str], object] | None = None,
    progress: Progress = SILENT,
) -> ChatResult:
    """Talk to a trained model: each line of standard input is a turn, and its reply is printed.

    The line /reset starts a new conversation, and /quit or the end of the input ends the chat.
    Turns are written with the chat template that the run was trained with.

    The model keeps its state between turns, so that only new tokens are computed. When a
    conversation does not fit the context, its oldest turns are omitted, except the system prompt,
    and a message reports that the first time. A system prompt or a turn that does not fit on its
    own is rejected. On a terminal, a rejected line is skipped and the chat continues.

    Returns: the conversations; `write` receives the pieces of replies as they are written, and
             `lines` replaces standard input.
    Raises: CheckpointError when the run has no such checkpoint; ConfigError when a setting is out
            of range or the system prompt does not fit; DataError when a template cannot be used, or
            a line is rejected; UntrustedCode.
    """
    require_sampling(top_p, seed)
    if is_run(run):
        folder = run_or_newest(run)
        _template(folder, chat_template, load_tokenizer(folder / TOKENIZER))
    from flatout.inference.chat import ChatSession
    from flatout.inference.generate import Sampling
    from flatout.inference.load import load_model

    loaded = load_model(run, checkpoint, trust_code=trust_code, progress=progress)
    session = ChatSession(
        loaded.model,
        loaded.tokenizer,
        loaded.config.data.seq_len,
        _template(loaded.folder, chat_template, loaded.tokenizer),
        system=system,
        sampling=Sampling(temperature, top_k, top_p, seed, max_tokens),
        progress=progress,
    )
    show = write or (lambda _piece: None)
    prompt = "> " if lines is None and sys.stdin.isatty() else ""
    conversations = []
    for line in _typed(show, prompt) if lines is None else lines:
        content = line.strip()
        if content == QUIT:
            break
        if content == RESET:
            conversations.append(session.messages)
            session.reset()
        elif content:
            try:
                show_pieces(session.reply(content), show)
            except DataError as error:
                if not prompt:
                    raise
                show(f"{error.what} {error.fix}\n")
    return ChatResult(
        conversations=[
            [ChatTurn(**turn) for turn in turns]
            for turns in [*conversations, session.messages]
            if any(turn["role"] == "user" for turn in turns)
        ]
    )


def _typed(show: Callable[[str], object], prompt: str) -> Iterator[str]:
    """Yield the lines of standard input, each after a prompt.

    Raises: DataError when it is not UTF-8.
    """
    show(f"{RESET} starts a new conversation, {QUIT} ends.\n{prompt}" if prompt else "")
    try:
        for line in sys.stdin:
            yield line
            show(prompt)
    except UnicodeDecodeError as error:
        raise DataError(
            "Standard input is not UTF-8.", fix="Convert it, for example with `iconv`."
        ) from error
    show("\n" if prompt else "")


def _template(folder: Path, name: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of a run or of another tool's model, or the named one.

    Raises: ConfigError when there is none and none is named; DataError when it is unusable.
    """
    names = {index: name for name, index in tokenizer.special_tokens().items()}
    defaults = {"bos_token": "", "eos_token": names[tokenizer.eot_id]}
    own = load_template(folder / CHAT_TEMPLATE) or template_beside(
        folder / CONFIG_FILE, folder / TEMPLATE_FILE, defaults
    )
    if name is not None:
        return named_template(name, own.variables if own else defaults)
    if own is None:
        raise ConfigError(
            f"{folder} has no chat template: it was not trained on chat data.",
            fix="Train it on data that was prepared with --chat auto, or name a template: "
            "--chat-template chatml, plain or FILE.",
        )
    return own


COMMAND = Command(
    chat,
    example='flatout chat runs/NAME --system "Answer in one word."',
)
