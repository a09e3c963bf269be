"""Preparing: text, tokenizers, splits and directories."""

import bz2
import gzip
import sys

from case import World, case, written

NEW = "--out data/new --tokenizer byte"
BAD_ROW = '{"text": "one"}\n{"text": "two"\n'
OTHER_FIELD = '{"body": "one"}\n'


def without_zstandard(world: World) -> None:
    world.write("a.txt.zst", b"")
    world.patch.setitem(sys.modules, "zstandard", None)


def directory_of_text(world: World) -> None:
    world.write("texts/a.txt", "text")


CASES = [
    case("no source", "prepare --out data/new", "'SOURCES...'", "flatout prepare book.txt"),
    case("a file that does not exist", f"prepare bok.txt {NEW}", "bok.txt", "book.txt"),
    case(
        "a directory that does not exist", f"prepare texts/a.txt {NEW}", "texts", "Check the path"
    ),
    case(
        "a directory without text",
        f"prepare pictures {NEW}",
        "pictures",
        "'pictures/**/*.png'",
        written("pictures/a.png", b"\x89PNG"),
    ),
    case(
        "an empty directory",
        f"prepare none {NEW}",
        "none",
        ".txt",
        lambda w: (w.path / "none").mkdir(),
    ),
    case("a pattern that matches nothing", f"prepare 'texts/*.txt' {NEW}", "'texts/*.txt'", "ls"),
    case(
        "a URL with an unknown protocol",
        f"prepare s4://bucket/a.txt {NEW}",
        "s4://bucket/a.txt",
        "s3",
    ),
    case(
        "an empty corpus",
        f"prepare empty.txt {NEW}",
        ("empty.txt", "empty document"),
        "text in it",
        written("empty.txt", ""),
    ),
    case(
        "an empty corpus to train a tokenizer on",
        "prepare empty.txt --out data/new",
        ("empty.txt", "empty document"),
        "text in it",
        written("empty.txt", ""),
    ),
    case(
        "a corpus of one character",
        f"prepare one.txt {NEW}",
        ("one.txt", "1 character"),
        "Add text",
        written("one.txt", "x"),
    ),
    case(
        "bytes that are not UTF-8",
        f"prepare latin.txt {NEW}",
        ("latin.txt", "offset 3", "0xe9"),
        "iconv -f CP1252 -t UTF-8 latin.txt > latin.utf8.txt",
        written("latin.txt", b"caf\xe9 au lait"),
    ),
    case(
        "UTF-16 text from Windows, with a byte order mark",
        f"prepare notes.txt {NEW}",
        ("notes.txt", "offset 0", "0xff"),
        "iconv -f UTF-16 -t UTF-8",
        written("notes.txt", "some text".encode("utf-16")),
    ),
    case(
        "an encoding",
        f"prepare book.txt {NEW} --encoding cp1252",
        "--encoding",
        "iconv -f CP1252 -t UTF-8",
    ),
    case(
        "--include that matches no file",
        f"prepare texts {NEW} --include '*.py'",
        "'*.py'",
        "Quote",
        directory_of_text,
    ),
    case(
        "a table without the text column",
        f"prepare odd.csv {NEW}",
        ("odd.csv", "'text'"),
        "--text-field body",
        written("odd.csv", "id,body\n1,one\n"),
    ),
    case(
        "a table with a truncated row",
        f"prepare odd.csv {NEW}",
        ("odd.csv, row 2", "1 columns", "2"),
        "--on-bad-row skip",
        written("odd.csv", "id,text\n1,one\n2\n"),
    ),
    case(
        "a JSON array",
        f"prepare odd.json {NEW}",
        ("odd.json", "JSON"),
        "jq -c '.[]' FILE.json > FILE.jsonl",
        written("odd.json", '[{"text": "one"}]'),
    ),
    case(
        "an HTML page",
        f"prepare a.html {NEW}",
        ("a.html", "an HTML page"),
        "trafilatura < FILE.html > FILE.txt",
        written("a.html", "<p>text"),
    ),
    case(
        "a notebook",
        f"prepare a.ipynb {NEW}",
        ("a.ipynb", "Jupyter"),
        "nbconvert",
        written("a.ipynb", '{"cells": []}'),
    ),
    case(
        "a line that is not JSON",
        f"prepare bad.jsonl {NEW}",
        "bad.jsonl, line 2",
        "--on-bad-row skip",
        written("bad.jsonl", BAD_ROW),
    ),
    case(
        "a row without the text field",
        f"prepare odd.jsonl {NEW}",
        ("odd.jsonl, line 1", "'text'"),
        "--text-field body",
        written("odd.jsonl", OTHER_FIELD),
    ),
    case(
        "a truncated .gz file",
        f"prepare a.txt.gz {NEW}",
        "a.txt.gz",
        "complete",
        written("a.txt.gz", gzip.compress(b"x" * 5000)[:-9]),
    ),
    case(
        "a .gz file that is not gzip",
        f"prepare a.txt.gz {NEW}",
        ("a.txt.gz", "gzip"),
        "complete",
        written("a.txt.gz", "plain"),
    ),
    case(
        "a truncated .bz2 file",
        f"prepare a.txt.bz2 {NEW}",
        "a.txt.bz2",
        "complete",
        written("a.txt.bz2", bz2.compress(b"x" * 5000)[:-9]),
    ),
    case(
        "a .zst file without its package",
        f"prepare a.txt.zst {NEW}",
        ("a.txt.zst", "zstandard"),
        'pip install "flatout[zstd]"',
        without_zstandard,
    ),
    case(
        "a field that is not text",
        f"prepare odd.jsonl {NEW}",
        ("odd.jsonl, line 1", "'text'", "a number"),
        "--text-field",
        written("odd.jsonl", '{"text": 7}\n'),
    ),
    case(
        "--out that contains another dataset",
        "prepare rows.jsonl --out data/book --tokenizer byte",
        ("data/book", "book.txt", "rows.jsonl"),
        "a different --out",
    ),
    case(
        "a different tokenizer for an existing dataset",
        "prepare book.txt --out data/book --tokenizer char",
        ("data/book", "'byte'", "'char'"),
        "a different --out",
    ),
    case(
        "--out that contains other files",
        "prepare book.txt --out runs",
        "runs",
        "a different --out",
    ),
    case("a file as --out", "prepare book.txt --out my.yaml", "my.yaml", "a different --out"),
    case(
        "--out without write permission",
        "prepare book.txt --out closed/new --tokenizer byte",
        ("closed/new", "Permission denied"),
        "Choose a directory",
        lambda w: w.protect("closed"),
    ),
    case(
        "a split rule with a fraction above 1",
        f"prepare book.txt {NEW} --split 'tail 2'",
        "'tail 2'",
        "'tail 0.1'",
    ),
    case(
        "an unknown tokenizer", "prepare book.txt --out data/new --tokenizer chr", "'chr'", "'char'"
    ),
    case(
        "a tokenizer file that does not exist",
        "prepare book.txt --out data/new --tokenizer tok/tokenizer.json",
        "There is no directory tok",
        "Check the path",
    ),
    case(
        "a file that is not a tokenizer",
        "prepare book.txt --out data/new --tokenizer my.yaml",
        "my.yaml",
        "tokenizer.json",
    ),
    case(
        "a tokenizer whose characters share an id",
        "prepare book.txt --out data/new --tokenizer shared.json",
        ("shared.json", "'a' and 'b' the same id, 1"),
        "a separate id",
        written(
            "shared.json",
            '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "merges": [], '
            '"vocab": {"</s>": 0, "a": 1, "b": 1}}}',
        ),
    ),
    case(
        "a vocabulary smaller than 256 bytes",
        "prepare book.txt --out data/new --tokenizer train:100",
        "'train:100'",
        "train:4096",
    ),
    case(
        "--max-documents 0",
        f"prepare book.txt {NEW} --max-documents 0",
        ("'--max-documents'", "x>=1"),
        "Remove --max-documents",
    ),
    case(
        "a source with an unknown parameter",
        f"prepare python-stdlib:documents=5 {NEW}",
        ("'python-stdlib'", "'documents'"),
        "Its parameters are",
    ),
    case("a parameter without `=`", f"prepare python-stdlib:5 {NEW}", "'5'", "hub:ORG/NAME:split="),
    case(
        "a source that was removed",
        f"prepare synthetic:documents=5 {NEW}",
        "'synthetic'",
        "mypackage.module:pages",
    ),
    case(
        "a source that is a dataset now",
        f"prepare capitals:documents=20 {NEW}",
        "'capitals'",
        "`flatout prepare capitals --chat auto",
    ),
    case("a directory for `demo`", "demo data", "data", "flatout prepare"),
    case(
        "a URL for `demo`",
        "demo https://example.org/a.txt",
        "https://example.org/a.txt",
        "a local path",
    ),
    case(
        "a text for `demo` that is not UTF-8",
        "demo latin.txt",
        ("latin.txt", "offset 3"),
        "`iconv -f CP1252 -t UTF-8 latin.txt > latin.utf8.txt`",
        written("latin.txt", b"caf\xe9 au lait"),
    ),
    case(
        "an empty file for `demo`",
        "demo empty.txt",
        "empty.txt",
        "with text in it",
        written("empty.txt", ""),
    ),
]
