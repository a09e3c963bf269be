"""Datasets of conversations: exact masks, whole conversations, and the stored template."""

import copy
import json
import re
from collections import Counter

import numpy as np
import pytest
from conversations import conversation, write_conversations, write_tokenizer
from prepared import write_rows

from flatout.data.conversation.templates import stored_template
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.store.shards import Dataset
from flatout.errors import DataError, OutputInUse


@pytest.fixture
def rows(tmp_path):
    return write_conversations(tmp_path / "chat.jsonl")


def prepared(rows, tmp_path, out="out", **options):
    options = {"tokenizer": "byte", "chat": "auto", "split": "tail 0.2"} | options
    return prepare_dataset([str(rows)], tmp_path / out, Options(**options), workers=1)


def shown(folder, name="train", index=0):
    """Return a document's text, with what the loss counts in «», and special ids in []."""
    dataset = Dataset.open(folder)
    split, tokenizer = dataset.split(name), dataset.tokenizer
    starts = [0, *split.document_ends[:-1]]
    start, stop = starts[index], split.document_ends[index]
    mask = split.read_mask_range(start, stop)
    special = {index: f"[{name}]" for name, index in tokenizer.special_tokens().items()}
    text, counts = "", False
    for token, is_target in zip(split.read_tokens(start, stop).tolist(), mask, strict=True):
        if is_target != counts:
            text += "«" if is_target else "»"
            counts = is_target
        text += special.get(token) or tokenizer.decode([token])
    return text + ("»" if counts else "")


def test_the_plain_template_counts_each_answer_and_its_end_of_text(rows, tmp_path):
    made = prepared(rows, tmp_path)
    assert shown(made.path) == (
        "System:\nBe brief.\n\nUser:\nWhat is 0 plus 0?\n\nAssistant:\n«It is 0.[<|endoftext|>]»"
        "\n\nUser:\nWhat is 0 plus 1?\n\nAssistant:\n«It is 1.[<|endoftext|>]»"
    ), "the last end of a turn is the document's end-of-text"
    assert stored_template(made.manifest.source).name == "plain"


def test_the_tokenizers_own_template_counts_each_answer_and_its_special_token(rows, tmp_path):
    made = prepared(rows, tmp_path, tokenizer=str(write_tokenizer(tmp_path / "hf")))
    assert shown(made.path) == (
        "[<|im_start|>]system\nBe brief.[<|im_end|>]\n"
        "[<|im_start|>]user\nWhat is 0 plus 0?[<|im_end|>]\n"
        "[<|im_start|>]assistant\n«It is 0.[<|im_end|>]»\n"
        "[<|im_start|>]user\nWhat is 0 plus 1?[<|im_end|>]\n"
        "[<|im_start|>]assistant\n«It is 1.[<|im_end|>]»\n[<|im_end|>]"
    )
    template = stored_template(made.manifest.source)
    assert template.name == "tokenizer_config.json"
    assert template.variables["eos_token"] == "<|im_end|>"


def test_tokens_equal_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "hf")
    made = prepared(write_conversations(tmp_path / "c.jsonl"), tmp_path, tokenizer=str(folder))
    split = Dataset.open(made.path).split("train")
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversation(0)["messages"], tokenize=True, return_dict=False
    )
    assert split.read_tokens(0, split.document_ends[0] - 1).tolist() == expected


@pytest.mark.parametrize("tokenizer", ["char", "train:300"])
def test_a_tokenizer_is_trained_on_the_rendered_text(rows, tmp_path, tokenizer):
    made = prepared(rows, tmp_path, tokenizer=tokenizer)
    assert "Assistant:\n«It is 0.[<|endoftext|>]»" in shown(made.path)
    if tokenizer == "char":
        assert "|" not in Dataset.open(made.path).tokenizer.vocabulary, (
            "special tokens are not text"
        )


def test_a_token_may_span_the_start_of_an_answer(tmp_path):
    texts = [f"{letter}n answer" for letter in "aeiou" * 30]
    asked = {"role": "user", "content": "say\n\n"}
    answers = ({"role": "assistant", "content": f"\n\n{text}"} for text in texts)
    rows = write_rows(
        tmp_path / "rows.jsonl", ({"messages": [asked, answer]} for answer in answers)
    )
    made = prepared(rows, tmp_path, tokenizer="train:300")
    assert shown(made.path).endswith("Assistant:«\n\n\nan answer[<|endoftext|>]»"), (
        "the loss counts a token with any character of the answer"
    )
    known = Dataset.open(made.path).tokenizer
    split = Dataset.open(made.path).split("train")
    tokens = split.read_tokens(0, split.document_ends[0]).tolist()
    text = "User:\nsay\n\n\n\nAssistant:\n\n\nan answer"
    assert tokens == [*known.encode(text), known.eot_id]


def test_text_bytes_are_those_of_the_answers(tmp_path):
    made = prepared(write_conversations(tmp_path / "c.jsonl", count=10, turns=1), tmp_path)
    assert made.manifest.text_bytes == 10 * len("It is 0.")


@pytest.mark.parametrize("split", ["tail 0.001", "tail 0.999", "tail 0.5", "hash 0.5"])
def test_a_conversation_is_never_cut(rows, tmp_path, split):
    made = prepared(rows, tmp_path, split=split)
    documents = [entry.documents for entry in made.manifest.splits.values()]
    assert sum(documents) == 20
    assert min(documents) > 0
    assert made.manifest.cut_documents == 0
    assert shown(made.path, "val").startswith("System:\nBe brief.")


def test_rows_of_parquet_give_the_same_tokens(rows, tmp_path):
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    tagged = [row | {"id": index} for index, row in enumerate(found)]
    parquet.write_table(pyarrow.Table.from_pylist(tagged), tmp_path / "rows.parquet")
    one = prepared(rows, tmp_path)
    other = prepared(tmp_path / "rows.parquet", tmp_path, "other")
    for split in ("train", "val"):
        first, second = (Dataset.open(made.path).split(split) for made in (one, other))
        assert np.array_equal(
            first.read_tokens(0, first.num_tokens), second.read_tokens(0, second.num_tokens)
        )
        assert np.array_equal(
            first.read_mask_range(0, first.num_tokens), second.read_mask_range(0, second.num_tokens)
        )


def test_a_template_that_fails_for_a_row_is_a_bad_row(rows, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{{ eos_token }}"
        "{% if '7 plus' in m.content %}{{ m.missing.deeper }}{% endif %}{% endfor %}"
    )
    with pytest.raises(
        DataError, match=r"line 8 cannot be rendered: The chat template mine\.jinja"
    ):
        prepared(rows, tmp_path, chat=str(template))
    made = prepared(rows, tmp_path, chat=str(template), on_bad_row="skip")
    # 17 plus 0 contains "7 plus" too
    assert {entry.reason: entry.count for entry in made.manifest.skipped} == {
        "the chat template fails": 2
    }


def test_another_template_is_another_dataset(rows, tmp_path):
    prepared(rows, tmp_path)
    assert prepared(rows, tmp_path).existed
    with pytest.raises(OutputInUse, match="chat_template is 'plain', and 'chatml' is requested"):
        prepared(rows, tmp_path, chat="chatml")
    with pytest.raises(OutputInUse, match="chat_template is 'plain', and None is requested"):
        prepared(rows, tmp_path, chat=None, text_field="id")


def answers(tmp_path, *flags):
    """Return what the loss counts of the answers bad and good. `flags` are rows of the first."""
    turns = ({"role": "assistant", "content": "bad"} | flag for flag in flags)
    question, good = ({"role": role, "content": role} for role in ("user", "assistant"))
    found = ({"messages": [question, turn, question, good]} for turn in turns)
    rows = write_rows(tmp_path / "rows.jsonl", found)
    val = write_conversations(tmp_path / "val.jsonl", count=1)
    made = prepared(rows, tmp_path, split=None, val=(str(val),))
    texts = (shown(made.path, index=index) for index in range(len(flags)))
    return [re.findall("«(.*?)\\[", text) for text in texts]


@pytest.mark.parametrize(
    "flag",
    [
        *({name: no} for name in ("weight", "loss_weight") for no in (0, 0.0)),
        *({name: no} for name in ("train", "training", "trainable", "loss") for no in (False, 0)),
        *({"masked": yes} for yes in (True, 1)),
        {"train": True, "weight": 0},
    ],
    ids=str,
)
def test_a_turn_that_its_row_excludes_does_not_count(tmp_path, flag):
    (name, value), *_ = flag.items()
    included = {name: not value} if len(flag) == 1 else {}
    assert answers(tmp_path, flag, included, {name: None}) == [
        ["assistant"],
        ["bad", "assistant"],
        ["bad", "assistant"],
    ]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ({"mask": 0}, "line 1 has 'mask' in turn 2, which is not read: in some files"),
        ({"loss_mask": 0}, "line 1 has 'loss_mask' in turn 2, which is not read: it selects"),
        ({"ignore": True}, "line 1 has 'ignore' in turn 2, which is not read: in some files"),
        ({"train_detail": [{"train": False}]}, "has 'train_detail' in turn 2"),
        ({"loss": 0.25}, "has the loss 0.25 in turn 2"),
        ({"train": "no"}, "has the train 'no' in turn 2"),
    ],
    ids=str,
)
def test_a_field_that_may_exclude_a_turn_is_rejected_by_name(tmp_path, flag, said):
    with pytest.raises(DataError, match=said):
        answers(tmp_path, flag)


MASK_FIELDS = ["weight", "loss_weight", "loss", "train", "training", "trainable", "masked"]
MASK_FIELDS += ["mask", "loss_mask", "ignore", "train_detail"]
PARTS, ASKS = "in a content part", "in a turn that is not the assistant's"


def with_flag(row, flag, role):
    """Return a row with a field in its turn of a role, or in a content part of it."""
    row = copy.deepcopy(row)
    (turn,) = (turn for turn in row["messages"] if turn["role"] == role.removesuffix(" part"))
    if role.endswith("part"):
        turn["content"] = [{"type": "text", "text": turn["content"]} | flag]
    else:
        turn |= flag
    return row


ONE = conversation(0, turns=1)
ALPACA = {"instruction": "What is 0 plus 0?", "output": "It is 0."}
TRL = {"prompt": ONE["messages"][:2], "completion": ONE["messages"][2:]}
NO = [({name: no}, name) for name in MASK_FIELDS[:6] for no in (0, False, [0, 1])]
NO += [({"masked": True}, "masked"), ({"loss_mask": [0, 1]}, "loss_mask")]
NO += [({name: 1}, name) for name in ("mask", "ignore", "train_detail")]
PLACED = [
    *((row | flag, f"{name!r} beside the turns") for flag, name in NO for row in (ONE, ALPACA)),
    (TRL | {"train": False}, "'train' beside the turns"),
    *((with_flag(ONE, {name: 0}, "assistant part"), f"{name!r} {PARTS}") for name in MASK_FIELDS),
    *(
        (with_flag(ONE, {name: yes}, role), f"{name!r} {ASKS}")
        for name in ("train", "training", "trainable", "loss")
        for role, yes in (("user", True), ("system", 1))
    ),
]


def test_fields_that_may_exclude_text_in_other_places_make_rows_bad_by_name(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [*(row for row, _ in PLACED), ONE])
    val = (str(write_conversations(tmp_path / "val.jsonl", count=1)),)
    made = prepared(rows, tmp_path, on_bad_row="skip", max_bad_rows=200, split=None, val=val)
    counts = {entry.reason: entry.count for entry in made.manifest.skipped}
    assert counts == Counter(reason for _, reason in PLACED)
    assert made.manifest.splits["train"].documents == 1


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ONE | {"loss_mask": [0, 1]}, "has 'loss_mask' beside the turns, which is not read"),
        (with_flag(ONE, {"train": 0}, "assistant part"), "has 'train' in a content part, which"),
        (
            with_flag(ONE, {"loss": True}, "user"),
            "has 'loss' in turn 2, but only assistant turns count",
        ),
    ],
    ids=["row", "part", "user"],
)
def test_a_misplaced_field_is_named(tmp_path, row, said):
    with pytest.raises(DataError, match=f"line 1 {said}"):
        prepared(write_rows(tmp_path / "rows.jsonl", [row]), tmp_path)


def test_fields_that_exclude_nothing_go_on(tmp_path):
    yes = [{name: 1} for name in (*MASK_FIELDS[:6], "loss_mask")]
    yes += [{"train": True}, {"masked": False}, {"ignore": None, "weight": None}]
    found = [row | flag for flag in yes for row in (ONE, ALPACA)]
    found += [
        with_flag(ONE, {"train": False}, "user"),
        with_flag(ONE, {"train": None}, "user part"),
    ]
    rows = write_rows(tmp_path / "rows.jsonl", found)
    val = (str(write_conversations(tmp_path / "val.jsonl", count=1)),)
    made = prepared(rows, tmp_path, split=None, val=val)
    texts = [shown(made.path, index=index) for index in range(len(found))]
    assert {re.findall("«(.*?)\\[", text)[0] for text in texts} == {"It is 0."}


def test_a_column_beside_the_turns_of_a_table_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([ONE | {"train": False}])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="has 'train' beside the turns"):
        prepared(tmp_path / "rows.parquet", tmp_path)


CALLS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson }}"
    "{{ m.content }}<|endoftext|>{% endfor %}"
)
TOOL_ROWS = [
    {
        "messages": [
            {"role": "user", "content": "please", "tool_calls": None, "name": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
            },
        ],
        "tools": [{"function": {"name": name, "parameters": {"properties": properties}}}],
    }
    for name, arguments, properties in (
        ("clock", {"zone": "UTC"}, {"zone": {"type": "string", "default": None}}),
        ("weather", {"city": "Rome", "days": [1, None]}, {"city": {"type": "string"}}),
    )
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text", "texts"])
def test_nulls_that_a_table_format_adds_do_not_reach_the_text(tmp_path, kind):
    template = tmp_path / "calls.jinja"
    template.write_text(CALLS.replace("m.tool_calls", "(m.tool_calls or [])"))
    found = copy.deepcopy(TOOL_ROWS)
    for row, absent in zip(found, ("city", "zone"), strict=True):
        (function,) = (call["function"] for call in row["messages"][1]["tool_calls"])
        properties = row["tools"][0]["function"]["parameters"]["properties"]
        if kind in ("text", "texts"):
            function["arguments"] = json.dumps(function["arguments"])
            texts = [json.dumps(tool) for tool in row["tools"]]
            row["tools"] = texts if kind == "texts" else f"[{', '.join(texts)}]"
        else:
            function["arguments"][absent] = properties[absent] = None
    rows = tmp_path / f"rows.{'parquet' if kind == 'parquet' else 'jsonl'}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(found), rows)
    else:
        write_rows(rows, found)
    val = write_rows(tmp_path / "val.jsonl", [conversation(0)])
    made = prepared(rows, tmp_path, chat=str(template), split=None, val=(str(val),))
    assert shown(made.path, index=0).replace("null", "") == (
        '[{"function": {"name": "clock", "parameters": {"properties": {"zone": {"type": "string", '
        '"default": }}}}}]user[]please[<|endoftext|>]«assistant'
        '[{"function": {"name": "clock", "arguments": {"zone": "UTC"}}}][<|endoftext|>]»'
    )
    assert '{"name": "weather", "arguments": {"city": "Rome", "days": [1, null]}}' in shown(
        made.path, index=1
    )


def test_rows_that_a_template_rejects_are_counted_by_its_sentences(rows, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if '1 plus' in m.content %}{{ raise_exception('No ones!') }}"
        "{% elif '2 plus' in m.content %}{{ raise_exception('No twos.') }}"
        "{% elif '3' in m.content %}{{ raise_exception('Not ' + m.content) }}{% endif %}"
        "{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    made = prepared(rows, tmp_path, chat=str(template), on_bad_row="skip")
    counts = {entry.reason: entry.count for entry in made.manifest.skipped}
    start = "rejected by the chat template: "
    assert counts[f"{start}No ones!"] == counts[f"{start}No twos"] == 2
    assert counts[f"{start}Not What is 3 plus 0?"] == 1
    many = write_conversations(tmp_path / "many.jsonl", count=100, turns=1)
    template.write_text(
        "{% for m in messages %}{% if '10 plus' not in m.content and 'plus' in m.content %}"
        "{{ raise_exception(m.content) }}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    val = (str(write_conversations(tmp_path / "val.jsonl", count=11)),)
    made = prepared(
        many,
        tmp_path,
        "many",
        chat=str(template),
        on_bad_row="skip",
        max_bad_rows=200,
        split=None,
        val=val,
    )
    counts = {entry.reason: entry.count for entry in made.manifest.skipped}
    assert sum(counts.values()) == 109
    assert len(counts) == 31
    assert counts[start.removesuffix(": ")] == 69, "after 30 sentences"


def test_a_call_whose_arguments_a_table_padded_with_null_has_none(tmp_path):
    template = tmp_path / "calls.jinja"
    template.write_text(CALLS.replace("m.tool_calls", "(m.tool_calls or [])"))
    found = copy.deepcopy(TOOL_ROWS)
    found[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] = None
    rows = write_rows(tmp_path / "rows.jsonl", found)
    val = write_rows(tmp_path / "val.jsonl", [conversation(0)])
    made = prepared(rows, tmp_path, chat=str(template), split=None, val=(str(val),))
    assert '[{"function": {"name": "clock", "arguments": {}}}]' in shown(made.path, index=0)


def test_a_template_that_ends_turns_with_one_character_is_told_so(rows, tmp_path):
    template = tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    with pytest.raises(DataError, match="writes only ';' after an assistant's turn"):
        prepared(rows, tmp_path, chat=str(template))
