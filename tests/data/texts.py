"""Texts to test tokenizers with: a training corpus, and text unlike it."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The cat sat on the mat.\nThe cat did.\n",
    "Ein Käfer fliegt über das Land. 日本語 🙂\n",
    "  indented\n\n\tand 12345 numbers's\r\n" * 3,
]
STRANGE = [
    *("", " ", "\n", "a" * 5000, " " * 5000, "🙂" * 50, "e\u0301", "\u200b\ufeff", "\x00\x01"),
    *("'ll 'LL", "1234567890", "日本語のテキスト", "\r\n\r\n x"),
]


def byte_level_json(texts, vocab_size, end_of_text="<|endoftext|>", *, special=True):
    """Return a tokenizer.json in the layout of GPT-2's, trained on texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.add_tokens([AddedToken(end_of_text, special=special, normalized=False)])
    return made.to_str()
