"""Tokens and weights that other tools wrote."""

import json

from case import World, case, nothing, run_command, written

NEW = "--out data/new --tokenizer byte"
MIX = "'data.mix={data/book: 3, data/more: 1}'"
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


def weights(world: World, name: str) -> None:
    """Write another tool's model with torch.save."""
    import torch

    torch.save({"model": torch.zeros(3)}, world.path / name)


def raw_tokens(world: World) -> None:
    """Write tokens as nanoGPT does."""
    world.write("train.bin", bytes(range(256)) * 8)


def megatron(world: World) -> None:
    """Write a dataset of Megatron."""
    world.write("old.bin", bytes(range(8)))
    world.write("old.idx", b"MMIDIDX\0\0" + bytes(25))


def archive(world: World) -> None:
    """Write arrays with numpy.savez."""
    import numpy as np

    np.savez(world.path / "tokens.npz", ids=np.arange(50))


def pickled_array(world: World) -> None:
    """Write an array of Python objects."""
    import numpy as np

    np.save(world.path / "tokens.npy", np.array([{}, None]), allow_pickle=True)


def second_dataset(world: World) -> None:
    assert run_command("prepare book.txt --out data/more --tokenizer byte", world.path).code == 0


def chunks_imported(world: World) -> None:
    assert run_command(IMPORT, world.path).code == 0


class Anything:
    """An object that a pickle may contain besides weights."""


CASES = [
    case(
        "a URL as --out of `import`",
        "import chunks --out s3://bucket/set --tokenizer byte",
        "--out s3://bucket/set is a URL",
        "a local path",
        lambda w: tensor(w, [1]),
    ),
    case("tokens that do not exist", IMPORT, "no file chunks", "train.bin"),
    case(
        "a directory without tokens",
        "import data --out data/new --tokenizer byte",
        ("data", "no token files"),
        "Name the directory",
    ),
    case(
        "text instead of tokens",
        "import book.txt --out data/new --tokenizer byte",
        ("book.txt", "not a token file"),
        "`flatout prepare book.txt",
    ),
    case(
        "a token file with half a token",
        "import train.bin --out data/new --tokenizer byte",
        ("train.bin", "2,049 bytes", "uint16"),
        ("truncated", "--dtype"),
        written("train.bin", bytes(range(256)) * 8 + b"\0"),
    ),
    case(
        "raw tokens of a different tokenizer",
        "import train.bin --out data/new --tokenizer byte",
        ("train.bin, token 1", "outside the vocabulary"),
        "--tokenizer",
        raw_tokens,
        progress="train.bin is read as uint16",
    ),
    case(
        "tokens without the name of their tokenizer",
        "import train.bin --out data/new",
        ("train.bin", "not known which tokenizer"),
        ("--tokenizer FILE", "ids:N"),
        raw_tokens,
    ),
    case(
        "an unknown type of tokens",
        "import train.bin --out data/new --tokenizer byte --dtype float16",
        "'float16'",
        "uint16",
        raw_tokens,
    ),
    case(
        "an option of `import` that was removed",
        "import train.bin --out data/new --tokenizer byte --format megatron",
        "--format",
        "`flatout.write_dataset`",
        raw_tokens,
    ),
    case(
        "a number of ids that is not one",
        "import train.bin --out data/new --tokenizer ids:many",
        "ids:many",
        "ids:50257",
        raw_tokens,
    ),
    case(
        "a split of tokens that have one",
        "import . --out data/new --tokenizer byte --split 'tail 0.5'",
        ("val.bin", "'tail 0.5'"),
        "Remove --split",
        lambda w: (w.write("train.bin", b"\1\0" * 9), w.write("val.bin", b"\1\0" * 9)),
    ),
    case(
        "an array that needs a pickle",
        "import tokens.npy --out data/new --tokenizer byte",
        ("tokens.npy", "Python objects"),
        "never read",
        pickled_array,
    ),
    case(
        "a Megatron dataset",
        "import old.bin --out data/new --tokenizer byte",
        "old.bin is the data of a Megatron dataset",
        "`flatout.write_dataset`",
        megatron,
    ),
    case(
        "a key of a file without keys",
        "import chunks --out data/new --tokenizer byte --field tokens",
        "chunk_000000.pt has no key 'tokens'",
        "Remove --field",
        lambda w: tensor(w, [1]),
    ),
    case(
        "weights instead of tokens",
        "import best_model.pt --out data/new --tokenizer byte",
        "best_model.pt has 0 keys of tokens",
        "train.init_from=best_model.pt",
        lambda w: weights(w, "best_model.pt"),
    ),
    case(
        "an archive of arrays",
        "import tokens.npz --out data/new --tokenizer byte",
        "tokens.npz is a NumPy archive,",
        "`flatout.write_dataset`",
        archive,
    ),
    case(
        "weights of another tool for `inspect`",
        "inspect best_model.pt",
        "best_model.pt is a PyTorch file",
        "train.init_from=best_model.pt",
        lambda w: weights(w, "best_model.pt"),
    ),
    case(
        "chunks instead of text",
        f"prepare chunks {NEW}",
        "chunks is a directory of token chunks",
        "`flatout import chunks --out data/chunks --tokenizer FILE`",
        lambda w: tensor(w, [1]),
    ),
    case(
        "chunks instead of a dataset",
        "train my.yaml data.path=chunks",
        "chunks is a directory of token chunks",
        "`flatout import chunks --out data/chunks --tokenizer FILE`",
        lambda w: tensor(w, [1]),
    ),
    case(
        "raw tokens instead of text",
        f"prepare train.bin {NEW}",
        "train.bin is a binary file",
        "`flatout import train.bin --out data/train --tokenizer FILE`",
        raw_tokens,
    ),
    case(
        "a dataset instead of a run",
        "generate data/book",
        "data/book is a prepared dataset",
        "`flatout train",
    ),
    case(
        "a run instead of a dataset",
        "inspect runs/first",
        "runs/first is a run directory",
        "`flatout generate",
    ),
    case(
        "a missing chunk",
        IMPORT,
        "no chunk 1",
        "Copy missing files",
        lambda w: (chunks(w, 0, 1, 2), (w.path / "chunks/chunk_000001.pt").unlink()),
    ),
    case(
        "two chunks with one number",
        IMPORT,
        "more than one chunk number 0",
        "remove what does not belong there",
        lambda w: (chunks(w, 0), w.write("chunks/chunk_0.pt", "x")),
    ),
    case(
        "a chunk of floating-point numbers",
        IMPORT,
        ("chunk_000000.pt", "float32", "integers"),
        "integer type",
        lambda w: tensor(w, [1.0], "float32"),
    ),
    case(
        "a chunk that is not a tensor",
        IMPORT,
        ("chunk_000000.pt", "list"),
        "torch.save",
        lambda w: chunks(w, [1, 2]),
    ),
    case(
        "a chunk that torch did not write",
        IMPORT,
        "chunk_000000.pt",
        "torch.save",
        written("chunks/chunk_000000.pt", "not a pickle"),
    ),
    case(
        "a chunk that would run code",
        IMPORT,
        ("chunk_000000.pt", "Reading them would execute code"),
        "save only its tensors",
        lambda w: chunks(w, Anything()),
    ),
    case(
        "a chunk from a different tokenizer",
        IMPORT,
        ("chunk_000000.pt, token 2", "999", "257"),
        "--tokenizer",
        lambda w: tensor(w, [1, 2, 999]),
    ),
    case(
        "fewer chunks than metadata.json states",
        IMPORT,
        ("metadata.json", "num_chunks 2", "1"),
        "Copy the missing files",
        lambda w: (
            tensor(w, [1, 2, 256]),
            w.write("chunks/metadata.json", json.dumps({"num_chunks": 2})),
        ),
    ),
    case(
        "metadata.json that states a different type of tokens",
        IMPORT,
        ("metadata.json", 'dtype "uint16"', "int64"),
        "Correct metadata.json",
        lambda w: (
            tensor(w, [1, 2, 256]),
            w.write("chunks/metadata.json", json.dumps({"dtype": "uint16"})),
        ),
    ),
    case(
        "an import into a directory with another dataset",
        f"{IMPORT} --split 'tail 0.5'",
        ("data/new", "split is 'tail 0.1', and 'tail 0.5' is requested"),
        "a different --out",
        lambda w: (tensor(w, [1, 2, 256] * 10), chunks_imported(w)),
    ),
    case(
        "chunks split by the hash of text",
        f"{IMPORT} --split 'hash 0.1'",
        "'hash 0.1'",
        "'tail 0.1'",
        lambda w: tensor(w, [1, 2, 256]),
    ),
    case(
        "training a tokenizer on tokens",
        "import chunks --out data/new --tokenizer train:300",
        "tokens already",
        "--tokenizer FILE",
        lambda w: tensor(w, [1]),
    ),
    case(
        "too few tokens for two splits",
        f"{IMPORT} --split 'tail 0.1'",
        ("chunks", "1 token"),
        "'tail 0.5'",
        lambda w: tensor(w, [1]),
    ),
    case("`verify` without a dataset", "verify runs", ("runs", "manifest.json"), "flatout prepare"),
    case(
        "length-buckets with a mix",
        "train my.yaml speedups=+length-buckets 'data.mix={data/book: 3, data/more: 1}'",
        ("'length-buckets'", "mix"),
        "Remove it: speedups=auto",
        second_dataset,
    ),
    case(
        "micro-batches by tokens without documents as rows",
        "train my.yaml batch.by_tokens=true",
        ("batch.by_tokens", "length-buckets"),
        "speedups=auto,-compile,+length-buckets",
    ),
    *(
        case(
            f"micro-batches by tokens with {key}",
            f"train my.yaml batch.by_tokens=true speedups=auto,+length-buckets {key}",
            "batch.by_tokens=true excludes data.mix and parallel.tensor, context and pipeline",
            "Remove batch.by_tokens, or the other key",
            second_dataset if key == MIX else nothing,
        )
        for key in ("parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2", MIX)
    ),
    case(
        "micro-batches by tokens in a compiled model",
        "train my.yaml batch.by_tokens=true speedups=auto,+length-buckets,+compile",
        ("'compile'", "batch.by_tokens"),
        "Remove it: speedups=auto,+length-buckets",
    ),
]
