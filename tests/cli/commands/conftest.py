"""A tiny trained run for the tests of commands."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from tiny import TINY_SHAPE


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """The directory of a run of two steps, trained on characters of a short text."""
    from flatout.cli.commands.prepare import prepare
    from flatout.cli.commands.train import train
    from flatout.config.schema import load_config

    root = tmp_path_factory.mktemp("tiny")
    (root / "book.txt").write_text(
        "It was a dark and stormy night; the rain fell in torrents. " * 150
    )
    prepare([str(root / "book.txt")], root / "data", tokenizer="char", split="tail 0.1", workers=1)
    words = [*TINY_SHAPE, f"data.path={root / 'data'}", "train.steps=2"]
    config = load_config(None, words)
    train(config, run=root / "runs" / "tiny")
    return root / "runs" / "tiny"
