import io
import re
import shlex
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import flatout
from flatout.commands.generate import generate
from flatout.data.prepare.import_chunks import find_chunks, read_chunk
from flatout.data.store.manifest import read_manifest
from flatout.data.store.shards import Dataset
from flatout.data.tokenizers import load_tokenizer, make_tokenizer
from flatout.documents import read_document
from flatout.errors import ConfigError, FlatoutError, UsageError
from flatout.recognised import recognise, require_local
from flatout.registry import recipe_path
from flatout.sources.files import find_files
from flatout.training.init_from import find_weights
from flatout.training.run_dir.lookup import find_run
from flatout.training.run_dir.resume import resume_from

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
    "fineweb.bin": struct.pack("<i", 20240520).ljust(1024, b"\0") + TOKENS.tobytes(),
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
    "fineweb.bin": "a binary file",
    "tokens.npy": "a NumPy array",
    "tokens.npz": "a NumPy archive of ids",
}


@pytest.fixture(params=sorted(FILES))
def file(request, tmp_path):
    path = tmp_path / "there" / request.param
    path.parent.mkdir()
    path.write_bytes(FILES[request.param])
    return path


TAKERS = {
    "prepare FILE": lambda path: find_files(str(path)),
    "prepare GLOB": lambda path: find_files(f"{path.parent}/*"),
    "prepare FOLDER": lambda path: find_files(str(path.parent)),
    "inspect FILE": read_manifest,
    "train data.path=FOLDER": lambda path: read_manifest(path.parent),
    "train FILE": read_document,
    "train train.init_from=FILE": lambda path: find_weights(str(path)),
    "train --resume FILE": lambda path: resume_from(path.parent.parent / "run", str(path)),
    "generate FILE": find_run,
    "import FILE": find_chunks,
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
        lambda path: find_files(str(path)),
        read_manifest,
        Dataset.open,
        find_run,
        lambda path: find_weights(str(path)),
    )
    for taker in takers:
        with pytest.raises(FlatoutError, match="a directory of token chunks") as caught:
            taker(tmp_path / "chunks")
        assert (
            f"`flatout import {tmp_path / 'chunks'} --out data/chunks --tokenizer FILE`"
            in caught.value.fix
        )
    assert find_chunks(tmp_path / "chunks")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.bin", "fineweb.bin", "tokens.npy", "tokens.npz"])
def test_the_suggested_command_makes_chunks_of_tokens(tmp_path, name):
    (tmp_path / name).write_bytes(FILES[name])
    command = recognise(tmp_path / name).fix.split("`")[1]
    python = command.replace("python -c", f"{sys.executable} -c").replace(
        "mkdir chunks", f"cd {tmp_path} && mkdir chunks"
    )
    subprocess.run(["bash", "-c", python], check=True)
    byte = make_tokenizer("byte", lambda _: ())
    assert (
        np.concatenate(
            [read_chunk(path, byte) for path in find_chunks(tmp_path / "chunks")]
        ).tolist()
        == TOKENS.tolist()
    )


def in_python(command, folder, monkeypatch):
    """Execute the Python code of a suggested command, and return the tokens that it writes."""
    *_, code, path = shlex.split(command)
    monkeypatch.setattr(sys, "argv", ["-c", path])
    monkeypatch.chdir(folder)
    (folder / "chunks").mkdir()
    exec(code, {})
    return np.concatenate(
        [torch.load(chunk).numpy() for chunk in sorted((folder / "chunks").iterdir())]
    )


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "uint16"), (20240801, "uint32")])
def test_both_formats_of_llm_c_are_read_without_their_header(tmp_path, monkeypatch, magic, dtype):
    tokens = TOKENS.astype(dtype) + (0 if dtype == "uint16" else 100_000)
    (tmp_path / "fineweb.bin").write_bytes(
        struct.pack("<256i", magic, 1, len(tokens), *[0] * 253) + tokens.tobytes()
    )
    fix = recognise(tmp_path / "fineweb.bin").fix
    assert "If it contains tokens in llm.c's format, write them" in fix
    assert in_python(fix.split("`")[1], tmp_path, monkeypatch).tolist() == tokens.tolist()


def test_the_command_for_a_bare_binary_file_states_its_assumption(tmp_path):
    (tmp_path / "train.bin").write_bytes(FILES["train.bin"])
    assert (
        "assumes uint16; if the tokenizer has more than 65,536 tokens, replace 'uint16' with "
        "'uint32'" in recognise(tmp_path / "train.bin").fix
    )


HOSTILE = [
    "$(touch X)",
    "`touch X`",
    "']; import os; os.mkdir('X') #",
    '"; touch X; "',
    "\x1b[2J\nFix: run `touch X`.",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_the_name_of_an_array_does_not_enter_the_command(tmp_path, monkeypatch, name):
    folder = tmp_path / "there"
    folder.mkdir()
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("about.txt", "no array")
        archive.writestr(f"{name}.npy", FILES["tokens.npy"])
    known = recognise(folder / "a.npz")
    assert known.name.isprintable()
    assert "touch" not in known.fix
    assert in_python(known.fix.split("`")[1], folder, monkeypatch).tolist() == TOKENS.tolist()
    assert sorted(path.name for path in folder.iterdir()) == ["a.npz", "chunks"]


@pytest.mark.parametrize("name", ["best_model.pt", "train.bin", "tokens.npz", "chunk_000003.pt"])
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
        find_files(str(tiny_set))
    shard = next(tiny_set.glob("train-*.bin"))
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
    assert len(find_files(f"{tmp_path}/*")[0]) == 2


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


def test_a_recipe_at_a_url_is_refused():
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
    "checkpoint.dir": lambda: flatout.train(
        "shakespeare-char", ["data.path=there", "checkpoint.dir=gs://bucket/run"]
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
    with pytest.raises(UsageError, match=r"(s3|gs)://bucket/\S+ is a URL; only a local path"):
        CALLS[call]()
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]
