"""`flatout chat`: turns from standard input, replies on standard output."""

import io
import json
import math
import sys
from types import SimpleNamespace

import pytest

from flatout.cli import main as cli
from flatout.cli.commands.chat import chat
from flatout.cli.commands.eval import evaluate
from flatout.cli.commands.export import export
from flatout.cli.commands.generate import generate
from flatout.cli.commands.inspect import inspect
from flatout.cli.commands.prepare import prepare
from flatout.cli.commands.train import train
from flatout.config.schema import load_config
from flatout.data.conversation.templates import load_template
from flatout.data.store.shards import Dataset
from flatout.errors import ConfigError, DataError
from flatout.progress import SILENT

pytestmark = pytest.mark.slow

SHAPE = [
    "model.num_layers=1",
    "model.d_model=16",
    "model.num_heads=1",
    "data.seq_len=64",
    "data.document_mask=true",
    "batch.rows_per_device=4",
    "batch.tokens_per_step=256",
    "train.steps=2",
    "train.device=cpu",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run of two steps on conversations."""
    root = tmp_path_factory.mktemp("chat")
    some = {"max_documents": 60, "split": "tail 0.1", "tokenizer": "byte", "workers": 1}
    prepare("capitals", root / "data", chat="auto", **some)
    train(load_config(None, [*SHAPE, f"data.path={root / 'data'}"]), run=root / "runs/chat")
    return root / "runs/chat"


def test_the_sample_of_a_run_answers_the_first_validation_conversation(run):
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    text = next(event["text"] for event in events if event["event"] == "sample")
    first = inspect(run.parent.parent / "data").value("beginning")
    assert text.startswith("User:\n")
    assert text.count("\n\nAssistant:\n") == 1
    assert "User:" in first


def test_train_sample_prompt_is_a_question(run, tmp_path):
    keys = [*SHAPE, f"data.path={run.parent.parent / 'data'}", "train.sample_prompt=Who?"]
    train(load_config(None, keys), run=tmp_path / "run")
    assert "User:\\nWho?\\n\\nAssistant:\\n" in (tmp_path / "run/events.jsonl").read_text()


@pytest.mark.parametrize("to", ["huggingface", "safetensors"])
def test_an_export_answers_as_its_run_does(run, tmp_path, to):
    made, greedy = export(run, to, tmp_path / "export"), {"max_tokens": 5, "temperature": 0}
    said, texts = [], []
    for model in (run, made.path):
        said.append(chat(model, lines=["Hi\n", "Bye\n"], **greedy).conversations)
        texts.append(generate(model, "a", **greedy).samples)
    assert said[0] == said[1]
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="single model"):
        generate(made.path, checkpoint="last")


def test_lines_are_turns_and_the_result_is_chat_data(run):
    pieces = []
    lines = ["Hi\n", "\n", "  Bye  \n", "/reset\n", "Again\n", "/quit\n", "never\n"]
    result = chat(run, "Be brief.", lines=lines, max_tokens=5, write=pieces.append)
    first, second = result.conversations
    assert [(turn.role, turn.content) for turn in first if turn.role != "assistant"] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("user", "Bye"),
    ]
    assert [turn.role for turn in second] == ["system", "user", "assistant"]
    replies = [turn.content for turn in [*first, *second] if turn.role == "assistant"]
    assert "".join(pieces) == "".join(f"{reply}\n" for reply in replies)
    assert result.summary() == ""


def test_equal_seeds_give_equal_replies(run):
    def replies(seed):
        return chat(run, lines=["Hi", "Bye"], max_tokens=20, seed=seed, temperature=1).conversations

    assert replies(1) == replies(1) != replies(2)


def typed(capsys, *words):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["chat", *map(str, words)])
    return stopped.value.code, *capsys.readouterr()


def test_the_command_reads_standard_input(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/reset\nBye"))
    code, out, err = typed(capsys, run, "--max-tokens", 4, "--json")
    assert code == 0
    conversations = json.loads(out)["conversations"]
    assert [[turn["role"] for turn in one] for one in conversations] == [["user", "assistant"]] * 2
    assert all(one[1]["content"] in err for one in conversations), "streamed"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    code, out, _ = typed(capsys, run, "--max-tokens", 4)
    assert (code, out) == (0, conversations[0][1]["content"] + "\n")


class Keyboard(io.StringIO):
    """Standard input on a terminal."""

    def isatty(self):
        return True


def test_a_terminal_shows_a_prompt_and_survives_a_bad_turn(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Keyboard("\ud800\nHi\n"))
    pieces = []
    result = chat(run, max_tokens=4, write=pieces.append)
    assert "".join(pieces).startswith("/reset starts a new conversation, /quit ends.\n> ")
    assert any("surrogate" in piece for piece in pieces)
    assert [turn.role for turn in result.conversations[0]] == ["user", "assistant"]


def test_a_bad_turn_from_a_pipe_is_an_error(run, monkeypatch):
    with pytest.raises(DataError, match="surrogate"):
        chat(run, lines=["\ud800"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    with pytest.raises(DataError, match="not UTF-8"):
        chat(run)


def test_what_does_not_fit_the_context_is_rejected(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", Keyboard("x" * 100 + "\nHi\n"))
    pieces = []
    result = chat(run, max_tokens=4, write=pieces.append)
    assert any("does not fit" in piece for piece in pieces)
    assert result.conversations[0][0].content == "Hi"
    code, _, err = typed(capsys, run, "--system", "S" * 100)
    assert code == 2
    assert "The system prompt does not fit" in err


def test_turns_omitted_are_reported_on_standard_error(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'a' * 20}\n{'b' * 20}\n{'c' * 20}\n"))
    code, out, err = typed(capsys, run, "--max-tokens", 4)
    assert code == 0
    assert err.count("does not see its oldest turns") == 1
    assert "oldest turns" not in out


def test_a_mistake_is_reported_with_its_fix(run, capsys):
    code, _, err = typed(capsys, run, "--chat-template", "chatm")
    assert code == 2
    assert "Did you mean 'chatml'?" in err
    assert typed(capsys, run, "--temperature", "-1")[0] == 2


def test_evaluation_counts_the_assistants_tokens(run):
    score = evaluate(run)
    split = Dataset.open(run.parent.parent / "data").split("val")
    mask = split.read_mask_range(1, split.num_tokens)
    assert score.tokens == int(mask.sum()) < split.num_tokens / 2
    bits = score.val_loss * score.tokens / math.log(2) / split.text_bytes
    assert score.bits_per_byte == pytest.approx(bits)


def test_inspect_names_the_template_and_marks_what_does_not_count(run):
    found = inspect(run.parents[1] / "data")
    assert found.value("source")["chat_template"]["text"].startswith("{% for message")
    assert "chat_template plain" in found.summary()
    assert "{% for message" not in found.summary()
    assert found.value("beginning").startswith("«User:\n")


def test_another_chat_template_is_reported(run, tmp_path):
    """By an evaluation, and by a run on a mix, which keeps the first."""
    said, other = [], tmp_path / "other"
    progress = SimpleNamespace(say=said.append, task=SILENT.task)
    evaluate(run, progress=progress)
    assert said == []
    assert load_template(run / "chat_template.json").name == "plain"
    some = {"max_documents": 20, "split": "tail 0.1", "tokenizer": "byte", "workers": 1}
    prepare("capitals", other, chat="chatml", **some)
    assert evaluate(run, data=[other], progress=progress).tokens > 0
    assert any("a different chat template" in line for line in said)
    mix = f"data.mix={{{other}: 1, {run.parents[1] / 'data'}: 1}}"
    train(load_config(None, [*SHAPE, mix]), run=tmp_path / "mixed", progress=progress)
    assert load_template(tmp_path / "mixed" / "chat_template.json").name == "chatml"
    assert any("different chat templates" in line for line in said)
