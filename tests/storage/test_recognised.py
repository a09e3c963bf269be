import io
import re
import shlex
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import flatout
from flatout.cli.commands.generate import generate
from flatout.cli.main import main
from flatout.config.documents import read_document
from flatout.config.registry import recipe_path
from flatout.config.schema import RunConfig
from flatout.data.sources.files import files
from flatout.data.store.manifest import read_manifest
from flatout.data.store.shards import Dataset
from flatout.data.token_files import find_tokens
from flatout.data.tokenizers import load_tokenizer
from flatout.errors import ConfigError, FlatoutError, UsageError
from flatout.storage.recognised import recognise, require_local
from flatout.training.init_from import find_weights
from flatout.training.run_dir.lookup import find_run
from flatout.training.run_dir.start import find_start

TOKENS = np.arange(1000, dtype=np.uint16) % 256


def bytes_of(save):
    file = io.BytesIO()
    save(file)
    return file.getvalue()


FILES = {
    "best_model.pt": bytes_of(lambda file: torch.save({"model": torch.zeros(3)}, file)),
    "old.pth": bytes_of(
        lambda file: torch.save(torch.zeros(3), file, _use_new_zipfile_serialization=False)
    ),
    "pytorch_model.bin": bytes_of(lambda file: torch.save(torch.zeros(3), file)),
    "chunk_000003.pt": bytes_of(lambda file: torch.save(torch.zeros(3), file)),
    "model.safetensors": struct.pack("<Q", 2) + b'{"a":1}' + b"\xff\x80",
    "train.bin": TOKENS.tobytes(),
    "fineweb.bin": struct.pack("<3i", 20240520, 1, len(TOKENS)).ljust(1024, b"\0")
    + TOKENS.tobytes(),
    "tokens.npy": bytes_of(lambda file: np.save(file, TOKENS)),
    "tokens.npz": bytes_of(lambda file: np.savez(file, ids=TOKENS)),
}
NAMES = {
    "best_model.pt": "a PyTorch file",
    "old.pth": "a PyTorch file",
    "pytorch_model.bin": "a PyTorch file",
    "chunk_000003.pt": "a chunk of tokens",
    "model.safetensors": "a file of model weights",
    "train.bin": "a binary file",
    "fineweb.bin": "a file of tokens in llm.c's format",
    "tokens.npy": "a NumPy array",
    "tokens.npz": "a NumPy archive",
}


@pytest.fixture(params=sorted(FILES))
def file(request, tmp_path):
    path = tmp_path / "there" / request.param
    path.parent.mkdir()
    path.write_bytes(FILES[request.param])
    return path


TAKERS = {
    "prepare FILE": lambda path: files(str(path)),
    "prepare GLOB": lambda path: files(f"{path.parent}/*"),
    "prepare FOLDER": lambda path: files(str(path.parent)),
    "inspect FILE": read_manifest,
    "train data.path=FOLDER": lambda path: read_manifest(path.parent),
    "train FILE": read_document,
    "train train.init_from=FILE": lambda path: find_weights(str(path)),
    "train --resume FILE": lambda path: find_start(
        path.parent.parent / "run", RunConfig(), str(path)
    ),
    "generate FILE": find_run,
    "prepare --tokenizer FILE": lambda path: load_tokenizer(path),
}


@pytest.mark.parametrize("taker", sorted(TAKERS))
def test_every_use_of_a_path_names_the_kind_of_a_wrong_file(file, taker):
    with pytest.raises(FlatoutError) as caught:
        TAKERS[taker](file)
    folder_of_chunks = "FOLDER" in taker and file.name.startswith("chunk_")
    assert (
        "a directory of token chunks" if folder_of_chunks else NAMES[file.name]
    ) in caught.value.what
    assert "iconv" not in caught.value.fix
    assert "flatout prepare" not in caught.value.fix
    assert "**" not in caught.value.fix
    if file.name.startswith("chunk_") and "tokenizer" not in taker:
        assert (
            f"`flatout import {file.parent} --out data/there --tokenizer FILE`" in caught.value.fix
        )


def test_a_directory_of_chunks_is_recognised_wherever_it_is_named(tmp_path):
    (tmp_path / "chunks").mkdir()
    (tmp_path / "chunks" / "chunk_000000.pt").write_bytes(FILES["best_model.pt"])
    (tmp_path / "chunks" / "metadata.json").write_text("{}")
    takers = (
        lambda path: files(str(path)),
        read_manifest,
        Dataset.open,
        find_run,
        lambda path: find_weights(str(path)),
    )
    for taker in takers:
        with pytest.raises(FlatoutError, match="a directory of token chunks") as caught:
            taker(tmp_path / "chunks")
        assert (
            f"`flatout import {tmp_path / 'chunks'} --out data/chunks`, with --tokenizer FILE"
            in caught.value.fix
        )
    assert find_tokens(tmp_path / "chunks")


TOKEN_FILES = ["train.bin", "fineweb.bin", "tokens.npy"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKEN_FILES)
def test_the_suggested_command_imports_the_tokens(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(FILES[name])
    command = recognise(Path(name)).fix.split("`")[1]
    _, *words = shlex.split(command.replace("FILE", "byte"))
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert not stopped.value.code
    split = Dataset.open(words[words.index("--out") + 1]).split("train")
    assert split.read_tokens(0, split.num_tokens).tolist() == TOKENS[:900].tolist()


@pytest.mark.parametrize("name", sorted(FILES))
def test_import_reads_every_token_file_and_rejects_weights(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    if name in ("model.safetensors", "tokens.npz"):
        with pytest.raises(FlatoutError, match=f"{NAMES[name]}, not tokens"):
            find_tokens(tmp_path / name)
    else:
        assert find_tokens(tmp_path / name).files == (tmp_path / name,)


def test_both_files_of_nano_gpt_are_imported_together(tmp_path):
    for name in ("train.bin", "val.bin"):
        (tmp_path / name).write_bytes(FILES["train.bin"])
    assert f"`flatout import {tmp_path} --out" in recognise(tmp_path / "val.bin").fix


def test_both_files_of_a_megatron_dataset_are_recognised(tmp_path):
    (tmp_path / "corpus.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / "corpus.idx").write_bytes(b"MMIDIDX\0\0" + bytes(25))
    assert recognise(tmp_path / "corpus.bin").name == "the data of a Megatron dataset"
    assert recognise(tmp_path / "corpus.idx").name == "the index of a Megatron dataset"
    with pytest.raises(FlatoutError, match="a directory with corpus") as caught:
        files(str(tmp_path))
    assert "`flatout.write_dataset`" in caught.value.fix


@pytest.mark.parametrize("name", ["best_model.pt", "train.bin", "tokens.npy", "chunk_000003.pt"])
def test_the_name_of_a_file_is_one_word_of_every_command(tmp_path, name):
    folder = tmp_path / "$(touch X) & more"
    folder.mkdir()
    path = folder / name if name.startswith("chunk_") else folder / f"$(touch Y) {name}"
    path.write_bytes(FILES[name])
    commands = recognise(path).fix.split("`")[1::2]
    into = shlex.split(commands[-1])
    assert (
        into[into.index("--out") + 1]
        == f"data/{folder.name if name.startswith('chunk_') else path.stem}"
    )
    for command in commands:
        assert all(
            word in (str(path), str(folder), f"data/{path.stem}", f"data/{folder.name}")
            for word in shlex.split(command)
            if "touch" in word
        )


@pytest.mark.slow
def test_runs_checkpoints_and_datasets_are_distinguished(fox_run, tiny_set):
    fox_run = fox_run[0] / "runs" / "fox"
    with pytest.raises(FlatoutError, match="is a run directory, not a prepared dataset"):
        Dataset.open(fox_run)
    checkpoint = next((fox_run / "checkpoints").glob("step-*"))
    with pytest.raises(FlatoutError, match="is a checkpoint, not a prepared dataset"):
        Dataset.open(checkpoint)
    weights = next(checkpoint.glob("*.safetensors"))
    assert recognise(weights).fix == f"Name the checkpoint: train.init_from={checkpoint}."
    with pytest.raises(FlatoutError, match="is a prepared dataset, not a run directory") as caught:
        find_run(tiny_set)
    assert f"data.path={tiny_set}" in caught.value.fix
    with pytest.raises(FlatoutError, match="is a prepared dataset, not text"):
        files(str(tiny_set))
    shard = next(tiny_set.glob("*.bin"))
    assert recognise(shard).name == f"a file of the prepared dataset {tiny_set}"


@pytest.mark.parametrize("content", [b"", b"plain text", "Käfer".encode() * 2000, b"caf\xe9"])
@pytest.mark.parametrize("name", ["notes", "notes.txt", "notes.bin"])
def test_text_is_not_recognised_as_anything_else(tmp_path, name, content):
    if name == "notes.bin" and content == b"caf\xe9":
        content = b"cafe"
    (tmp_path / name).write_bytes(content)
    assert recognise(tmp_path / name) is None
    assert recognise(tmp_path) is None
    assert recognise(tmp_path / "absent") is None


def test_a_binary_file_among_texts_is_a_bad_document(tmp_path):
    (tmp_path / "a.pt").write_bytes(FILES["best_model.pt"])
    (tmp_path / "b.log").write_text("text")
    (task,) = files(f"{tmp_path}/*")
    assert [Path(piece.path).name for piece in task.arguments[0]] == ["a.pt", "b.log"]


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/x",
        "gs://bucket",
        "file:///data/x",
        "hf://datasets/a/b",
        "S3://bucket",
        "https://example.org/x",
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_the_error_shows_a_url_as_written(url, kind):
    with pytest.raises(UsageError, match=re.escape(f"--run-dir {url} is a URL")):
        require_local(kind(url), "--run-dir ")


def test_a_recipe_at_a_url_is_rejected():
    for url in ("http://host/r.yaml", "s3://bucket/recipe"):
        with pytest.raises(ConfigError, match=f"^{url} is a URL"):
            recipe_path(url)


@pytest.mark.parametrize(
    "path",
    ["", "auto", "runs/x", "/data:/x", "./s3:/x", "x:1", "notes: a/b", "../gs://x", "~/runs"],
)
def test_a_path_is_not_a_url(path):
    require_local(path)


CALLS = {
    "train": lambda: flatout.train("shakespeare-char", ["data.path=there"], run="s3://bucket/run"),
    "train --resume": lambda: flatout.train(
        "shakespeare-char", ["data.path=there"], resume="s3://bucket/run"
    ),
    "init_from": lambda: flatout.train(
        "shakespeare-char", ["data.path=there", "train.init_from=gs://bucket/run"]
    ),
    "generate": lambda: generate("s3://bucket/run"),
    "eval": lambda: flatout.evaluate("s3://bucket/run"),
    "bench": lambda: flatout.bench(
        "shakespeare-char", ["data.path=there"], out="s3://bucket/bench"
    ),
    "import": lambda: flatout.import_chunks("chunks", "s3://bucket/data", "byte"),
    "runs": lambda: flatout.runs("s3://bucket/runs"),
    "tokenizer": lambda: flatout.prepare(
        ["book.txt"], "out", tokenizer="s3://bucket/tokenizer.json"
    ),
    "from": lambda: flatout.prepare(["shakespeare"], "out", from_file="s3://bucket/input.txt"),
    "find_weights": lambda: find_weights("s3://bucket/run"),
    "Dataset.open": lambda: Dataset.open("s3://bucket/data"),
}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_a_url_is_never_used_as_a_directory(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("some text " * 50)
    with pytest.raises(UsageError, match=r"(s3|gs)://bucket/\S+ is a URL. Only a local path"):
        CALLS[call]()
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]
