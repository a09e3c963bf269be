"""Conversations and prompts have the ids that transformers gives for their whole text."""

import json
from functools import partial

import chat_tokenizers
import pytest
from chat_tokenizers import CONVERSATIONS, IDS, NAMES, TEMPLATES
from prepared import prepared, write_rows

from flatout.data.store.shards import Dataset
from flatout.errors import DataError

EXPECTED = json.loads(IDS.read_text())
KNOWN = chat_tokenizers.tokenizers()
TARGETS = {
    "gpt2 chatml": ["Yo <|im_end|>", "ĊĊ Ċ so <|im_end|> Ġ you Ġso Ġ < 3 <|im_end|>"],
    "gpt2 llama2": ["Ġ Yo Ġ </s>", "Ġso Ġ </s> Ġ you Ġso Ġ < 3 Ġ </s>"],
    "rstrip phi": ["Yo <|end|>", "so <|end|> you Ġso Ġ < 3 <|end|>"],
    "lstrip llama2": ["Ġ Yo </s>", "Ġso </s> Ġ you Ġso Ġ < 3 </s>"],
    "prefix_space phi": ["Yo <|end|>", "ĊĊ Ċ so <|end|> Ġ you Ġso Ġ < 3 <|end|>"],
    "legacy llama2": ["▁ Yo ▁ </s>", "▁so ▁ </s> ▁ you ▁so ▁ < 3 ▁ </s>"],
    "legacy_rstrip phi": ["▁ Yo <|end|>", "▁so <|end|> ▁ you ▁so ▁ < 3 <|end|>"],
    "unigram chatml": ["Yo <|im_end|>", "\n\n so <|im_end|> ▁you ▁so ▁ < 3 <|im_end|>"],
    "first chatml": ["Yo <|im_end|>", "\n\n \n so <|im_end|> ▁ you ▁so ▁ < 3 <|im_end|>"],
    "first text": ["Yo ▁ E N <0x44>", "\n\n so ▁ E N <0x44> ▁▁ you ▁so ▁ < 3 ▁ E N <0x44>"],
    "always phi": ["Yo <|end|>", "\n\n \n so <|end|> ▁ you ▁so ▁ < 3 <|end|>"],
}
"""What the loss counts in the first two conversations: every token with a character of an answer,
or of what ends it.
"""


def documents(tmp_path, tokenizer, rows, **options):
    """Prepare rows, and return the ids and the mask of each."""
    path = write_rows(tmp_path / "rows.jsonl", rows)
    val = write_rows(tmp_path / "val.jsonl", rows[:1])
    options |= {"tokenizer": str(tokenizer), "val": (str(val),)}
    split = Dataset.open(prepared(path, out=tmp_path / "out", **options).path).split("train")
    ends = split.document_ends.tolist()
    return [
        (split.read_tokens(*span).tolist(), split.read_mask_range(*span).tolist())
        for span in zip([0, *ends[:-1]], ends, strict=True)
    ]


def conversations():
    return [{"messages": chat_tokenizers.turns(number)} for number in range(len(CONVERSATIONS))]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", KNOWN)
def test_the_ids_of_conversations_are_those_of_transformers(tmp_path, name, template):
    folder = chat_tokenizers.write(tmp_path / "hf", name, template)
    found = documents(tmp_path, folder, conversations(), chat="auto")
    end = KNOWN[name].token_to_id("</s>")
    for (ids, _), (expected, _) in zip(found, EXPECTED[f"{name} {template}"], strict=True):
        assert ids == [*expected, *[end] * (expected[-1] != end)]


@pytest.mark.parametrize("case", TARGETS)
def test_the_loss_counts_every_token_of_an_answer(tmp_path, case):
    name, template = case.split()
    folder = chat_tokenizers.write(tmp_path / "hf", name, template)
    found = documents(tmp_path, folder, conversations()[:2], chat="auto")
    token = KNOWN[name].id_to_token
    shown = [
        " ".join(token(index) for index, counts in zip(ids, mask, strict=True) if counts)
        for ids, mask in found
    ]
    assert shown == TARGETS[case]


MASKED = [("yo", "u"), ("you", " so"), ("\n", "\nso"), ("Yo ", " you"), ("é", "日"), ("", "so")]


@pytest.mark.parametrize("name", KNOWN)
def test_a_prompt_and_its_text_have_the_ids_of_both_together(tmp_path, name):
    rows = [{"question": prompt, "text": text} for prompt, text in MASKED]
    folder = chat_tokenizers.write(tmp_path / "hf", name, "text")
    found = documents(tmp_path, folder, rows, mask_field="question")
    theirs = KNOWN[name]
    for (ids, mask), (prompt, text) in zip(found, MASKED, strict=True):
        expected = theirs.encode(prompt + text, add_special_tokens=False)
        assert ids == [*expected.ids, theirs.token_to_id("</s>")]
        assert mask == [*(int(stop > len(prompt)) for _, stop in expected.offsets), 1]


@pytest.mark.parametrize("name", ["gpt2", "rstrip", "legacy", "unigram", "first"])
def test_a_special_token_in_a_turn_is_a_bad_row_with_its_cause(tmp_path, name):
    folder = chat_tokenizers.write(tmp_path / "hf", name, "chatml")
    rows = conversations()
    for number, (question, answer) in enumerate(
        [("<|im_end|>", "so"), ("so", "so</s>"), ("x <|end|> y", "so")]
    ):
        turns = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        rows.insert(2 * number + 1, {"messages": turns})
    prepare = partial(documents, tmp_path, folder, rows, chat="auto")
    with pytest.raises(DataError, match=r"line 2 contains a special token: '<\|im_end\|>' in"):
        prepare()
    found = prepare(on_bad_row="skip")
    assert [ids[: len(ids) - 1] for ids, _ in found] == [
        ids for ids, _ in EXPECTED[f"{name} chatml"]
    ]
    (skipped,) = Dataset.open(tmp_path / "out").manifest.skipped
    assert (skipped.reason, skipped.count) == ("contains a special token", 3)


@pytest.mark.parametrize("name", KNOWN)
def test_a_special_token_in_a_document_is_text(tmp_path, name):
    folder = chat_tokenizers.write(tmp_path / "hf", name, "chatml")
    rows = write_rows(tmp_path / "rows.jsonl", [f"so{special} yo" for special in NAMES])
    train = write_rows(tmp_path / "train.jsonl", ["so"])
    made = prepared(train, out=tmp_path / "out", tokenizer=str(folder), val=(str(rows),))
    split = Dataset.open(made.path).split("val")
    special = {KNOWN[name].token_to_id(each) for each in NAMES}
    tokens = split.read_tokens(0, split.num_tokens).tolist()
    end = KNOWN[name].token_to_id("</s>")
    assert [index for index in tokens if index in special] == [end] * len(NAMES)
