"""Tokens and weights that other programs wrote."""

import json

from case import Case, World, run_command

NEW = "--out data/new --tokenizer byte"
IMPORT = "import chunks --out data/new --tokenizer byte"


def chunks(world: World, *contents: object) -> None:
    """Write chunks with torch.save."""
    import torch

    (world.path / "chunks").mkdir()
    for number, content in enumerate(contents):
        torch.save(content, world.path / f"chunks/chunk_{number:06d}.pt")


def tensor(world: World, values: object, dtype: str = "int64") -> None:
    import torch

    chunks(world, torch.tensor(values, dtype=getattr(torch, dtype)))


def expanded_chunk(world: World, size: int) -> None:
    """Write a chunk that expands one number to many."""
    import torch

    chunks(world, torch.zeros(1, dtype=torch.int64).expand(size))


def weights(world: World, name: str) -> None:
    """Write another program's model with torch.save."""
    import torch

    torch.save({"model": torch.zeros(3)}, world.path / name)


def raw_tokens(world: World) -> None:
    """Write tokens as nanoGPT does."""
    world.write("train.bin", bytes(range(256)) * 8)


def second_dataset(world: World) -> None:
    assert run_command("prepare book.txt --out data/more --tokenizer byte", world.path).code == 0


def chunks_imported(world: World) -> None:
    assert run_command(IMPORT, world.path).code == 0


class Anything:
    """An object that a pickle may contain besides weights."""


CASES = [
    Case(
        "a URL as --out of `import`",
        "import chunks --out s3://bucket/set --tokenizer byte",
        ("--out s3://bucket/set is a URL",),
        ("a local path",),
        lambda w: tensor(w, [1]),
    ),
    Case("chunks that do not exist", IMPORT, ("chunks", "not a directory"), ("chunk_NNNNNN.pt",)),
    Case(
        "a directory without chunks",
        "import data --out data/new --tokenizer byte",
        ("data", "chunk_NNNNNN.pt"),
        ("Name the directory",),
    ),
    Case(
        "weights of another program for `inspect`",
        "inspect best_model.pt",
        ("best_model.pt is a PyTorch file",),
        ("train.init_from=best_model.pt",),
        lambda w: weights(w, "best_model.pt"),
    ),
    Case(
        "chunks instead of text",
        f"prepare chunks {NEW}",
        ("chunks is a directory of token chunks",),
        ("`flatout import chunks --out data/chunks --tokenizer FILE`",),
        lambda w: tensor(w, [1]),
    ),
    Case(
        "chunks instead of a dataset",
        "train my.yaml data.path=chunks",
        ("chunks is a directory of token chunks",),
        ("`flatout import chunks --out data/chunks --tokenizer FILE`",),
        lambda w: tensor(w, [1]),
    ),
    Case(
        "raw tokens instead of text",
        f"prepare train.bin {NEW}",
        ("train.bin is a binary file",),
        ("torch.save", "`flatout import"),
        raw_tokens,
    ),
    Case(
        "a dataset instead of a run",
        "generate data/book",
        ("data/book is a prepared dataset",),
        ("`flatout train",),
    ),
    Case(
        "a run instead of a dataset",
        "inspect runs/first",
        ("runs/first is a run directory",),
        ("`flatout generate",),
    ),
    Case(
        "a missing chunk",
        IMPORT,
        ("no chunk 1",),
        ("Copy the missing files",),
        lambda w: (chunks(w, 0, 1, 2), (w.path / "chunks/chunk_000001.pt").unlink()),
    ),
    Case(
        "two chunks with one number",
        IMPORT,
        ("more than one chunk number 0",),
        ("Remove",),
        lambda w: (chunks(w, 0), w.write("chunks/chunk_0.pt", "x")),
    ),
    Case(
        "a chunk of floating-point numbers",
        IMPORT,
        ("chunk_000000.pt", "float32", "int64"),
        ("torch.save",),
        lambda w: tensor(w, [1.0], "float32"),
    ),
    Case(
        "a two-dimensional chunk",
        IMPORT,
        ("chunk_000000.pt", "(1, 2)"),
        ("1-D",),
        lambda w: tensor(w, [[1, 2]]),
    ),
    Case(
        "a chunk that is not a tensor",
        IMPORT,
        ("chunk_000000.pt", "list"),
        ("torch.save",),
        lambda w: chunks(w, [1, 2]),
    ),
    Case(
        "a chunk that torch did not write",
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
        lambda w: expanded_chunk(w, 9_000),
    ),
    Case(
        "a chunk from another tokenizer",
        IMPORT,
        ("chunk_000000.pt, token 2", "999", "257"),
        ("--tokenizer",),
        lambda w: tensor(w, [1, 2, 999]),
    ),
    Case(
        "fewer chunks than metadata.json states",
        IMPORT,
        ("metadata.json", "num_chunks 2", "1"),
        ("Copy the missing chunks",),
        lambda w: (
            tensor(w, [1, 2, 256]),
            w.write("chunks/metadata.json", json.dumps({"num_chunks": 2})),
        ),
    ),
    Case(
        "an import into a directory with another dataset",
        f"{IMPORT} --split 'tail 0.5'",
        ("data/new", "split is 'tail 0.1', and 'tail 0.5' is requested"),
        ("another --out",),
        lambda w: (tensor(w, [1, 2, 256] * 10), chunks_imported(w)),
    ),
    Case(
        "chunks split by the hash of text",
        f"{IMPORT} --split 'hash 0.1'",
        ("'hash 0.1'",),
        ("'tail 0.1'",),
        lambda w: tensor(w, [1, 2, 256]),
    ),
    Case(
        "training a tokenizer on tokens",
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
        "`verify` without a dataset",
        "verify runs",
        ("runs", "manifest.json"),
        ("flatout prepare",),
    ),
    Case(
        "length-buckets with a mix",
        "train my.yaml speedups=+length-buckets 'data.mix={data/book: 3, data/more: 1}'",
        ("'length-buckets'", "mix"),
        ("Leave it out: speedups=auto",),
        second_dataset,
    ),
]
