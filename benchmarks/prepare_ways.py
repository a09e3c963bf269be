"""Tools that convert a directory of JSONL to packed tokens, each used as its documentation shows.

`benchmarks/prepare.py` runs each in a fresh process, as

    python benchmarks/prepare_ways.py WAY CORPUS OUT --ranks gpt2.tiktoken \\
        --vocabulary tokenizer.json --workers 2

and times it from the start of Python. The last line of output is the number of tokens written,
including end-of-text; exit code 3 means that the package is not installed.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
NOT_INSTALLED = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=list(WAYS))
    for name in ("corpus", "out", "--ranks", "--vocabulary"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    try:
        tokens = WAYS[arguments.way](arguments)
    except ImportError as error:
        print(error, file=sys.stderr)
        raise SystemExit(NOT_INSTALLED) from error
    print(tokens)


def encoding(ranks: Path) -> Any:
    """Return tiktoken's GPT-2 encoding, from a local file instead of a download."""
    import tiktoken

    lines = (line.split() for line in ranks.read_bytes().splitlines() if line)
    pieces = {base64.b64decode(piece): int(rank) for piece, rank in lines}
    return tiktoken.Encoding(
        "gpt2",
        pat_str=GPT2_PATTERN,
        mergeable_ranks=pieces,
        special_tokens={"<|endoftext|>": 50_256},
    )


def datasets_map(arguments: argparse.Namespace) -> int:
    """`datasets.map` with tiktoken, one document per call, then a memory map.

    nanoGPT prepares OpenWebText this way.
    """
    import datasets

    files = sorted(map(str, arguments.corpus.glob("*.jsonl")))
    loaded = datasets.load_dataset(
        "json", data_files=files, num_proc=arguments.workers, cache_dir=str(arguments.out / "cache")
    )
    splits = loaded["train"].train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    encode = partial(_encoded, encoding=encoding(arguments.ranks))
    tokenised = splits.map(
        encode, remove_columns=splits["train"].column_names, num_proc=arguments.workers
    )
    return sum(_written(rows, arguments.out / f"{name}.bin") for name, rows in tokenised.items())


def _encoded(row: dict[str, Any], *, encoding: Any) -> dict[str, Any]:
    ids = encoding.encode_ordinary(row["text"])
    ids.append(encoding.eot_token)
    return {"ids": ids, "len": len(ids)}


def _written(rows: Any, path: Path, batches: int = 1024) -> int:
    total = int(np.sum(rows["len"], dtype=np.uint64))
    tokens = np.memmap(path, np.uint16, "w+", shape=(total,))
    start, batches = 0, min(batches, len(rows))
    for index in range(batches):
        batch = np.concatenate(
            rows.shard(num_shards=batches, index=index, contiguous=True).with_format("numpy")["ids"]
        )
        tokens[start : start + len(batch)] = batch
        start += len(batch)
    tokens.flush()
    return total


def datatrove(arguments: argparse.Namespace) -> int:
    """datatrove's tokenisation, one task per worker.

    The files of its tasks are not merged, which would take longer.
    """
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(arguments.corpus)),
        DocumentTokenizer(
            str(arguments.out / "tokens"),
            str(arguments.vocabulary),
            eos_token="<|endoftext|>",
            shuffle_documents=False,
        ),
    ]
    LocalPipelineExecutor(
        steps,
        tasks=arguments.workers,
        workers=arguments.workers,
        logging_dir=str(arguments.out / "logs"),
    ).run()
    return sum(file.stat().st_size for file in (arguments.out / "tokens").glob("*.ds")) // 2


def litdata(arguments: argparse.Namespace) -> int:
    """litdata's `optimize` with its token loader, one input per file."""
    import litdata

    inputs = sorted(map(str, arguments.corpus.glob("*.jsonl")))
    tokenise = partial(_documents, ranks=arguments.ranks)
    litdata.optimize(
        tokenise,
        inputs,
        str(arguments.out / "tokens"),
        chunk_bytes="64MB",
        num_workers=arguments.workers,
        item_loader=litdata.TokensLoader(),
        verbose=False,
    )
    index = json.loads((arguments.out / "tokens" / "index.json").read_text())
    return sum(chunk["dim"] for chunk in index["chunks"])


def _documents(file: str, *, ranks: Path) -> Any:
    import torch

    tokenizer = encoding(ranks)
    with open(file) as rows:
        for row in rows:
            ids = tokenizer.encode_ordinary(json.loads(row)["text"])
            ids.append(tokenizer.eot_token)
            yield torch.tensor(ids, dtype=torch.uint16)


def flatout(arguments: argparse.Namespace) -> int:
    """`flatout prepare` with its defaults."""
    from flatout.cli.main import main
    from flatout.data.store.shards import Dataset

    data = arguments.out / "data"
    words = ["prepare", arguments.corpus, "--out", data, "--tokenizer", arguments.ranks]
    sys.argv = ["flatout", *map(str, words), "--workers", str(arguments.workers)]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    return Dataset.open(data).manifest.tokens


def flatout_tokenizers(arguments: argparse.Namespace) -> int:
    """`flatout prepare` without gigatoken."""
    sys.modules["gigatoken"] = None  # type: ignore[assignment]  # makes every later import fail
    return flatout(arguments)


WAYS: dict[str, Callable[[argparse.Namespace], int]] = {
    "flatout": flatout,
    "flatout, tokenizers alone": flatout_tokenizers,
    "datasets.map, tiktoken, memmap": datasets_map,
    "litdata optimize, tiktoken": litdata,
    "datatrove, tokenizers": datatrove,
}

if __name__ == "__main__":
    main()
