"""Text, and what it is prepared with."""

import bz2
import gzip
import sys

from asking import Case, World

NEW = "--out data/new --tokenizer byte"
BAD_ROW = '{"text": "one"}\n{"text": "two"\n'
OTHER_FIELD = '{"body": "one"}\n'


def without_zstandard(world: World) -> None:
    world.write("a.txt.zst", b"")
    world.patch.setitem(sys.modules, "zstandard", None)


def without_resiliparse(world: World) -> None:
    world.write("a.html", "<p>text")
    world.patch.setitem(sys.modules, "resiliparse.extract.html2text", None)


def with_texts(world: World) -> None:
    world.write("texts/a.txt", "text")


CASES = [
    Case("no source", "prepare --out data/new", ("'SOURCES...'",), ("flatout prepare book.txt",)),
    Case("a file that is not there", f"prepare bok.txt {NEW}", ("bok.txt",), ("book.txt",)),
    Case(
        "a folder that is not there", f"prepare texts/a.txt {NEW}", ("texts",), ("Check the path",)
    ),
    Case(
        "a directory without text",
        f"prepare pictures {NEW}",
        ("pictures",),
        ("'pictures/**/*.png'",),
        lambda w: w.write("pictures/a.png", b"\x89PNG"),
    ),
    Case(
        "an empty folder",
        f"prepare none {NEW}",
        ("none",),
        (".txt",),
        lambda w: (w.path / "none").mkdir(),
    ),
    Case(
        "a pattern that matches nothing",
        f"prepare 'texts/*.txt' {NEW}",
        ("'texts/*.txt'",),
        ("ls",),
    ),
    Case(
        "an address that nothing reads",
        f"prepare s4://bucket/a.txt {NEW}",
        ("s4://bucket/a.txt",),
        ("s3",),
    ),
    Case(
        "an empty corpus",
        f"prepare empty.txt {NEW}",
        ("empty.txt", "empty document"),
        ("text in it",),
        lambda w: w.write("empty.txt", ""),
    ),
    Case(
        "an empty corpus to train a tokenizer on",
        "prepare empty.txt --out data/new",
        ("empty.txt", "empty document"),
        ("text in it",),
        lambda w: w.write("empty.txt", ""),
    ),
    Case(
        "a corpus of one character",
        f"prepare one.txt {NEW}",
        ("one.txt", "1 character"),
        ("Add text",),
        lambda w: w.write("one.txt", "x"),
    ),
    Case(
        "bytes that are not UTF-8",
        f"prepare latin.txt {NEW}",
        ("latin.txt", "offset 3", "0xe9", "CP1252"),
        ("--encoding CP1252",),
        lambda w: w.write("latin.txt", b"caf\xe9 au lait"),
    ),
    Case(
        "text of Windows, with a byte order mark",
        f"prepare notes.txt {NEW}",
        ("notes.txt", "looks like UTF-16"),
        ("--encoding UTF-16",),
        lambda w: w.write("notes.txt", "some text".encode("utf-16")),
    ),
    Case(
        "an encoding that nothing knows",
        f"prepare book.txt {NEW} --encoding cp1253x",
        ("--encoding 'cp1253x'",),
        ("cp1253",),
    ),
    Case(
        "text in another encoding than the one that is named",
        f"prepare notes.txt {NEW} --encoding UTF-32",
        ("notes.txt", "is not utf-32", "offset 0"),
        ("another --encoding",),
        lambda w: w.write("notes.txt", "some text".encode("utf-16")),
    ),
    Case(
        "a pattern of files to include that fits none",
        f"prepare texts {NEW} --include '*.py'",
        ("'*.py'",),
        ("Quote",),
        with_texts,
    ),
    Case(
        "a table without the column",
        f"prepare odd.csv {NEW}",
        ("odd.csv, line 2", "'text'"),
        ("--text-field body",),
        lambda w: w.write("odd.csv", "id,body\n1,one\n"),
    ),
    Case(
        "a table with a row that is truncated",
        f"prepare odd.csv {NEW}",
        ("odd.csv, line 3", "1 columns", "2"),
        ("--on-bad-row skip",),
        lambda w: w.write("odd.csv", "id,text\n1,one\n2\n"),
    ),
    Case(
        "JSON that is no list of rows",
        f"prepare odd.json {NEW}",
        ("odd.json", "'text'"),
        ("--text-field",),
        lambda w: w.write("odd.json", '{"version": 1, "data": [{"text": "one"}]}'),
    ),
    Case(
        "JSON that is truncated",
        f"prepare odd.json {NEW}",
        ("odd.json", "JSON"),
        ("Repair",),
        lambda w: w.write("odd.json", '[{"text": "on'),
    ),
    Case(
        "a page without the package for it",
        f"prepare a.html {NEW}",
        ("a.html", "resiliparse"),
        ('pip install "flatout[html]"',),
        without_resiliparse,
    ),
    Case(
        "a notebook",
        f"prepare a.ipynb {NEW}",
        ("a.ipynb", "Jupyter"),
        ("nbconvert",),
        lambda w: w.write("a.ipynb", '{"cells": []}'),
    ),
    Case(
        "a line that is not JSON",
        f"prepare bad.jsonl {NEW}",
        ("bad.jsonl, line 2",),
        ("--on-bad-row skip",),
        lambda w: w.write("bad.jsonl", BAD_ROW),
    ),
    Case(
        "a row without the field",
        f"prepare odd.jsonl {NEW}",
        ("odd.jsonl, line 1", "'text'"),
        ("--text-field body",),
        lambda w: w.write("odd.jsonl", OTHER_FIELD),
    ),
    Case(
        "a truncated .gz",
        f"prepare a.txt.gz {NEW}",
        ("a.txt.gz",),
        ("complete",),
        lambda w: w.write("a.txt.gz", gzip.compress(b"x" * 5000)[:-9]),
    ),
    Case(
        "a file called .gz that is not",
        f"prepare a.txt.gz {NEW}",
        ("a.txt.gz", "gzip"),
        ("complete",),
        lambda w: w.write("a.txt.gz", "plain"),
    ),
    Case(
        "a truncated .bz2",
        f"prepare a.txt.bz2 {NEW}",
        ("a.txt.bz2",),
        ("complete",),
        lambda w: w.write("a.txt.bz2", bz2.compress(b"x" * 5000)[:-9]),
    ),
    Case(
        "a .zst without the package for it",
        f"prepare a.txt.zst {NEW}",
        ("a.txt.zst", "zstandard"),
        ('pip install "flatout[zstd]"',),
        without_zstandard,
    ),
    Case(
        "a field that is not text",
        f"prepare odd.jsonl {NEW}",
        ("odd.jsonl, line 1", "'text'", "a number"),
        ("--text-field",),
        lambda w: w.write("odd.jsonl", '{"text": 7}\n'),
    ),
    Case(
        "a folder that holds another data set",
        "prepare rows.jsonl --out data/book --tokenizer byte",
        ("data/book", "book.txt", "rows.jsonl"),
        ("another --out",),
    ),
    Case(
        "another tokenizer for the same folder",
        "prepare book.txt --out data/book --tokenizer char",
        ("data/book", "'byte'", "'char'"),
        ("another --out",),
    ),
    Case(
        "a folder in which other files lie",
        "prepare book.txt --out runs",
        ("runs",),
        ("another --out",),
    ),
    Case(
        "a file where the folder should be",
        "prepare book.txt --out my.yaml",
        ("my.yaml",),
        ("another --out",),
    ),
    Case(
        "a folder that may not be written",
        "prepare book.txt --out closed/new --tokenizer byte",
        ("closed/new", "Permission denied"),
        ("--out",),
        lambda w: w.protect("closed"),
    ),
    Case(
        "a split rule that leaves nothing",
        f"prepare book.txt {NEW} --split 'tail 2'",
        ("'tail 2'",),
        ("'tail 0.1'",),
    ),
    Case(
        "an unknown tokenizer",
        "prepare book.txt --out data/new --tokenizer chr",
        ("'chr'",),
        ("'char'",),
    ),
    Case(
        "a tokenizer file that is not there",
        "prepare book.txt --out data/new --tokenizer tok/tokenizer.json",
        ("tok/tokenizer.json",),
        ("Check the path",),
    ),
    Case(
        "a file that is no tokenizer",
        "prepare book.txt --out data/new --tokenizer my.yaml",
        ("my.yaml",),
        ("tokenizer.json",),
    ),
    Case(
        "a vocabulary smaller than the bytes",
        "prepare book.txt --out data/new --tokenizer train:100",
        ("'train:100'",),
        ("train:4096",),
    ),
    Case(
        "a limit of nothing",
        f"prepare book.txt {NEW} --max-documents 0",
        ("--max-documents 0",),
        ("Leave --max-documents out",),
    ),
    Case(
        "a source called with what it does not take",
        f"prepare synthetic:document=5 {NEW}",
        ("'synthetic'", "'document'"),
        ("documents",),
    ),
    Case(
        "a parameter without `=`",
        f"prepare synthetic:5 {NEW}",
        ("'5'",),
        ("synthetic:documents=1000",),
    ),
    Case("a folder for `demo`", "demo data", ("data",), ("flatout prepare",)),
    Case(
        "an address for `demo`",
        "demo https://example.org/a.txt",
        ("https://example.org/a.txt",),
        ("curl -LO",),
    ),
    Case(
        "a text for `demo` that is not UTF-8",
        "demo latin.txt",
        ("latin.txt", "offset 3"),
        ("`iconv -f CP1252 -t UTF-8 latin.txt > latin.utf8.txt`",),
        lambda w: w.write("latin.txt", b"caf\xe9 au lait"),
    ),
    Case(
        "an empty file for `demo`",
        "demo empty.txt",
        ("empty.txt",),
        ("kilobytes",),
        lambda w: w.write("empty.txt", ""),
    ),
]
