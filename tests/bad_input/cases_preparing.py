"""Preparing: rows, addresses and formats, limits, work that is half done."""

import gzip
import io
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

from asking import Case, World, ask

from flatout.data.prepare.work_dir import PartOf, WorkFolder

NEW = "--out data/new --tokenizer byte"
MANY = "".join(
    f'{{"text": "row {number}"}}\n' if number % 7 else f'{{"text": {number}}}\n'
    for number in range(1, 40)
)


def many(world: World) -> None:
    """Rows of which every seventh has a number where text should be."""
    world.write("many.jsonl", MANY)


def begun(world: World) -> None:
    """The first of two parts, of several ranges."""
    world.patch.setattr("flatout.data.prepare.ranges.RANGE_BYTES", 100)
    world.patch.setattr("flatout.sources.files.PART_BYTES", 100)
    world.write("good.jsonl", "".join(f'{{"text": "row {number}"}}\n' for number in range(40)))
    assert ask(f"prepare good.jsonl {NEW} --part 1/2", world.path).code == 0


def held(world: World) -> None:
    begun(world)
    world.stack.enter_context(WorkFolder(world.path / "data/new", PartOf(1, 2)))


def changed(world: World) -> None:
    begun(world)
    with (world.path / "good.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')


def written_again(world: World) -> None:
    begun(world)
    file = world.path / "good.jsonl"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))


def mounted(world: World) -> None:
    (world.path / "data/new").mkdir()
    world.patch.setattr(os.path, "ismount", lambda path: Path(path).name == "new")


def closed_tokenizer(world: World) -> None:
    """A file that may not be read, which a permission cannot see to for every user."""
    read = Path.read_bytes

    def guarded(path: Path) -> bytes:
        if path == Path(
            "data/book/tokenizer.json"
        ):  # as commands call it; the world is compared by whole paths
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    world.patch.setattr(Path, "read_bytes", guarded)


def parquet(world: World, columns: dict[str, list[object]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    world.write("a.parquet", file.getvalue())
    return file.getvalue()


def small_disk(world: World) -> None:
    world.write("large.txt", "x" * 2_000_000)
    world.patch.setattr(
        shutil,
        "disk_usage",
        lambda _: namedtuple("usage", "total used free")(10**12, 10**12 - 10**6, 10**6),
    )


def without(package: str, world: World) -> None:
    world.patch.setitem(sys.modules, package, None)


def offline(world: World) -> None:
    """A hub that nobody reaches, and a cache that has nothing."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def nothing(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("nothing is there")

    world.patch.setattr(huggingface_hub, "hf_hub_download", nothing)


def standard_input(world: World, data: bytes) -> None:
    world.patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def sides(world: World) -> None:
    """A file, its copy, another, and a data set in which that one is validation text."""
    for name, rows in (("good", 40), ("copy", 40), ("held", 5), ("none", 0)):
        world.write(
            f"{name}.jsonl", "".join(f'{{"text": "row {number}"}}\n' for number in range(rows))
        )
    assert (
        ask(
            "prepare good.jsonl --out data/sides --tokenizer byte --val held.jsonl", world.path
        ).code
        == 0
    )


CASES = [
    Case(
        "more bad rows than may be skipped",
        f"prepare many.jsonl {NEW} --split 'hash 0.3' --on-bad-row skip --max-bad-rows 3",
        ("5 of the first 39 rows", "3 may be skipped", "many.jsonl, line 7"),
        ("--max-bad-rows 50", "keeps what is done"),
        many,
        leaves=("data/.new.part",),
    ),
    Case(
        "a limit of bad rows that may not be skipped",
        f"prepare many.jsonl {NEW} --max-bad-rows 3",
        ("--max-bad-rows 3",),
        ("--on-bad-row skip",),
        many,
    ),
    Case(
        "a disk too full for the data set",
        f"prepare large.txt {NEW}",
        ("takes about 8.0 MB", "1.0 MB are free in data"),
        ("--out", "--max-bytes"),
        small_disk,
    ),
    Case(
        "validation text that is trained on",
        f"prepare good.jsonl {NEW} --val copy.jsonl",
        ("copy.jsonl", "both training and validation"),
        ("Leave it out", "--duplicates drop"),
        sides,
    ),
    Case(
        "validation text and a split rule",
        f"prepare good.jsonl {NEW} --val held.jsonl --split 'tail 0.1'",
        ("--val", "--split 'tail 0.1'"),
        ("Leave one",),
        sides,
    ),
    Case(
        "validation text that is not there",
        f"prepare good.jsonl {NEW} --val hled.jsonl",
        ("hled.jsonl",),
        ("'held.jsonl'",),
        sides,
    ),
    Case(
        "validation text without a document",
        f"prepare good.jsonl {NEW} --val none.jsonl",
        ("none.jsonl", "no document"),
        ("text in it",),
        sides,
    ),
    Case(
        "a data set as validation text",
        f"prepare good.jsonl {NEW} --val shakespeare",
        ("--val shakespeare",),
        ("as the source",),
        sides,
    ),
    Case(
        "other validation text for a data set that is there",
        "prepare good.jsonl --out data/sides --tokenizer byte --val copy.jsonl --duplicates drop",
        ("data/sides", "held.jsonl there", "copy.jsonl asked for"),
        ("another --out",),
        sides,
    ),
    Case("a part that is none", f"prepare book.txt {NEW} --part 3/2", ("--part '3/2'",), ("2/8",)),
    Case(
        "a part and the join at once",
        f"prepare book.txt {NEW} --part 1/2 --join",
        ("--part", "--join"),
        ("without --part",),
    ),
    Case("a join of nothing", f"prepare book.txt {NEW} --join", ("data/new",), ("--part 1/N",)),
    Case(
        "a join with parts missing",
        f"prepare good.jsonl {NEW} --join",
        ("data/new", "part 2/2"),
        ("Run those parts", "--join"),
        begun,
    ),
    Case(
        "a part that another process does",
        f"prepare good.jsonl {NEW} --part 1/2",
        ("data/new", "Another process"),
        ("another --out",),
        held,
    ),
    Case(
        "a data set that another process prepares",
        f"prepare good.jsonl {NEW}",
        ("data/new", "Another process"),
        ("another --out",),
        held,
    ),
    Case(
        "a part of another number of parts",
        f"prepare good.jsonl {NEW} --part 2/3",
        ("--part 2/3", "data/.new.part", "parts of 2"),
        ("--part I/2",),
        begun,
    ),
    Case(
        "a mount point to prepare into",
        f"prepare book.txt {NEW}",
        ("data/new", "mount point"),
        ("--out data/new/NAME",),
        mounted,
    ),
    Case(
        "a home folder of nobody",
        "prepare book.txt --out '~nobody-there/set'",
        ("~nobody-there/set",),
        ("from / on",),
    ),
    Case(
        "a tokenizer in a home folder of nobody",
        "prepare book.txt --out data/new --tokenizer '~nobody-there/tokenizer.json'",
        ("~nobody-there/tokenizer.json",),
        ("from / on",),
    ),
    Case(
        "a folder without a tokenizer",
        "prepare book.txt --out data/new --tokenizer data",
        ("data", "tokenizer.json"),
        ("byte",),
    ),
    Case(
        "a pattern that is empty",
        "prepare book.txt --out data/new --tokenizer own.tiktoken --pattern ''",
        ("--pattern ''",),
        ("regular expression",),
        lambda w: w.write("own.tiktoken", "YQ== 0\n"),
    ),
    Case(
        "a rank that no vocabulary has",
        "prepare book.txt --out data/new --tokenizer own.tiktoken --pattern .",
        ("own.tiktoken, line 2", "1,099,511,627,776"),
        ("whole .tiktoken",),
        lambda w: w.write("own.tiktoken", "YQ== 0\nYg== 1099511627776\n"),
    ),
    Case(
        "a tokenizer that may not be read",
        "prepare book.txt --out data/new --tokenizer data/book/tokenizer.json",
        ("data/book/tokenizer.json", "Permission denied"),
        ("permissions",),
        closed_tokenizer,
    ),
    Case(
        "a data set whose tokenizer may not be read",
        "inspect data/book",
        ("data/book/tokenizer.json", "Permission denied"),
        ("permissions",),
        closed_tokenizer,
    ),
    Case(
        "work that is half done for text that was written again",
        f"prepare good.jsonl {NEW}",
        ("The text has changed", "data/.new.part"),
        ("Put the text back", "remove the folder data/.new.part"),
        written_again,
    ),
    Case(
        "work that is half done for other options",
        "prepare good.jsonl --out data/new --tokenizer char",
        ("data/.new.part", "tokenizer 'byte' there, 'char' asked for"),
        ("remove the folder data/.new.part",),
        begun,
    ),
    Case(
        "work that is half done for text that has changed",
        f"prepare good.jsonl {NEW} --join",
        ("data/.new.part", "the text has changed"),
        ("remove the folder data/.new.part",),
        changed,
    ),
    Case(
        "a bad row in one of several parts",
        f"prepare many.jsonl {NEW} --split 'hash 0.3' --part 1/2",
        ("many.jsonl, line 7", "a number"),
        ("remove the folder data/.new.part", "every part again"),
        many,
        leaves=("data/.new.part",),
    ),
    Case(
        "a nested field misspelt",
        f"prepare odd.jsonl {NEW} --text-field meta.txt",
        ("odd.jsonl, line 1", "'meta.txt'"),
        ("--text-field meta.text",),
        lambda w: w.write("odd.jsonl", '{"meta": {"text": "one"}}\n'),
    ),
    Case(
        "null for text",
        f"prepare odd.jsonl {NEW}",
        ("odd.jsonl, line 1", "'text'", "null"),
        ("--text-field",),
        lambda w: w.write("odd.jsonl", '{"text": null}\n'),
    ),
    Case(
        "a row that is no object",
        f"prepare odd.jsonl {NEW}",
        ("odd.jsonl, line 1",),
        ('{"text": "..."}',),
        lambda w: w.write("odd.jsonl", '["one"]\n'),
    ),
    Case(
        "a mask for text without rows",
        f"prepare book.txt {NEW} --mask-field prompt",
        ("book.txt", "'prompt'"),
        ("--mask-field",),
    ),
    Case(
        "an empty .gz",
        f"prepare a.txt.gz {NEW}",
        ("a.txt.gz", "empty document"),
        ("text in it",),
        lambda w: w.write("a.txt.gz", gzip.compress(b"")),
    ),
    Case(
        "a .gz of no bytes at all",
        f"prepare a.txt.gz {NEW}",
        ("a.txt.gz", "empty document"),
        ("text in it",),
        lambda w: w.write("a.txt.gz", b""),
    ),
    Case(
        "an empty standard input",
        f"prepare - {NEW}",
        ("-", "empty document"),
        ("text in it",),
        lambda w: standard_input(w, b""),
        says="0 bytes",
        leaves=("data/.stdin-",),
    ),
    Case("standard input named twice", f"prepare - - {NEW}", ("twice",), ("once",)),
    Case(
        "a Parquet file without the package for it",
        f"prepare a.parquet {NEW}",
        ("a.parquet", "pyarrow"),
        ('"flatout[parquet]"',),
        lambda w: (w.write("a.parquet", "PAR1"), without("pyarrow", w)),
    ),
    Case(
        "a Parquet file without the field",
        f"prepare a.parquet {NEW}",
        ("a.parquet", "'text'"),
        ("--text-field body",),
        lambda w: parquet(w, {"body": ["one", "two"]}),
    ),
    Case(
        "a Parquet file that is cut short",
        f"prepare a.parquet {NEW}",
        ("a.parquet",),
        ("whole",),
        lambda w: w.write("a.parquet", parquet(w, {"text": ["one"] * 100})[:-20]),
    ),
    Case(
        "an address without the package for it",
        f"prepare s3://bucket/a.txt {NEW}",
        ("s3://bucket/a.txt", "s3fs"),
        ('"flatout[s3]"',),
        lambda w: without("s3fs", w),
    ),
    Case(
        "an address where nothing is",
        f"prepare memory://nowhere/a.txt {NEW}",
        ("memory://nowhere/a.txt",),
        ("Check the URL",),
    ),
    Case(
        "an option that the hub has not",
        f"prepare hub:org/set:splitt=train {NEW}",
        ("'hub'", "'splitt'"),
        ("split", "revision"),
    ),
    Case(
        "a data set of the hub without the package for it",
        f"prepare hub:org/set {NEW}",
        ("hub:org/set", "huggingface_hub"),
        ('"flatout[hub]"',),
        lambda w: without("huggingface_hub", w),
    ),
    Case(
        "a tokenizer of the hub that cannot be had",
        "prepare book.txt --out data/new --tokenizer org/model",
        ("org/model", "the cache has no", "cannot be reached"),
        ("tokenizer.json",),
        offline,
    ),
    Case(
        "Ray without the package for it",
        f"prepare book.txt {NEW} --engine ray",
        ("--engine ray",),
        ('"flatout[ray]"',),
        lambda w: without("ray", w),
    ),
    Case(
        "Ray and a part at once",
        f"prepare book.txt {NEW} --engine ray --part 1/2",
        ("--engine ray", "--part"),
        ("Leave one",),
    ),
    Case("an unknown engine", f"prepare book.txt {NEW} --engine spark", ("'spark'",), ("ray",)),
    Case(
        "an address to write to without the package for it",
        "prepare book.txt --out s3://bucket/new --tokenizer byte",
        ("s3://bucket/new", "s3fs"),
        ('"flatout[s3]"',),
        lambda w: without("s3fs", w),
    ),
    Case(
        "parts of a data set at an address",
        "prepare book.txt --out s3://bucket/new --part 1/2",
        ("--part", "s3://bucket/new"),
        ("shared directory",),
    ),
    Case(
        "a secret in the address of a data set",
        "prepare book.txt --out s3://me:pass@bucket/new",
        ("s3://bucket/new", "password"),
        ("profile",),
    ),
    Case(
        "a packed tokenizer",
        "prepare book.txt --out data/new --tokenizer tok.json.gz",
        ("tok.json.gz",),
        ("gunzip",),
    ),
    Case(
        "a file for a data set that is not named",
        f"prepare book.txt {NEW} --from book.txt",
        ("--from",),
        ("shakespeare",),
    ),
    Case(
        "another file for a data set",
        f"prepare shakespeare {NEW} --from book.txt",
        ("book.txt", "SHA-256"),
        ("without --from",),
    ),
    Case(
        "no worker",
        f"prepare book.txt {NEW} --workers 0",
        ("--workers 0",),
        ("Leave --workers out",),
    ),
]
