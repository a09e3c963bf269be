"""Chooses the chat template of a dataset: a named one, or the one of its tokenizer."""

from __future__ import annotations

from flatout.conversation.rendering import Renderer
from flatout.conversation.templates import (
    CHAT_TEMPLATE,
    CONFIG_FILE,
    TEMPLATE_FILE,
    ChatTemplate,
    load_template,
    named_template,
    stored_template,
    template_beside,
)
from flatout.data.prepare.request.options import Options
from flatout.data.store.manifest import MANIFEST, read_manifest
from flatout.data.tokenizers import existing_tokenizer, kind_named, tokenizer_path
from flatout.data.tokenizers.base import END_OF_TEXT
from flatout.data.tokenizers.hub import is_repository, repository_file
from flatout.progress import SILENT, Progress

AUTO = "auto"
_CHATML_TOKENS = {"<|im_start|>", "<|im_end|>"}


def chat_renderer(options: Options, progress: Progress = SILENT) -> Renderer | None:
    """Return what writes the conversations of a dataset as text; None when rows are text.

    `auto` takes the template that comes with the tokenizer, else chatml for a tokenizer that has
    its special tokens, else plain.

    Raises: DataError when the template or the tokenizer cannot be used.
    """
    if options.chat is None:
        return None
    spec, kind = options.tokenizer, kind_named(options.tokenizer)
    if kind is not None and kind.needs_corpus:
        special: tuple[str, ...] = (END_OF_TEXT,)
        end_of_text = END_OF_TEXT
    else:
        tokenizer = existing_tokenizer(
            spec, options.pattern, options.end_of_text, progress=progress
        )
        tokens = tokenizer.special_tokens()
        special = tuple(tokens)
        end_of_text = next(name for name, index in tokens.items() if index == tokenizer.eot_id)
    defaults = {"bos_token": "", "eos_token": end_of_text}
    template = None
    if kind is None:
        template = _of_tokenizer(spec, defaults, progress)
    if options.chat != AUTO:
        variables = template.variables if template else defaults
        template = named_template(options.chat, variables)
    elif template is None:
        name = "chatml" if set(special) >= _CHATML_TOKENS else "plain"
        template = named_template(name, defaults)
        progress.say(f"The tokenizer has no chat template; using {name}.")
    renderer = Renderer(template, special)
    _ = renderer.end  # refuses an unusable template before anything is read
    return renderer


def _of_tokenizer(spec: str, defaults: dict[str, str], progress: Progress) -> ChatTemplate | None:
    """Return the template beside a tokenizer file, in its dataset or run, or in its repository."""
    path = tokenizer_path(spec)
    if path.is_file():
        folder = path.parent
        if (folder / MANIFEST).is_file():
            return stored_template(read_manifest(folder).source)
        return load_template(folder / CHAT_TEMPLATE) or template_beside(
            folder / CONFIG_FILE, folder / TEMPLATE_FILE, defaults
        )
    if not is_repository(spec):
        return None
    config, jinja = (
        repository_file(spec, name, progress=progress) for name in (CONFIG_FILE, TEMPLATE_FILE)
    )
    return template_beside(config, jinja, defaults)
