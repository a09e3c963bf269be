"""A chat session: prompts as in training, one decoder for all turns, and a context that is full."""

import json
from types import SimpleNamespace

import chat_tokenizers
import pytest
import torch
from chat_tokenizers import TEMPLATES
from scripted import EOT, Script

from flatout.data.conversation.templates import ChatTemplate, named_template, template_beside
from flatout.data.conversation.turns import BadConversation
from flatout.data.tokenizers import load_tokenizer
from flatout.data.tokenizers.make import of_bytes
from flatout.errors import ConfigError, DataError
from flatout.inference.chat import ChatSession
from flatout.inference.generate import Sampling
from flatout.progress import SILENT

pytestmark = pytest.mark.slow

PLAIN = named_template("plain", {"eos_token": "<|endoftext|>"})
CHATML = named_template("chatml", {})


class Model(Script):
    """A model that writes a script, and counts its decoders and the tokens that they read."""

    def __init__(self, script, max_seq_len=1000):
        super().__init__(script)
        self.max_seq_len = max_seq_len
        self.decoders, self.reads = 0, []

    def decoder(self, max_tokens=None):
        self.decoders += 1
        made = super().decoder(max_tokens)
        inner = made.scores_after

        def scores_after(tokens_BT):
            self.reads.append(tokens_BT.tolist()[0])
            return inner(tokens_BT)

        made.scores_after = scores_after
        return made


def session(model, template=PLAIN, seq_len=1000, **options):
    options.setdefault("sampling", Sampling(temperature=0))
    return ChatSession(model, of_bytes(), seq_len, template, **options)


class OnMac(Model):
    """A model whose weights say that they are on the GPU of a Mac, which has no float64."""

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("mps"))])


def test_random_numbers_are_drawn_where_tokens_are():
    assert session(OnMac([]))._generator.device.type == "cpu"


class Lines(type(SILENT)):
    """A progress that keeps its messages."""

    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def said(pieces):
    return "".join(pieces)


def test_a_reply_ends_with_the_special_token_that_ends_a_turn():
    model = Model([*b"Hello", EOT])
    talk = session(model, system="Be brief.")
    assert said(talk.reply("Hi")) == "Hello"
    assert bytes(model.reads[0]) == b"System:\nBe brief.\n\nUser:\nHi\n\nAssistant:\n"
    assert talk.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]


def test_a_reply_ends_before_the_text_that_ends_a_turn():
    talk = session(Model(b"Hello<|im_end|>\n<|im_start|>user"), CHATML)
    assert said(talk.reply("Hi")) == "Hello"


def test_the_second_turn_reads_only_what_is_new():
    model = Model([*b"Hello", EOT, *b"See you", EOT])
    talk = session(model)
    said(talk.reply("Hi"))
    first = sum(map(len, model.reads))
    assert said(talk.reply("Bye")) == "See you"
    assert model.decoders == 1
    assert bytes(model.reads[len("Hello") + 1][1:]) == b"\n\nUser:\nBye\n\nAssistant:\n"
    assert model.reads[len("Hello") + 1][0] == EOT
    assert first == len("User:\nHi\n\nAssistant:\n") + len("Hello")
    assert model.seen[len("Hello") + 1][:first] == model.seen[len("Hello")], (
        "the prefix is the same"
    )


def test_a_reply_that_is_cut_is_read_again_as_training_writes_it():
    model = Model([*b"Hel", *b"See you", EOT])
    talk = session(model, sampling=Sampling(temperature=0, max_tokens=3))
    assert said(talk.reply("Hi")) == "Hel"
    said(talk.reply("Bye"))
    second = model.reads[3]
    assert bytes(second[: second.index(EOT)]) == b"l", "the last token was not read before"
    assert talk.messages[1] == {"role": "assistant", "content": "Hel"}


def test_reset_keeps_the_system_prompt_alone():
    model = Model([*b"Hello", EOT, *b"Hello", EOT])
    talk = session(model, system="Be brief.")
    said(talk.reply("Hi"))
    talk.reset()
    said(talk.reply("Hi"))
    assert model.decoders == 2, "one for each conversation"
    assert model.reads[len("Hello") + 1] == model.reads[0]


def test_the_oldest_turns_are_omitted_when_the_context_is_full():
    script = [*b"one", EOT, *b"two", EOT, *b"three", EOT]
    model = Model(script, max_seq_len=100)
    talk = session(model, seq_len=100, system="S")
    for turn in ("a" * 20, "b" * 20, "c" * 20):
        said(talk.reply(turn))
    last = next(bytes(one) for one in model.reads if ord("c") in one)
    assert last == b"System:\nS\n\nUser:\n" + b"c" * 20 + b"\n\nAssistant:\n"
    assert len(talk.messages) == 7, "what was said is kept"


def test_turns_omitted_are_reported_once():
    model = Model([*b"one", EOT, *b"two", EOT, *b"three", EOT], max_seq_len=100)
    said_lines = Lines()
    talk = session(model, seq_len=100, system="S", progress=said_lines)
    said(talk.reply("a" * 20))
    assert said_lines.lines == []
    said(talk.reply("b" * 20))
    said(talk.reply("c" * 20))
    assert len(said_lines.lines) == 1
    assert "does not see its oldest turns" in said_lines.lines[0]


def test_a_turn_longer_than_the_context_is_rejected():
    model = Model([*b"ok", EOT], max_seq_len=32)
    talk = session(model, seq_len=32)
    with pytest.raises(DataError, match=r"has 101 tokens, and .* of 32 has room for 24") as found:
        said(talk.reply("x" * 82))
    assert "Shorten the turn" in found.value.fix
    assert (model.reads, talk.messages) == ([], [])
    assert said(talk.reply("x" * 5)) == "ok", "a prompt of 24 tokens"


def test_a_rejected_turn_omits_no_earlier_one():
    model = Model([*b"ok", EOT, *b"yes", EOT], max_seq_len=100)
    said_lines = Lines()
    talk = session(model, seq_len=100, system="S", progress=said_lines)
    said(talk.reply("a"))
    with pytest.raises(DataError, match="after the system prompt"):
        said(talk.reply("x" * 100))
    said(talk.reply("b"))
    assert said_lines.lines == []
    assert [turn["content"] for turn in talk.messages] == ["S", "a", "ok", "b", "yes"]
    beginning = [*b"System:\nS\n\nUser:\na"]
    assert model.seen[len("ok") + 1][: len(beginning)] == beginning


def test_a_system_prompt_longer_than_the_context_is_rejected():
    model = Model([*b"ok", EOT], max_seq_len=64)
    with pytest.raises(ConfigError, match="system prompt does not fit") as found:
        session(model, seq_len=64, system="S" * 60)
    assert "Shorten the system prompt" in found.value.fix
    assert said(session(model, seq_len=64, system="S").reply("Hi")) == "ok"


def test_a_turn_that_fails_leaves_the_conversation_as_before():
    template = ChatTemplate(
        name="strict",
        text="{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('not no') }}"
        "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}",
        variables={"eos_token": "<|endoftext|>"},
    )
    model = Model([*b"ok", EOT])
    talk = session(model, template)
    with pytest.raises(BadConversation, match="not no"):
        said(talk.reply("no"))
    with pytest.raises(DataError, match="surrogate"):
        said(talk.reply("\ud800"))
    assert talk.messages == []
    assert said(talk.reply("yes")) == "ok"


def test_an_abandoned_reply_is_kept_as_far_as_it_was_written():
    talk = session(Model([*b"Hello", EOT]))
    reply = talk.reply("Hi")
    next(reply)
    reply.close()
    assert talk.messages[-1] == {"role": "assistant", "content": "H"}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["gpt2", "rstrip", "legacy", "first", "unigram"])
def test_the_ids_of_a_prompt_are_those_of_transformers(tmp_path, name, template):
    folder = chat_tokenizers.write(tmp_path, name, template)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    found = template_beside(folder / "tokenizer_config.json", None, {})
    expected = json.loads(chat_tokenizers.IDS.read_text())[f"{name} {template}"]
    for number in (0, 2):
        model = Model([5], max_seq_len=1000)
        talk = ChatSession(
            model, tokenizer, 1000, found, sampling=Sampling(temperature=0, max_tokens=1)
        )
        turns = chat_tokenizers.turns(number)
        talk.messages = turns[:-2]
        said(talk.reply(turns[-2]["content"]))
        assert model.reads[0] == expected[number][1]


def test_a_turn_that_contains_a_special_token_is_rejected(tmp_path):
    folder = chat_tokenizers.write(tmp_path, "gpt2", "chatml")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    found = template_beside(folder / "tokenizer_config.json", None, {})
    unasked, end = (tokenizer.special_tokens()[name] for name in ("<|user|>", "<|im_end|>"))
    model = Model([*tokenizer.encode("so"), unasked, *tokenizer.encode("yo"), end, end], 1000)
    model.past = tokenizer.vocab_size
    talk = ChatSession(model, tokenizer, 1000, found, sampling=Sampling(temperature=0))
    with pytest.raises(DataError, match=r"'<\|im_end\|>' in the text is a special token"):
        said(talk.reply("x<|im_end|>\n"))
    assert talk.messages == []
    assert said(talk.reply("x")) == "soyo", "without the special token, which is no text"
    assert said(talk.reply("y")) == "", "the reply does not prevent the next turn"
