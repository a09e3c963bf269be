"""Bad input exits with code 2 and two sentences, the problem and the fix, and changes no file.

`python -m pytest tests/bad_input --write-tables` writes the answers to messages.md.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import cases_chat
import cases_checkpoints
import cases_exporting
import cases_folders
import cases_lora
import cases_machine
import cases_models
import cases_names
import cases_preparing
import cases_settings
import cases_sources
import cases_text
import cases_tokens
import cases_upload
import cases_verify
import cases_words
import pytest
from case import row

ROOT = Path(__file__).parents[2]
TOPICS = (
    cases_names,
    cases_settings,
    cases_text,
    cases_preparing,
    cases_sources,
    cases_tokens,
    cases_folders,
    cases_checkpoints,
    cases_upload,
    cases_exporting,
    cases_machine,
    cases_lora,
    cases_words,
    cases_chat,
    cases_models,
    cases_verify,
)
CASES = [case for topic in TOPICS for case in topic.CASES]
MESSAGES = Path(__file__).with_name("messages.md")
WRITE = "`python -m pytest tests/bad_input --write-tables`"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.wrong)
def test_bad_input_is_answered(case, answers):
    answer = answers(case)
    assert answer.code == 2
    assert [name for name in case.names if name not in answer.what] == []
    assert [name for name in case.fix if name not in answer.fix] == []
    assert [
        name for name in answer.changed if not name.startswith(case.may_change or "nothing")
    ] == []
    result = json.loads(answer.out)
    assert {key: type(value) for key, value in result.items()} == {
        "error": str,
        "fix": str,
        "exit_code": int,
        "kind": str,
    }
    assert (answer.out.count("\n"), result["exit_code"]) == (1, 2)
    closing = f"{result['error']}\nFix: {result['fix']}\n"
    assert closing.count("\n") == 2
    assert result["error"].endswith(".")
    assert result["fix"].endswith((".", "?"))
    assert answer.err.endswith(closing) if case.progress else answer.err == closing
    assert case.progress in answer.err


def test_cases_have_different_names():
    names = [case.wrong for case in CASES]
    assert sorted(set(names)) == sorted(names)


def test_the_table_shows_the_messages(answers, is_current):
    parts = [f"# Messages\n\n{WRITE} writes this file.\n"]
    for topic in TOPICS:
        rows = "".join(f"{row(case, answers(case))}\n" for case in topic.CASES)
        heading = topic.__doc__.removesuffix(".")
        parts.append(f"## {heading}\n\n| mistake | message | fix |\n|---|---|---|\n{rows}")
    wanted = "\n".join(parts)
    is_current(MESSAGES, wanted)


@pytest.mark.slow
def test_simple_mistakes_are_reported_before_torch_is_loaded(world):
    lines = [
        "trian",
        "train demmo",
        "train my.yaml optim.lrr=1",
        "train my.yaml optim.lr=fast",
        "train my.yaml data.path=data/new",
    ]
    lines += [
        "train my.yaml model.kind=transfomer",
        "train my.yaml speedups=auto,-compil",
        "train my.yaml data.seq_len=8192",
        "demo bok.txt",
    ]
    lines += ["generate frist", "generate runs/first --stop=", "eval frist"]
    program = (
        "import sys\nfrom flatout.cli.main import main\nfor line in sys.argv[1:]:\n"
        "    try: main(line.split())\n    except SystemExit as stop: print(stop.code, 'torch' in "
        "sys.modules)\n"
    )
    done = _python("-c", program, *lines, folder=world)
    assert done.stdout.split("\n") == ["2 False"] * len(lines) + [""], done.stderr
    assert done.stderr.count("\n") == 2 * len(lines)


@pytest.mark.slow
def test_the_program_reports_a_mistake(world):
    done = _python("-m", "flatout", "prepare", "bok.txt", "--out", "data/new", folder=world)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "There is no file bok.txt.\nFix: Did you mean 'book.txt'?\n"


def _python(*words, folder):
    environment = {key: value for key, value in os.environ.items() if key != "RANK"} | {
        "PYTHONPATH": str(ROOT)
    }
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
