"""Tokens that another program made, and how they are read."""

import json

from asking import Case, World, ask

NEW = "--out data/new --tokenizer byte"
IMPORT = "import chunks --out data/new --tokenizer byte"


def chunks(world: World, *contents: object) -> None:
    """Chunks as torch.save writes them."""
    import torch

    (world.path / "chunks").mkdir()
    for number, content in enumerate(contents):
        torch.save(content, world.path / f"chunks/chunk_{number:06d}.pt")


def tensor(world: World, values: object, dtype: str = "int64") -> None:
    import torch

    chunks(world, torch.tensor(values, dtype=getattr(torch, dtype)))


def expanded(world: World, size: int) -> None:
    """One number, said to be many."""
    import torch

    chunks(world, torch.zeros(1, dtype=torch.int64).expand(size))


def weights(world: World, name: str) -> None:
    """What torch.save writes of another program's model."""
    import torch

    torch.save({"model": torch.zeros(3)}, world.path / name)


def raw(world: World) -> None:
    """Tokens as nanoGPT writes them."""
    world.write("train.bin", bytes(range(256)) * 8)


def more(world: World) -> None:
    assert ask("prepare book.txt --out data/more --tokenizer byte", world.path).code == 0


def imported(world: World) -> None:
    assert ask(IMPORT, world.path).code == 0


class Anything:
    """What a pickle may hold besides weights."""


CASES = [
    Case(
        "an import to an address",
        "import chunks --out s3://bucket/set --tokenizer byte",
        ("--out s3://bucket/set is a URL",),
        ("a local path",),
        lambda w: tensor(w, [1]),
    ),
    Case("chunks that are not there", IMPORT, ("chunks", "not a directory"), ("chunk_NNNNNN.pt",)),
    Case(
        "a directory without chunks",
        "import data --out data/new --tokenizer byte",
        ("data", "chunk_NNNNNN.pt"),
        ("Name the directory",),
    ),
    Case(
        "weights of another program to begin with",
        "train my.yaml train.init_from=best_model.pt",
        ("best_model.pt is a PyTorch file",),
        ("cannot load", "`flatout import"),
        lambda w: weights(w, "best_model.pt"),
    ),
    Case(
        "weights of another program to inspect",
        "inspect best_model.pt",
        ("best_model.pt is a PyTorch file",),
        ("cannot load",),
        lambda w: weights(w, "best_model.pt"),
    ),
    Case(
        "chunks where text is read",
        f"prepare chunks {NEW}",
        ("chunks is a directory of token chunks",),
        ("`flatout import chunks --out data/chunks --tokenizer FILE`",),
        lambda w: tensor(w, [1]),
    ),
    Case(
        "chunks to train on",
        "train my.yaml data.path=chunks",
        ("chunks is a directory of token chunks",),
        ("`flatout import chunks --out data/chunks --tokenizer FILE`",),
        lambda w: tensor(w, [1]),
    ),
    Case(
        "raw tokens where text is read",
        f"prepare train.bin {NEW}",
        ("train.bin is a binary file",),
        ("torch.save", "`flatout import"),
        raw,
    ),
    Case(
        "a dataset where a run is expected",
        "generate data/book",
        ("data/book is a prepared dataset",),
        ("`flatout train",),
    ),
    Case(
        "a run where a dataset is expected",
        "inspect runs/first",
        ("runs/first is a run directory",),
        ("`flatout generate",),
    ),
    Case(
        "a chunk that is missing",
        IMPORT,
        ("no chunk 1",),
        ("Copy the missing files",),
        lambda w: (chunks(w, 0, 1, 2), (w.path / "chunks/chunk_000001.pt").unlink()),
    ),
    Case(
        "two chunks of one number",
        IMPORT,
        ("more than one chunk number 0",),
        ("Remove",),
        lambda w: (chunks(w, 0), w.write("chunks/chunk_0.pt", "x")),
    ),
    Case(
        "a chunk of numbers that are not whole",
        IMPORT,
        ("chunk_000000.pt", "float32", "int64"),
        ("torch.save",),
        lambda w: tensor(w, [1.0], "float32"),
    ),
    Case(
        "a chunk of two dimensions",
        IMPORT,
        ("chunk_000000.pt", "(1, 2)"),
        ("1-D",),
        lambda w: tensor(w, [[1, 2]]),
    ),
    Case(
        "a chunk that is no tensor",
        IMPORT,
        ("chunk_000000.pt", "list"),
        ("torch.save",),
        lambda w: chunks(w, [1, 2]),
    ),
    Case(
        "a chunk that is no file of torch's",
        IMPORT,
        ("chunk_000000.pt",),
        ("torch.save",),
        lambda w: w.write("chunks/chunk_000000.pt", "not a pickle"),
    ),
    Case(
        "a chunk that would run code",
        IMPORT,
        ("chunk_000000.pt", "code in a file is never run"),
        ("one tensor",),
        lambda w: chunks(w, Anything()),
    ),
    Case(
        "an expanded chunk",
        IMPORT,
        ("chunk_000000.pt", "9,000 elements in 8 bytes"),
        ("tokens.clone()",),
        lambda w: expanded(w, 9_000),
    ),
    Case(
        "a chunk of another tokenizer",
        IMPORT,
        ("chunk_000000.pt, token 2", "999", "257"),
        ("--tokenizer",),
        lambda w: tensor(w, [1, 2, 999]),
    ),
    Case(
        "chunks of which more were written",
        IMPORT,
        ("metadata.json", "num_chunks 2", "1"),
        ("Copy the missing chunks",),
        lambda w: (
            tensor(w, [1, 2, 256]),
            w.write("chunks/metadata.json", json.dumps({"num_chunks": 2})),
        ),
    ),
    Case(
        "an import into a folder that holds another",
        f"{IMPORT} --split 'tail 0.5'",
        ("data/new", "split is 'tail 0.1', and 'tail 0.5' is requested"),
        ("another --out",),
        lambda w: (tensor(w, [1, 2, 256] * 10), imported(w)),
    ),
    Case(
        "chunks split by the hash of text",
        f"{IMPORT} --split 'hash 0.1'",
        ("'hash 0.1'",),
        ("'tail 0.1'",),
        lambda w: tensor(w, [1, 2, 256]),
    ),
    Case(
        "a tokenizer trained on tokens",
        "import chunks --out data/new --tokenizer train:300",
        ("tokens already",),
        ("--tokenizer FILE",),
        lambda w: tensor(w, [1]),
    ),
    Case(
        "too few tokens for two splits",
        f"{IMPORT} --split 'tail 0.1'",
        ("chunks", "1 token"),
        ("'tail 0.5'",),
        lambda w: tensor(w, [1]),
    ),
    Case(
        "a check of what is no data set",
        "verify runs",
        ("runs", "manifest.json"),
        ("flatout prepare",),
    ),
    Case(
        "rows by length of a mix",
        "train my.yaml speedups=+length-buckets 'data.mix={data/book: 3, data/more: 1}'",
        ("'length-buckets'", "mix"),
        ("Leave it out: speedups=auto",),
        more,
    ),
]
