"""Sampling: whole characters, stops, limits, a generator of its own; the same text whatever a model
keeps of what it has read.
"""

import math
import random
from itertools import islice

import pytest
import torch
from torch import nn

from flatout.data.tokenizers import parse_tokenizer
from flatout.data.tokenizers.plain import ByteTokenizer
from flatout.errors import ConfigError
from flatout.inference import generate
from flatout.inference.generate import sample, tokens_after
from flatout.models.decoding import Decoder, Recomputing
from flatout.models.language_model import LanguageModel
from flatout.models.transformer import Transformer
from flatout.ops import Ops, attention, cross_entropy

EOT = ByteTokenizer().eot_id


class Script(nn.Module):
    """A model that writes one given text, token by token, sure of itself up to `noise`."""

    def __init__(
        self, text, noise: float = 0.0, vocab_size: int = 300, eot: int = EOT, past: int = EOT + 1
    ) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.max_seq_len = 8
        self.ids = [*text, eot]
        self.noise, self.vocab_size, self.past, self.seen = noise, vocab_size, past, []

    def decoder(self, max_tokens=None):
        return Recomputing(self.next_logits, min(max_tokens or self.max_seq_len, self.max_seq_len))

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
    """Words that begin with U+2581, and bytes for what is in no word, as in Llama 2's
    tokenizer.json.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *SPACED, "\u2581"]
    made = Tokenizer(
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    made.add_special_tokens(["<unk>", "</s>"])
    return made


def wordpiece():
    """Words that are split at spaces, which stand in no piece, as in BERT's tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["[UNK]", "[EOS]", "the", "cat", "sat", "on", "mat", "##s", "."]
    made = Tokenizer(
        models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
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
    pieces = list(
        sample(Script(ids, eot=tokenizer.eot_id, past=tokenizer.vocab_size), tokenizer, prompt)
    )
    assert prompt + "".join(pieces) == tokenizer.decode([*before, *ids])
    assert (prompt + "".join(pieces)).count(" ") == len((prompt + " " + text).split()) - 1
    assert len(pieces) >= len(ids) - 1, "streamed, not kept to the end"


@pytest.mark.parametrize("prompt", ["", "the \u65e5"])
def test_characters_of_several_tokens_come_whole(prompt):
    tokenizer = parse_tokenizer(metaspace().to_str(), "tokenizer.json")
    text = "the \u65e5\u672c\u8a9e \U0001f642. cat"
    ids, before = tokenizer.encode(text), tokenizer.encode(prompt) if prompt else []
    assert len(ids) > len(text), "characters are spelled in bytes here"
    pieces = list(
        sample(Script(ids, eot=tokenizer.eot_id, past=tokenizer.vocab_size), tokenizer, prompt)
    )
    assert prompt + "".join(pieces) == tokenizer.decode([*before, *ids])
    assert "\ufffd" not in "".join(pieces)
    assert {"\u65e5", "\u672c", "\u8a9e", "\U0001f642"} <= set(pieces)
    cut = list(
        sample(Script(ids[:-7], eot=tokenizer.eot_id, past=tokenizer.vocab_size), tokenizer, prompt)
    )
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
    ],
)
def test_stop_strings_are_not_shown(stop, text):
    assert "".join(written("hello world", stop=stop)) == text


def test_an_empty_text_is_nothing_to_stop_at():
    with pytest.raises(ConfigError, match=r"stop ''.*leave it out"):
        written("hello world", stop=["o w", ""])


def test_what_could_begin_a_stop_is_held_back_no_longer_than_needed():
    assert written("a\nb\n\nc", stop=["\n\n"]) == ["a", "\nb"]


def test_an_empty_prompt_begins_a_document():
    model = Script(b"ab")
    list(sample(model, ByteTokenizer(), ""))
    assert model.seen == [[EOT], [EOT, *b"a"], [EOT, *b"ab"]]


def test_so_does_one_without_a_token():
    tokenizer = parse_tokenizer(wordpiece().to_str(), "tokenizer.json")
    ids = tokenizer.encode("the cat")
    model = Script(ids, eot=tokenizer.eot_id, past=tokenizer.vocab_size)
    assert tokenizer.encode(" ") == []
    assert "".join(sample(model, tokenizer, " ")) == "the cat"
    assert model.seen[0] == [tokenizer.eot_id]


def test_a_text_longer_than_the_window_goes_on_from_its_second_half():
    model = Script(b"0123456789abcdef")
    list(sample(model, ByteTokenizer(), ""))
    assert model.seen[7] == [EOT, *b"0123456"]
    assert model.seen[8:14] == [
        [*b"4567"],
        [*b"45678"],
        [*b"456789"],
        [*b"456789a"],
        [*b"456789ab"],
        [*b"89ab", *b"c"][1:],
    ]


def test_a_prompt_longer_than_the_window_is_seen_from_behind():
    model = Script(b"ab")
    list(sample(model, ByteTokenizer(), "a long prompt", window=4))
    assert model.seen == [[*b"ompt"], [*b"ta"], [*b"tab"]]
    model = Script(b"ab")
    list(sample(model, ByteTokenizer(), "a long prompt", window=4000))
    assert model.seen[0] == list(b"g prompt"), "never more than the model takes"
    model = Script(b"ab")
    list(sample(model, ByteTokenizer(), "a long prompt", window=1))
    assert model.seen == [[*b"t"], [*b"a"], [*b"b"]]


class Tally(Decoder):
    """A recurrent stand-in: its state is one number, and it reads any number of tokens."""

    def __init__(self, reads):
        super().__init__(None)
        self.total, self.reads = 0, reads

    def scores_after(self, tokens_BT):
        self.reads.append(tokens_BT.shape[1])
        self.total += int(tokens_BT.sum())
        return nn.functional.one_hot(torch.tensor([self.total % 10]), 10).float()


def test_a_model_without_a_limit_reads_each_token_once():
    model, reads = Script(b""), []
    model.decoder = lambda max_tokens: Tally(reads)
    found = list(
        islice(
            tokens_after(model, [1, 2, 4], lambda logits_V: int(logits_V.argmax()), window=2), 40
        )
    )
    assert found[:5] == [7, 4, 8, 6, 2]
    assert reads == [3] + [1] * 39


def drawn(seed, **options):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    text = "".join(
        sample(
            Script(b"a" * 40, noise=0.3, vocab_size=257),
            ByteTokenizer(),
            temperature=1.5,
            max_tokens=30,
            seed=seed,
            **options,
        )
    )
    assert torch.equal(torch.random.get_rng_state(), before), (
        "sampling must not touch the run's own generator"
    )
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
    kept = {
        generate._chosen(
            logits_V, vocab_size=4, temperature=1.0, top_k=None, top_p=0.7, generator=generator
        )
        for _ in range(300)
    }
    assert kept == {0, 1}
    assert {
        generate._chosen(
            logits_V, vocab_size=4, temperature=1.0, top_k=3, top_p=None, generator=generator
        )
        for _ in range(300)
    } == {0, 1, 2}


@pytest.mark.parametrize(
    ("temperature", "top_k", "wanted"),
    [(1.0, None, [6, 3, 1]), (0.5, None, [36, 9, 1]), (1.0, 2, [6, 3, 0])],
    ids=str,
)
def test_draws_follow_the_probabilities(temperature, top_k, wanted):
    logits_V = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    generator = torch.Generator().manual_seed(0)
    draws = [
        generate._chosen(
            logits_V,
            vocab_size=3,
            temperature=temperature,
            top_k=top_k,
            top_p=None,
            generator=generator,
        )
        for _ in range(3000)
    ]
    counts = torch.bincount(torch.tensor(draws), minlength=3)
    assert (counts / 3000 - torch.tensor(wanted) / sum(wanted)).abs().max() < 0.04


def test_a_cold_draw_is_the_likeliest_and_no_error():
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.0, 1e-300, 1e-30, 1e-3):
        for top_k in (None, 1, 2, 99):
            logits_V = torch.tensor([1.0, 5.0, 4.0, 9.0])
            assert (
                generate._chosen(
                    logits_V,
                    vocab_size=3,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=None,
                    generator=generator,
                )
                == 1
            )


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_settings_out_of_range(options):
    with pytest.raises(ConfigError, match="Fix: Use"):
        written("a", **options)


def test_the_model_is_put_back_into_training():
    model = Script(b"ab")
    model.train()
    list(sample(model, ByteTokenizer()))
    assert model.training


TRANSFORMERS = {
    "gpt2": {"positions": "learned", "bias": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2},
    "window, qk norm": {"window": 24, "qk_norm": True, "num_kv_heads": 1},
}


@pytest.mark.parametrize("own", TRANSFORMERS.values(), ids=list(TRANSFORMERS))
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.0, None, None), (1.0, None, None), (0.8, 40, None), (1.2, None, 0.9)],
    ids=str,
)
@pytest.mark.parametrize(
    ("window", "num_tokens"),
    [(320, 300), (32, 150)],
    ids=["within the context", "over several windows"],
)
def test_a_cache_changes_no_token(own, temperature, top_k, top_p, window, num_tokens):
    """In fp64, where rounding cannot turn a draw."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 300,
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 4,
        "tied_head": False,
    } | own
    model = (
        Transformer(
            Transformer.check(shape, seq_len=window),
            Ops.plain(attention=attention.fused, cross_entropy=cross_entropy.fused),
        )
        .double()
        .eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.dim() > 1 else None

    def written_tokens():
        generator = torch.Generator().manual_seed(3)

        def choose(logits_V):
            return generate._chosen(
                logits_V,
                vocab_size=257,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                generator=generator,
            )

        return list(islice(tokens_after(model, [7, 3, 5], choose, window=window), num_tokens))

    cached = written_tokens()
    model.decoder = lambda max_tokens: LanguageModel.decoder(model, max_tokens)
    assert cached == written_tokens()
    assert len(set(cached)) > (3 if temperature == 0 else 50), sorted(set(cached))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "make", [metaspace, wordpiece, None], ids=["metaspace", "wordpiece", "bytes"]
)
def test_a_long_text_is_streamed_as_it_is_decoded_whole(make, seed):
    """Though ids long past are forgotten."""
    tokenizer = parse_tokenizer(make().to_str(), "tokenizer.json") if make else ByteTokenizer()
    draw = random.Random(seed)
    words = [
        draw.choice(["the", "cats", "sat", "\u65e5\u672c\u8a9e", "\U0001f642", "on", "mat."])
        for _ in range(400)
    ]
    ids, before = tokenizer.encode(" ".join(words)), tokenizer.encode("the mat") if seed % 2 else []
    text = generate._WrittenText(tokenizer, before)
    pieces = [text.take(token) for token in ids]
    whole = tokenizer.decode(before) + "".join(pieces) + text.rest()
    assert whole == tokenizer.decode([*before, *ids])
    assert len(text._ids) <= 2 * generate.KEPT_IDS


def test_bytes_that_are_no_text_are_marked_where_they_stand():
    draw = random.Random(1)
    ids = [draw.choice([*range(256), 65, 66, 0xC3, 0xA9, 0xF0, 0x9F]) for _ in range(2000)]
    text = generate._WrittenText(ByteTokenizer(), [])
    assert "".join(text.take(token) for token in ids) + text.rest() == bytes(ids).decode(
        errors="replace"
    )
