"""Keys about the data become options of the `flatout prepare` that `flatout convert` prints."""

from __future__ import annotations

import pytest

from flatout.config.convert import convert

CHAT = {"datasets": [{"path": "ORG/Talks", "type": "chat_template"}]}
TALKS = {"SOURCE": "hub:ORG/Talks"}
TWO = {"datasets": [{"path": "a"}, {"path": "b"}]}


def found_of(document):
    return convert(document, [])


def item_of(found, key):
    (item,) = [item for item in found.items if item.key == key]
    return item


@pytest.mark.parametrize(
    ("document", "options"),
    [
        ({"val_set_size": 0.1}, {"--split": "hash 0.1"}),
        ({"test_size": "0.05"}, {"--split": "hash 0.05"}),
        (CHAT, TALKS | {"--chat": "auto"}),
        (CHAT | {"chat_template": "chatml"}, TALKS | {"--chat": "chatml"}),
        (CHAT | {"chat_template": "tokenizer_default"}, TALKS | {"--chat": "auto"}),
        (
            {"datasets": [{"path": "ORG/T", "type": "completion", "field": "body"}]},
            {"SOURCE": "hub:ORG/T", "--text-field": "body"},
        ),
        (
            {"datasets": [{"path": "in/talks.jsonl", "type": "sharegpt"}]},
            {"SOURCE": "in/talks.jsonl", "--chat": "auto"},
        ),
        (TWO | {"test_size": 0.1}, {"--split": "hash 0.1"}),
        ({"subset_size": 100, "num_proc": 4}, {"--max-documents": 100, "--workers": 4}),
        ({"tokenizer": "gpt2"}, {"--tokenizer": "openai-community/gpt2"}),
        ({"dedup": True}, {"--duplicates": "drop"}),
        ({"json_keys": ["text"]}, {"--text-field": "text"}),
        ({"prompt_column": "ask"}, {"--mask-field": "ask"}),
        ({"data_dir": "data/web"}, {}),
        ({"tokenizer_dir": "checkpoints/ORG/Small"}, {"--tokenizer": "ORG/Small"}),
        ({"datasets": [each | {"type": "chat"} for each in TWO["datasets"]]}, {"--chat": "auto"}),
        ({"datasets": [{"path": "a", "type": "chat"}, {"path": "b"}]}, {}),
        ({"dataset_name": "ORG/T"}, {"SOURCE": "hub:ORG/T"}),
        ({"dataset_name": "ORG/T", "dataset_config_name": "x"}, {"SOURCE": "hub:ORG/T:config=x"}),
        ({"dataset_name": "wikitext", "dataset_config_name": "wikitext-2-raw-v1"}, {}),
        ({"dataset": "fineweb"}, {}),
        ({"dataset": "finewebedu"}, {"SOURCE": "fineweb-edu-10bt"}),
    ],
)
def test_keys_about_the_data_become_options(document, options):
    found = found_of(document)
    assert found.options == options
    assert not any(key.startswith(("--", "SOURCE")) for key in found.values)


@pytest.mark.parametrize(
    ("document", "key", "outcome", "why"),
    [
        (CHAT | {"train_on_inputs": True}, "train_on_inputs", "missing", "and nothing else"),
        (CHAT | {"train_on_inputs": False}, "train_on_inputs", "unnecessary", "With --chat"),
        ({"train_on_inputs": False}, "train_on_inputs", "missing", "--mask-field FIELD"),
        ({"train_on_inputs": True}, "train_on_inputs", "unnecessary", "all of the text"),
        ({"mask_prompt": True}, "mask_prompt", "missing", "--mask-field FIELD"),
        ({"val_set_size": 500}, "val_set_size", "missing", "It counts rows"),
        ({"val_set_size": 0}, "val_set_size", "unnecessary", "always holds out"),
        (CHAT | {"chat_template": "llama3"}, "chat_template", "missing", "no template llama3"),
        ({"datasets": [{"type": "alpaca"}]}, "datasets.type", "missing", "no formats of prompts"),
        ({"datasets": [{"split": "train[:1%]"}]}, "datasets.split", "missing", "split=train[:1%]"),
        ({"datasets": [{"colour": "red"}]}, "datasets.colour", "unknown", "does not know"),
        ({"dataset_config_name": "raw"}, "dataset_config_name", "missing", "config=CONFIG"),
        ({"base_model": "O/M", "adapter": "lora"}, "train_on_inputs", "missing", "default"),
    ],
)
def test_what_prepare_cannot_do_as_asked_is_reported(document, key, outcome, why):
    item = item_of(found_of(document), key)
    assert item.outcome == outcome
    assert why in item.why


def test_a_template_without_conversations_is_not_passed_on():
    document = {"datasets": [{"path": "a", "type": "alpaca"}], "chat_template": "chatml"}
    found = found_of(document)
    assert "--chat" not in found.options
    assert item_of(found, "chat_template").why == "The rows are not chat data."
