"""Errors say what happened and then the fix; schedulers rely on their exit codes."""

import inspect
import re
import shlex

import pytest

from flatout import errors

FAMILY = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, errors.FlatoutError)
]


@pytest.mark.parametrize(
    "error", [e for e in FAMILY if e not in (errors.Stopped, errors.Interrupted)]
)
def test_a_message_has_what_happened_and_the_fix(error):
    raised = error("The disk is full.", fix="Free some space.")
    assert str(raised) == "The disk is full. Fix: Free some space."
    assert (raised.what, raised.fix) == ("The disk is full.", "Free some space.")


def test_a_stopped_run_says_what_comes_next():
    assert (
        str(errors.Stopped("Stopped, and saved.", fix="Run it again."))
        == "Stopped, and saved. Next: Run it again."
    )
    assert (
        str(errors.Interrupted("Interrupted.", fix="Run it again.", signal_number=2))
        == "Interrupted. Next: Run it again."
    )


@pytest.mark.parametrize("error", FAMILY)
def test_a_fix_is_required(error):
    with pytest.raises(TypeError, match="fix"):
        error("The disk is full.")


def test_exit_codes():
    codes = {error.__name__: error.exit_code for error in FAMILY}
    usage = {error.__name__ for error in FAMILY if issubclass(error, errors.UsageError)}
    assert usage == {
        "UsageError",
        "ConfigError",
        "DataError",
        "TooLittleText",
        "OutputInUse",
        "CheckpointError",
        "UntrustedCode",
        "HardwareError",
        "ShapeError",
        "MissingPackage",
    }
    assert {codes[name] for name in usage} == {2}
    assert (codes["RunFailed"], codes["Stopped"]) == (1, 75)


@pytest.mark.parametrize(("signal_number", "code"), [(2, 130), (15, 143)])
def test_the_exit_code_of_an_interruption_follows_from_its_signal(signal_number, code):
    assert (
        errors.Interrupted("Stopped.", fix="Run it again.", signal_number=signal_number).exit_code
        == code
    )


def test_the_signal_of_an_interruption_is_known():
    interrupted = errors.Interrupted("Stopped.", fix="Run it again.", signal_number=10)
    raised = [KeyboardInterrupt(), errors.Terminated(15), interrupted]
    assert list(map(errors.signal_of, raised)) == [2, 15, 10]
    assert not isinstance(errors.Terminated(15), Exception)


def test_the_tree_in_the_docstring_matches_the_classes():
    drawn = {}
    ancestors = []
    for line in inspect.getdoc(errors).splitlines():
        if found := re.match(r"^([│├└─\s]*)([A-Z]\w+)\s*(?:exit (\d+))?", line):
            depth = len(found[1]) // 4
            ancestors[depth:] = [found[2]]
            drawn[found[2]] = (ancestors[depth - 1] if depth else "Exception", found[3])
    drawn = {
        name: row for name, row in drawn.items() if name in {error.__name__ for error in FAMILY}
    }
    assert {name: parent for name, (parent, _) in drawn.items()} == {
        error.__name__: error.__base__.__name__ for error in FAMILY
    }
    for error in FAMILY:
        stated = drawn[error.__name__][1]
        if stated and error is not errors.Interrupted:
            assert error.exit_code == int(stated)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "There is nothing at ftp://me:s3cret@host/a.txt.",
            "There is nothing at ftp://host/a.txt.",
        ),
        ("s3://key:se/cr/et@bucket/a.txt: 403", "s3://bucket/a.txt: 403"),
        (
            "https://token@host/a.txt and https://host/b?sig=1%2F2&x=a.b.",
            "https://host/a.txt and https://host/b.",
        ),
        ("('https://host/b?sig=1', 'me@host')", "('https://host/b', 'me@host')"),
        ("https://host/a?sig=1: 403 Forbidden", "https://host/a: 403 Forbidden"),
        ("hf://datasets/org/name@main/a?.txt", "hf://datasets/org/name@main/a?.txt"),
        ("s3://bucket/what?.txt", "s3://bucket/what?.txt"),
        ("HTTP://u:PASS@host/a and Https://token@host/b?SIG=1", "HTTP://host/a and Https://host/b"),
        ("http://us er:PASS@host/a", "http://host/a"),
        ("s3://us er:PA/SS WORD@host/a", "s3://host/a"),
        ("http://u:P@SS@host/a", "http://host/a"),
        ("http://u:P'A\"S@host/a", "http://host/a"),
        ("http:/u:PASS@host/a?sig=1", "http:/host/a"),
        ("git+https://u:PASS@host/a", "git+https://host/a"),
        ("s3://a/b,s3://u:/PASS@host/a", "s3://a/b,s3://host/a"),
        ("https://host/a b.txt?sig=1 is missing", "https://host/a b.txt is missing"),
        (
            "http://127.0.0.1:80/rows.jsonl, line 3: 'me@host'",
            "http://127.0.0.1:80/rows.jsonl, line 3: 'me@host'",
        ),
        (
            "Is http://host/a b there? Ask me@host: now.",
            "Is http://host/a b there? Ask me@host: now.",
        ),
    ],
)
def test_secrets_in_urls_are_not_shown(text, shown):
    assert errors.without_secrets(text) == shown
    error = errors.DataError(text, fix=text)
    assert (error.what, error.fix, str(error)) == (shown, shown, f"{shown} Fix: {shown}")


def test_a_name_from_a_file_cannot_control_the_terminal():
    hostile = "a\x1b[2J\x9b2J\r\nFix: run this.\u202egpj.\u2028b\t\x7f\u2066"
    raised = errors.DataError(f"{hostile} is bad.", fix=f"Repair {hostile}.")
    for text in (raised.what, raised.fix, str(raised)):
        assert text.isprintable()
    assert raised.what == r"a\x1b[2J\x9b2J\r\nFix: run this.\u202egpj.\u2028b\t\x7f\u2066 is bad."
    assert errors.on_one_line("größer, 数据, path/to é") == "größer, 数据, path/to é"


@pytest.mark.parametrize(
    "word",
    ["my run", "$(touch X)", "it's", 'data.mix={"a b": 1.0}', "`id`", "a;b", "plain/path-1.0"],
)
def test_a_quoted_word_is_one_word_of_a_command(word):
    assert shlex.split(f"flatout train {errors.in_shell(word)} end") == [
        "flatout",
        "train",
        word,
        "end",
    ]
