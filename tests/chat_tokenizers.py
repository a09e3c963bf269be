"""Small tokenizers with chat templates like those of published models, and ids of conversations.

Run `python tests/chat_tokenizers.py` where transformers is installed to write chat_ids.json.
"""

import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

IDS = Path(__file__).with_name("chat_ids.json")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% elif m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ '<<SYS>> ' + m['content'] }}{% endif %}{% endfor %}"
)
PLAIN_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' END\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "phi": PHI, "llama2": LLAMA2, "text": PLAIN_END}
NAMES = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>"]
CONVERSATIONS = [
    [("user", "Hi you"), ("assistant", "Yo")],
    [("system", "Be so"), ("user", "you\n\n"), ("assistant", "\n\nso"), ("user", "Yo "),
     ("assistant", " you so <3")],
    [("user", "  é, 日本!"), ("assistant", "<think>so</think>\n\nYé 🙂"), ("user", "\n"),
     ("assistant", "no\n")],
]  # fmt: skip
_MERGES = ["y o", "yo u", "Y o", "s o", "▁ yo", "▁yo u", "\n \n", "▁ ▁", ": ▁", "> \n", "▁ so"]


def turns(number: int) -> list[dict[str, str]]:
    """Return the turns of a conversation, as templates take them."""
    return [{"role": role, "content": content} for role, content in CONVERSATIONS[number]]


def _made(model, *, normalizer=None, splitter=None, decoder=None, **options) -> Tokenizer:
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter
    made.decoder = decoder or decoders.ByteLevel()
    added = [AddedToken(name, normalized=False, special=True, **options) for name in NAMES]
    made.add_special_tokens(added)
    made.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return made


def _byte_level(**options) -> models.Model:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = [merge.replace("▁", "Ġ").replace("\n", "Ċ") for merge in _MERGES]
    merges = [tuple(merge.split(" ")) for merge in spelled]
    pieces = [*alphabet, *("".join(merge) for merge in merges)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return models.BPE(vocabulary, merges, **options)


def _sentencepiece() -> models.Model:
    letters = "▁\nabcdefghijklmnopqrstuvwxyzABEHINSTUY[]/:<>|_,!é3"
    merges = [tuple(merge.split(" ")) for merge in _MERGES]
    byte_pieces = [f"<0x{value:02X}>" for value in range(256)]
    pieces = ["<unk>", *NAMES, *byte_pieces, *letters, *("".join(merge) for merge in merges)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def _unigram() -> models.Model:
    letters = "▁\nabcdefghijklmnopqrstuvwxyzABEHINSTUY[]/:<>|_,!é3"
    words = ["you", "▁you", "so", "▁so", "Yo", "\n\n", "▁▁", ">\n"]
    pieces = [("<unk>", -9.0), *((name, -9.0) for name in NAMES)]
    pieces += [(piece, -3.0) for piece in letters] + [(word, -2.0) for word in words]
    return models.Unigram(pieces, unk_id=0, byte_fallback=False)


def tokenizers() -> dict[str, Tokenizer]:
    """Return the tokenizers by their names."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    prepended = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = decoders.Metaspace()
    found = {
        "gpt2": _made(_byte_level(), splitter=level),
        "nfc": _made(_byte_level(), splitter=level, normalizer=normalizers.NFC()),
        "rstrip": _made(_byte_level(), splitter=level, rstrip=True),
        "lstrip": _made(_byte_level(), splitter=level, lstrip=True),
        "single_word": _made(_byte_level(), splitter=level, single_word=True),
        "prefix_space": _made(
            _byte_level(), splitter=pre_tokenizers.ByteLevel(add_prefix_space=True)
        ),
        "legacy": _made(_sentencepiece(), normalizer=prepended, decoder=spaces),
        "legacy_rstrip": _made(_sentencepiece(), normalizer=prepended, decoder=spaces, rstrip=True),
        "unigram": _made(_unigram(), splitter=pre_tokenizers.Metaspace(), decoder=spaces),
    }
    for scheme in ("first", "always", "never"):
        splitter = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        found[scheme] = _made(_sentencepiece(), splitter=splitter, decoder=spaces)
    return found


def write(folder: Path, name: str, template: str) -> Path:
    """Write one of the tokenizers with a template to a folder, as transformers does."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizers()[name].save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATES[template],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    """Write the ids that transformers gives for each conversation, and for its first prompt."""
    import transformers

    found = {}
    for name in tokenizers():
        for template in TEMPLATES:
            with tempfile.TemporaryDirectory() as folder:
                theirs = transformers.AutoTokenizer.from_pretrained(
                    write(Path(folder), name, template)
                )
                encode = theirs.apply_chat_template
                found[f"{name} {template}"] = [
                    [
                        encode(turns(number), tokenize=True, return_dict=False),
                        encode(
                            turns(number)[:-1],
                            tokenize=True,
                            return_dict=False,
                            add_generation_prompt=True,
                        ),
                    ]
                    for number in range(len(CONVERSATIONS))
                ]
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    IDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
