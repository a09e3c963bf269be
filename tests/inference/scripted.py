"""A model that generates a given text, and tokenizers whose tokens depend on their neighbours."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from flatout.data.tokenizers import parse_tokenizer
from flatout.data.tokenizers.make import of_bytes
from flatout.models.language_model import RecomputingDecoder

EOT = of_bytes().eot_id
SPACED = ["\u2581the", "\u2581cat", "\u2581sat", "\u2581on", "\u2581mat", "s", "."]


class Script(nn.Module):
    """A model that generates one given text; `noise` makes it less certain."""

    def __init__(
        self, text, noise: float = 0.0, vocab_size: int = 300, eot: int = EOT, past: int = EOT + 1
    ) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.max_seq_len = 8
        self.ids = [*text, eot]
        self.noise, self.vocab_size, self.past, self.seen = noise, vocab_size, past, []

    def decoder(self, max_tokens=None):
        return RecomputingDecoder(
            self.next_logits, min(max_tokens or self.max_seq_len, self.max_seq_len)
        )

    def next_logits(self, tokens_BT):
        self.seen.append(tokens_BT.tolist()[0])
        logits_BV = torch.zeros(1, self.vocab_size)
        logits_BV[0, self.ids[len(self.seen) - 1]] = 1 / self.noise if self.noise else 1e9
        logits_BV[0, self.past :] = 1e9 if not self.noise else 50.0
        return logits_BV


def metaspace():
    """Return a tokenizer like Llama 2's: words start with U+2581, other text is bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *SPACED, "\u2581"]
    vocabulary = [(piece, -1.0) for piece in pieces]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    made.add_special_tokens(["<unk>", "</s>"])
    return parse_tokenizer(made.to_str(), "tokenizer.json")


def wordpiece():
    """Return a tokenizer like BERT's: words are split at spaces, which no token contains."""
    pieces = ["[UNK]", "[EOS]", "the", "cat", "sat", "on", "mat", "##s", "."]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]", "[EOS]"])
    return parse_tokenizer(made.to_str(), "tokenizer.json")
