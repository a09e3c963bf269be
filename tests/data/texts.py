"""Texts to test tokenizers with: a training corpus, and text unlike it."""

CORPUS = [
    "The cat sat on the mat.\nThe cat did.\n",
    "Ein Käfer fliegt über das Land. 日本語 🙂\n",
    "  indented\n\n\tand 12345 numbers's\r\n" * 3,
]
STRANGE = [
    "",
    " ",
    "\n",
    "a" * 5000,
    " " * 5000,
    "🙂" * 50,
    "e\u0301",
    "\u200b\ufeff",
    "\x00\x01",
    "'ll 'LL",
    "1234567890",
    "日本語のテキスト",
    "\r\n\r\n x",
]
