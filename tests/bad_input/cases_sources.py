"""Preparing: tokenizers, rows, file formats, URLs, engines."""

import gzip
import io
import sys
from pathlib import Path

from case import Case, World, table

NEW = "--out data/new --tokenizer byte"


def unreadable_tokenizer(world: World) -> None:
    """Reject to read a tokenizer; file permissions do not apply to every user."""
    read = Path.read_bytes

    def guarded(path: Path) -> bytes:
        # Relative, as commands name it; `contents` reads files by absolute paths.
        if path == Path("data/book/tokenizer.json"):
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


def without(package: str, world: World) -> None:
    world.patch.setitem(sys.modules, package, None)


def offline(world: World) -> None:
    """Make the Hugging Face hub unreachable and its cache empty."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def not_found(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("not cached")

    world.patch.setattr(huggingface_hub, "hf_hub_download", not_found)


def standard_input(world: World, data: bytes) -> None:
    world.patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


CASES = [
    *table("""
a home directory that does not exist
    prepare book.txt --out '~nobody-there/set'
    ~nobody-there/set -> starting with /
a tokenizer in a home directory that does not exist
    prepare book.txt --out data/new --tokenizer '~nobody-there/tokenizer.json'
    ~nobody-there/tokenizer.json -> starting with /
a directory without a tokenizer
    prepare book.txt --out data/new --tokenizer data
    data | tokenizer.json -> byte
a pattern for a tokenizer that is trained
    prepare book.txt --out data/new --tokenizer train:300 --pattern x
    --pattern 'x' has no effect on the tokenizer train:300 -> Remove --pattern
an end-of-text token of a tokenizer without a choice
    prepare book.txt --out data/new --tokenizer byte --end-of-text X
    --end-of-text 'X' has no effect on the tokenizer byte -> Remove --end-of-text
an end-of-text token of a .tiktoken file
    import data/book/00000.bin --out data/new --dtype uint16 --tokenizer a.tiktoken --end-of-text X
    --end-of-text 'X' has no effect on the tokenizer a.tiktoken -> Remove --end-of-text
"""),
    Case(
        "an empty --pattern",
        "prepare book.txt --out data/new --tokenizer own.tiktoken --pattern ''",
        ("--pattern",),
        ("regular expression",),
        lambda w: w.write("own.tiktoken", "YQ== 0\n"),
    ),
    Case(
        "a rank too large for any vocabulary",
        "prepare book.txt --out data/new --tokenizer own.tiktoken --pattern .",
        ("own.tiktoken, line 2", "1,099,511,627,776"),
        ("complete .tiktoken",),
        lambda w: w.write("own.tiktoken", "YQ== 0\nYg== 1099511627776\n"),
    ),
    Case(
        "a tokenizer without read permission",
        "prepare book.txt --out data/new --tokenizer data/book/tokenizer.json",
        ("data/book/tokenizer.json", "Permission denied"),
        ("permissions",),
        unreadable_tokenizer,
    ),
    Case(
        "a dataset whose tokenizer cannot be read",
        "inspect data/book",
        ("data/book/tokenizer.json", "Permission denied"),
        ("permissions",),
        unreadable_tokenizer,
    ),
    Case(
        "a misspelt nested field",
        f"prepare odd.jsonl {NEW} --text-field meta.txt",
        ("odd.jsonl, line 1", "'meta.txt'"),
        ("--text-field meta.text",),
        lambda w: w.write("odd.jsonl", '{"meta": {"text": "one"}}\n'),
    ),
    Case(
        "null as text",
        f"prepare odd.jsonl {NEW}",
        ("odd.jsonl, line 1", "'text'", "null"),
        ("--text-field",),
        lambda w: w.write("odd.jsonl", '{"text": null}\n'),
    ),
    Case(
        "a row that is not an object",
        f"prepare odd.jsonl {NEW}",
        ("odd.jsonl, line 1",),
        ('{"text": "..."}',),
        lambda w: w.write("odd.jsonl", '["one"]\n'),
    ),
    Case(
        "the text as its own mask field",
        f"prepare book.txt {NEW} --mask-field text",
        ("the same field", "'text'"),
        ("the field of the prompt", "--mask-field"),
    ),
    Case(
        "a mask field for text without rows",
        f"prepare book.txt {NEW} --mask-field prompt",
        ("book.txt has no rows", "--mask-field"),
        ("Remove them", ".jsonl"),
    ),
    Case(
        "an empty .gz file",
        f"prepare a.txt.gz {NEW}",
        ("a.txt.gz", "empty document"),
        ("text in it",),
        lambda w: w.write("a.txt.gz", gzip.compress(b"")),
    ),
    Case(
        "a .gz file of zero bytes",
        f"prepare a.txt.gz {NEW}",
        ("a.txt.gz", "empty document"),
        ("text in it",),
        lambda w: w.write("a.txt.gz", b""),
    ),
    Case(
        "empty standard input",
        f"prepare - {NEW}",
        ("-", "empty document"),
        ("text in it",),
        lambda w: standard_input(w, b""),
        progress="0 bytes",
        may_change=("data/.stdin-",),
    ),
    Case("standard input named twice", f"prepare - - {NEW}", ("twice",), ("once",)),
    Case(
        "a Parquet file without pyarrow",
        f"prepare a.parquet {NEW}",
        ("a.parquet", "pyarrow"),
        ('"flatout[parquet]"',),
        lambda w: (w.write("a.parquet", "PAR1"), without("pyarrow", w)),
    ),
    Case(
        "a Parquet file without the text column",
        f"prepare a.parquet {NEW}",
        ("a.parquet", "'text'"),
        ("--text-field body",),
        lambda w: parquet(w, {"body": ["one", "two"]}),
    ),
    Case(
        "a truncated Parquet file",
        f"prepare a.parquet {NEW}",
        ("a.parquet",),
        ("complete",),
        lambda w: w.write("a.parquet", parquet(w, {"text": ["one"] * 100})[:-20]),
    ),
    Case(
        "an s3:// URL without s3fs",
        f"prepare s3://bucket/a.txt {NEW}",
        ("s3://bucket/a.txt", "s3fs"),
        ('"flatout[s3]"',),
        lambda w: without("s3fs", w),
    ),
    Case(
        "a URL with nothing behind it",
        f"prepare memory://nowhere/a.txt {NEW}",
        ("memory://nowhere/a.txt",),
        ("Check the URL",),
    ),
    Case(
        "an unknown parameter of hub:",
        f"prepare hub:org/set:splitt=train {NEW}",
        ("'hub'", "'splitt'"),
        ("split", "revision"),
    ),
    Case(
        "a Hugging Face dataset without its package",
        f"prepare hub:org/set {NEW}",
        ("hub:org/set", "huggingface_hub"),
        ('"flatout[hub]"',),
        lambda w: without("huggingface_hub", w),
    ),
    Case(
        "a Hugging Face tokenizer without a connection",
        "prepare book.txt --out data/new --tokenizer org/model",
        ("org/model", "is not in the cache", "cannot be reached"),
        ("tokenizer.json",),
        offline,
    ),
    Case(
        "--engine ray without ray",
        f"prepare book.txt {NEW} --engine ray",
        ("--engine ray",),
        ('"flatout[ray]"',),
        lambda w: without("ray", w),
    ),
    Case(
        "--engine ray and --part together",
        f"prepare book.txt {NEW} --engine ray --part 1/2",
        ("--engine ray", "--part"),
        ("Remove one",),
    ),
    Case("an unknown engine", f"prepare book.txt {NEW} --engine spark", ("'spark'",), ("ray",)),
    *table("""
a compressed tokenizer
    prepare book.txt --out data/new --tokenizer tok.json.gz
    tok.json.gz -> gunzip
"""),
    Case(
        "--from without a dataset card",
        f"prepare book.txt {NEW} --from book.txt",
        ("--from",),
        ("shakespeare",),
    ),
    Case(
        "--from with a different file",
        f"prepare shakespeare {NEW} --from book.txt",
        ("book.txt has 3540 bytes, not 1115394",),
        ("without --from",),
    ),
]
