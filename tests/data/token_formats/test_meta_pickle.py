"""Whatever a meta.pkl contains, nothing in it runs."""

import os
import pickle

import pytest

from flatout.data.token_formats.meta_pickle import characters_in

CHARACTERS = "\n !'abcé\U0001f600"


def meta(characters=CHARACTERS):
    itos = dict(enumerate(characters))
    return {
        "vocab_size": len(characters),
        "itos": itos,
        "stoi": {character: index for index, character in itos.items()},
    }


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_binary_protocol_is_read(tmp_path, protocol):
    many = "".join(map(chr, range(32, 700)))
    for characters in (CHARACTERS, many):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta(characters), protocol))
        assert characters_in(tmp_path / "meta.pkl") == characters


class Calls:
    def __reduce__(self):
        return os.system, ("echo run",)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps(Calls()),
        pickle.dumps({"itos": Calls()}),
        pickle.dumps({"itos": {}}),
        pickle.dumps({"itos": {0: "a", 2: "b"}}),
        pickle.dumps({"itos": {0: "a", 1: "a"}}),
        pickle.dumps({"itos": {0: "ab"}}),
        pickle.dumps("text"),
        pickle.dumps(meta())[:-9],
        b"\x80\x04}\x94\x8c\x04itos\x94r\xff\xff\xff\x7f.",
        b"\x80\x04\x85.",
        b"\x80\x04s.",
        b"\x80\x04\x940.",
    ],
)
def test_anything_else_gives_no_characters(tmp_path, capfd, content):
    (tmp_path / "meta.pkl").write_bytes(content)
    assert characters_in(tmp_path / "meta.pkl") is None
    assert capfd.readouterr().out == ""


def test_any_changed_byte_gives_characters_or_none(tmp_path):
    whole = pickle.dumps(meta("abc"))
    for offset in range(len(whole)):
        for bits in (0x01, 0x40, 0xFF):
            changed = whole[:offset] + bytes([whole[offset] ^ bits]) + whole[offset + 1 :]
            (tmp_path / "meta.pkl").write_bytes(changed)
            assert isinstance(characters_in(tmp_path / "meta.pkl"), str | None)


def test_an_absent_file_gives_none(tmp_path):
    assert characters_in(tmp_path / "meta.pkl") is None
    assert characters_in(tmp_path) is None
