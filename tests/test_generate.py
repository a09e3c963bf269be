"""Sampling: whole characters, stops, limits, a generator of its own; and a run's folder turned back into its model."""

import math

import pytest
import torch
from torch import nn

from flatout import generate
from flatout.data.tokenizer import parse_tokenizer
from flatout.data.tokenizers_plain import ByteTokenizer
from flatout.errors import ConfigError
from flatout.generate import sample

EOT = ByteTokenizer().eot_id


class Script(nn.Module):
    """A model that writes one given text, token by token, sure of itself up to `noise`."""

    def __init__(self, text, noise: float = 0.0, vocab_size: int = 300, eot: int = EOT, past: int = EOT + 1) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.max_seq_len = 8
        self.ids = [*text, eot]
        self.noise, self.vocab_size, self.past, self.seen = noise, vocab_size, past, []

    def next_logits(self, tokens_BT):
        self.seen.append(tokens_BT.tolist()[0])
        logits_BV = torch.zeros(1, self.vocab_size)
        logits_BV[0, self.ids[len(self.seen) - 1]] = 1 / self.noise if self.noise else 1e9
        logits_BV[0, self.past :] = 1e9 if not self.noise else 50.0
        return logits_BV


def written(text, prompt="", **options):
    return list(sample(Script(text.encode()), ByteTokenizer(), prompt, **options))


def test_ends_at_the_end_of_the_document():
    assert "".join(written("hello", max_tokens=100)) == "hello"


def test_pieces_are_whole_characters():
    pieces = written("aé€😀b", temperature=0)
    assert pieces == ["a", "é", "€", "😀", "b"]


def test_a_character_cut_by_the_limit_is_marked_not_dropped():
    assert "".join(written("a😀", max_tokens=3)) == "a\ufffd"


def metaspace():
    """Words that begin with U+2581, and bytes for what is in no word, as in Llama 2's tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *SPACED, "\u2581"]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    made.add_special_tokens(["<unk>", "</s>"])
    return made


def wordpiece():
    """Words that are split at spaces, which stand in no piece, as in BERT's tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["[UNK]", "[EOS]", "the", "cat", "sat", "on", "mat", "##s", "."]
    made = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]", "[EOS]"])
    return made


SPACED = ["\u2581the", "\u2581cat", "\u2581sat", "\u2581on", "\u2581mat", "s", "."]


@pytest.mark.parametrize("make", [metaspace, wordpiece])
@pytest.mark.parametrize("prompt", ["", "the cat"])
@pytest.mark.parametrize("text", ["the cats sat on the mat.", "s"])
def test_words_keep_their_spaces_whatever_the_tokenizer(make, prompt, text):
    tokenizer = parse_tokenizer(make().to_str(), "tokenizer.json")
    ids, before = tokenizer.encode(text), tokenizer.encode(prompt) if prompt else []
    pieces = list(sample(Script(ids, eot=tokenizer.eot_id, past=tokenizer.vocab_size), tokenizer, prompt))
    assert prompt + "".join(pieces) == tokenizer.decode([*before, *ids])
    assert (prompt + "".join(pieces)).count(" ") == len((prompt + " " + text).split()) - 1
    assert len(pieces) >= len(ids) - 1, "streamed, not kept to the end"


@pytest.mark.parametrize("prompt", ["", "the \u65e5"])
def test_characters_of_several_tokens_come_whole(prompt):
    tokenizer = parse_tokenizer(metaspace().to_str(), "tokenizer.json")
    text = "the \u65e5\u672c\u8a9e \U0001f642. cat"
    ids, before = tokenizer.encode(text), tokenizer.encode(prompt) if prompt else []
    assert len(ids) > len(text), "characters are spelled in bytes here"
    pieces = list(sample(Script(ids, eot=tokenizer.eot_id, past=tokenizer.vocab_size), tokenizer, prompt))
    assert prompt + "".join(pieces) == tokenizer.decode([*before, *ids])
    assert "\ufffd" not in "".join(pieces)
    assert {"\u65e5", "\u672c", "\u8a9e", "\U0001f642"} <= set(pieces)
    cut = list(sample(Script(ids[:-7], eot=tokenizer.eot_id, past=tokenizer.vocab_size), tokenizer, prompt))
    assert "".join(cut).rstrip("\ufffd") in "".join(pieces)


def test_max_tokens():
    assert "".join(written("hello", max_tokens=2)) == "he"


def test_rows_beyond_the_vocabulary_are_never_drawn():
    assert "".join(written("x" * 50, temperature=2.0)) == "x" * 50


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["lo"], "hel"),
        (["ll"], "he"),
        (["h"], ""),
        (["xyz", "o wor"], "hell"),
        (["zzz"], "hello world"),
        (["world!"], "hello world"),
        ([""], "hello world"),
    ],
)
def test_stop_strings_are_not_shown(stop, text):
    assert "".join(written("hello world", stop=stop)) == text


def test_what_could_begin_a_stop_is_held_back_no_longer_than_needed():
    assert written("a\nb\n\nc", stop=["\n\n"]) == ["a", "\nb"]


def test_an_empty_prompt_begins_a_document_and_a_window_slides():
    model = Script(b"0123456789")
    list(sample(model, ByteTokenizer(), ""))
    assert model.seen[0] == [EOT]
    assert max(len(seen) for seen in model.seen) == 8
    assert model.seen[10] == list(b"23456789")
    model = Script(b"ab")
    list(sample(model, ByteTokenizer(), "a long prompt", window=4))
    assert model.seen[0] == list(b"ompt")
    model = Script(b"ab")
    list(sample(model, ByteTokenizer(), "a long prompt", window=4000))
    assert model.seen[0] == list(b"g prompt"), "never more than the model takes"


def drawn(seed, **options):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    text = "".join(sample(Script(b"a" * 40, noise=0.3, vocab_size=257), ByteTokenizer(), temperature=1.5, max_tokens=30, seed=seed, **options))
    assert torch.equal(torch.random.get_rng_state(), before), "sampling must not touch the run's own generator"
    return text


def test_equal_seeds_write_equal_text_and_others_do_not():
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_top_k_and_top_p_narrow_the_choice():
    assert drawn(1, top_k=1) == "a" * 30
    assert drawn(1, top_p=1e-6) == "a" * 30
    assert drawn(1, top_p=1.0) == drawn(1)


def test_top_p_keeps_the_fewest_that_reach_it():
    logits_V = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(0)
    kept = {generate._next_token(logits_V, 4, 1.0, None, 0.7, generator) for _ in range(300)}
    assert kept == {0, 1}
    assert {generate._next_token(logits_V, 4, 1.0, 3, None, generator) for _ in range(300)} == {0, 1, 2}


def test_draws_follow_the_probabilities():
    logits_V = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([generate._next_token(logits_V, 3, 1.0, None, None, generator) for _ in range(3000)]), minlength=3)
    assert (counts / 3000 - torch.tensor([0.6, 0.3, 0.1])).abs().max() < 0.04


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_tokens": 0}], ids=str
)
def test_settings_out_of_range(options):
    with pytest.raises(ConfigError, match="Fix: Use"):
        written("a", **options)


def test_the_model_is_put_back_into_training():
    model = Script(b"ab")
    model.train()
    list(sample(model, ByteTokenizer()))
    assert model.training
