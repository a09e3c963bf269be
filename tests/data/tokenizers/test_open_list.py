"""A kind of tokenizer is one file; adding or deleting it is all it takes."""

from __future__ import annotations

import shutil
import sys

import pytest

from flatout.cli.commands.prepare import TokenizerName
from flatout.config import registry
from flatout.config.registry import TOKENIZERS
from flatout.data import tokenizers
from flatout.data.conversation.rendering import Example
from flatout.data.tokenizers import load_tokenizer, make_tokenizer, parse_tokenizer
from flatout.data.tokenizers.byte import ByteTokenizer
from flatout.errors import DataError

SHIFTED = '''
"""One id per UTF-8 byte, shifted by N."""

from flatout.data.tokenizers.base import Tokenizer, join_pieces
from flatout.data.tokenizers.byte import ByteTokenizer

SPEC = "shifted:N"
SUFFIX = ".shift"


class ShiftedTokenizer(ByteTokenizer):
    kind = "shifted"

    def __init__(self, shift):
        super().__init__()
        self.name, self.shift = f"shifted-{shift}", shift

    @classmethod
    def from_corpus(cls, argument, sample, train_on, progress):
        return cls(int(argument))

    @classmethod
    def from_file(cls, file):
        return cls(int(file.data))

    @classmethod
    def from_document(cls, document):
        return cls(document["shift"])

    def document(self):
        return {"shift": self.shift}

    def encode_piece(self, text, offset):
        return (super().encode_piece(text, offset) + self.shift) % 256

    def decode_bytes(self, ids):
        return join_pieces(self._bytes, [(index - self.shift) % 256 for index in ids])


TOKENIZER = ShiftedTokenizer
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a copy of the directory, which the registry lists and Python imports from."""
    folder = tmp_path / "data/tokenizers"
    shutil.copytree(registry.PACKAGE_DIR / "data/tokenizers", folder)
    monkeypatch.setattr(registry, "PACKAGE_DIR", tmp_path)
    monkeypatch.setattr(tokenizers, "__path__", [*tokenizers.__path__, str(folder)])
    TOKENIZERS.__dict__.pop("_files", None)
    yield folder
    TOKENIZERS.__dict__.pop("_files", None)
    sys.modules.pop("flatout.data.tokenizers.shifted", None)


def test_the_kinds_are_the_files():
    assert TOKENIZERS.names() == ["bpe", "byte", "char", "huggingface", "ids"]
    assert [TOKENIZERS.get(name).kind for name in TOKENIZERS.names()] == TOKENIZERS.names()


def test_a_new_file_is_a_new_kind(folder, tmp_path):
    (folder / "shifted.py").write_text(SHIFTED)
    tokenizer = make_tokenizer("shifted:3", lambda limit: ())
    assert (tokenizer.encode("abc"), tokenizer.decode([100])) == ([100, 101, 102], "a")
    tokenizer.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").digest() == tokenizer.digest()
    (tmp_path / "own.shift").write_text("3")
    assert load_tokenizer(tmp_path / "own.shift").digest() == tokenizer.digest()
    with pytest.raises(DataError, match="Give byte, char, ids:N, shifted:N, train:N, a"):
        make_tokenizer("shift", lambda limit: ())


def test_a_deleted_file_removes_its_kind(folder):
    (folder / "char.py").unlink()
    with pytest.raises(DataError, match=r"no tokenizer 'char'\. Fix: Give byte, ids:N, train:N"):
        make_tokenizer("char", lambda limit: ["text"])
    saved = '{"format": "flatout-tokenizer", "format_version": 1, "kind": "char"}'
    with pytest.raises(DataError, match="kind 'char'"):
        parse_tokenizer(saved, "x.json")
    assert make_tokenizer("byte", lambda limit: ()).encode("a") == [97]


@pytest.mark.parametrize("kind", ["os:system", "base", "engines", 3, None, ["byte"]])
def test_a_file_cannot_name_another_module(kind):
    with pytest.raises(DataError, match="of format_version 1, kind "):
        tokenizers._restored(
            {"format": "flatout-tokenizer", "format_version": 1, "kind": kind}, "x.json"
        )


def test_the_help_of_prepare_names_every_kind():
    """The help is a literal, because reading every file would slow down each `--help`."""
    [option] = TokenizerName.__metadata__
    specs = {TOKENIZERS.stated(kind, "SPEC") for kind in TOKENIZERS.names()} - {None}
    assert specs
    assert [spec for spec in specs if spec not in option.help] == []


class Squeezed(ByteTokenizer):
    """A kind whose ids do not show where in a text each begins, because it omits spaces."""

    def encode_piece(self, text, offset):
        return super().encode_piece(text.replace(" ", ""), offset)


def test_a_kind_that_changes_text_encodes_what_the_loss_counts_separately():
    text = "a  <|endoftext|> b c <|endoftext|>"
    names = ((3, 16), (21, 34))
    ids, mask = Squeezed().encode_example(Example(text, ((19, 34),), names))
    assert ids.tolist() == [97, 256, 98, 99, 256]
    assert mask.tolist() == [0, 0, 0, 1, 1]
