"""Reading YAML: numbers, words and errors."""

import math
from pathlib import Path

import pytest

import flatout
from flatout.config.documents import MOST_BYTES, parse_yaml, read_document
from flatout.errors import ConfigError


def nested_aliases(levels, each):
    """Return a short text whose aliases stand for each ** levels values."""
    lines = [f"a0: &a0 [{', '.join('x' * each)}]"]
    lines += [
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * each)}]"
        for level in range(1, levels)
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("indent", ["", "unknown:\n  "])
def test_aliases_that_stand_for_millions_of_values_are_rejected(indent):
    text = indent + nested_aliases(9, 9).replace("\n", "\n  " if indent else "\n")
    with pytest.raises(ConfigError, match=r"a\.yaml contains more than 50,000 values\.") as caught:
        parse_yaml(text, name="a.yaml")
    assert "*name" in caught.value.fix


def test_a_few_aliases_are_read():
    text = "base: &base {lr: 1}\none: *base\ntwo: [*base, *base]\n"
    assert parse_yaml(text, name="a.yaml")["two"] == [{"lr": 1}, {"lr": 1}]


@pytest.mark.parametrize("number", ["0x" + "f" * 4000, "1" * 5000, "0" * 5000])
def test_numbers_that_python_cannot_print_are_rejected(number):
    with pytest.raises(ConfigError, match="a number has more than 4,300 digits"):
        parse_yaml(f"a: {number}", name="a.yaml")


def test_a_file_too_large_for_settings_is_rejected(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("#" * (MOST_BYTES + 1))
    with pytest.raises(ConfigError, match="1,048,577 bytes"):
        read_document(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e3", 1000.0),
        ("-2E+5", -2e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("+.5e1", 5.0),
        ("1_000.5", 1000.5),
        ("1_000", 1000),
        ("-3", -3),
        ("0x10", 16),
        ("010", 10),
        ("-089", -89),
        ("08.5", 8.5),
        (".inf", math.inf),
    ],
)
def test_numbers_are_parsed(text, value):
    parsed = parse_yaml(text, name="test")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "e5",
        "3e",
        "1.2.3",
        "3e-4x",
        "v1",
        "on",
        "off",
        "yes",
        "No",
        "cuda:1",
        "auto,-compile",
        "1e-4, 2",
        "._",
        "'3e-4'",
        "1:30",
        "190:20:30.15",
        "0b11",
        "2026-01-02",
        "2026-13-01",
        "=",
    ],
)
def test_words_are_parsed_as_text(text):
    assert parse_yaml(text, name="test") == text.strip("'")


PACKAGED = sorted(Path(flatout.__file__).parent.rglob("*.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        *(path.read_text() for path in PACKAGED),
        "a: [1, 2.5, {b: 0x10}]\nc: 'it''s'\nd: \"\\x41\\/\"\ne: |\n  1\n  2\nf: 50%\n",
        "- on\n- 010\n-\n  - !!str 1\n- &a {x: 1}\n- *a\n...\n",
        "a: [x?y]\n",
        "a: !\n",
        "a: |#\n b\n",
        "<<: 1\n",
        "a: b\n c\n\n d # e\n",
    ],
    ids=[path.stem for path in PACKAGED]
    + ["flow", "block", "question", "tag", "header", "merge", "lines"],
)
def test_both_parsers_read_the_same(text):
    """Only PyYAML's own parser accepts a tab in front of a comment, and reads all of the text."""
    assert read(text) == read(f" \t# a tab\n{text}")


@pytest.mark.parametrize("text", ["[", "- ", "{a: "])
def test_deep_nesting_is_rejected(text):
    with pytest.raises(ConfigError, match="recursion"):
        parse_yaml(100_000 * text, name="a.yaml")


def read(text):
    """Return the value of a YAML text, or the error without its line."""
    try:
        return parse_yaml(text, name="test")
    except ConfigError as error:
        return error.what.partition("is not valid")[1:]


def test_other_yaml_keeps_its_meaning():
    assert parse_yaml("a: [1, 2.5, true, null, x]\nb: {c: 'd'}", name="test") == {
        "a": [1, 2.5, True, None, "x"],
        "b": {"c": "d"},
    }
    assert parse_yaml("", name="test") is None


def test_tabs_may_stand_anywhere_but_in_the_indentation():
    text = "a:\t1\t\r\n\t\r\nb:\t# none\r\n  c: x\t # one\r\nd: {\r\n\te: 'f\t'}\r\n"
    assert parse_yaml(text, name="test") == {"a": 1, "b": {"c": "x"}, "d": {"e": "f\t"}}


@pytest.mark.parametrize(
    ("text", "line", "about"),
    [
        ("optim:\n  lr: 1\n  lr: 2\n", 3, "'lr' is given twice"),
        ("a: 1\nb: 2\na: 1\n", 3, "'a' is given twice"),
        ("- {x: 1, x: 1}\n", 1, "'x' is given twice"),
        ("a: [1\nb: 2\n", 2, "not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "the line is indented with a tab, not with spaces"),
        ("a:\n  \tb: 2\n", 2, "the line is indented with a tab, not with spaces"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n", 3, "<< merges another mapping"),
        ("a: &x [*x]\n", 1, "recursive"),
        ("a: !!python/object:os.system {}\n", 1, "not valid YAML"),
        ("a: 1\n---\nb: 1\n", 2, "another document"),
        ("a:\n  1: x\n", 2, "key 1 is not text"),
        ("? [a, b]\n: 3\n", 1, "is not text"),
        ("{{a: 1}: 2}\n", 1, "is not text"),
    ],
)
def test_errors_name_file_and_line(text, line, about):
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, name="my.yaml")
    assert f"my.yaml, line {line}" in str(caught.value)
    assert about in str(caught.value)


def test_the_error_names_an_invalid_character():
    with pytest.raises(ConfigError, match="#x0000"):
        parse_yaml("a: \x00", name="my.yaml")


def test_read_document(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: ünïcode\noptim:\n  lr: 3e-4\n", encoding="utf-8")
    assert read_document(path) == {"name": "ünïcode", "optim": {"lr": 3e-4}}


@pytest.mark.parametrize("content", ["", "\n", "# only a comment\n"])
def test_an_empty_file_is_an_empty_mapping(tmp_path, content):
    path = tmp_path / "a.yaml"
    path.write_text(content)
    assert read_document(path) == {}


@pytest.mark.parametrize(
    ("content", "about"),
    [
        (None, "No such file"),
        (b"- a\n", "not a mapping"),
        (b"a: \xff\n", "byte 3"),
        (b"just words\n", "not a mapping"),
    ],
)
def test_files_without_a_mapping_are_rejected(tmp_path, content, about):
    path = tmp_path / "a.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=about) as caught:
        read_document(path)
    assert str(path) in caught.value.what
