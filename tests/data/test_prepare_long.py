"""Texts that are too long for one document: their dataset, and the memory that it needs."""

import gzip
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prepared import content, documents, prepared, write_rows

from flatout.data.sources import files, text

pytestmark = pytest.mark.slow


def tokens_of(folder):
    return {name: data for name, data in content(folder).items() if name.endswith(".bin")}


@pytest.mark.parametrize("options", [{"split": "tail 0.1"}, {"split": "hash 0.5"}], ids=str)
def test_a_long_text_is_packed_as_documents_of_whole_lines(tmp_path, monkeypatch, options):
    for module in (files, text):
        monkeypatch.setattr(module, "TEXT_BYTES", 1000)
    lines = [f"{number} is the {number}th line\n" for number in range(1000)]
    data = "".join(lines).encode()
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(data))
    for name, out in (("a.txt", "out"), ("a.txt.gz", "gz")):
        prepared(tmp_path / name, out=tmp_path / out, tokenizer="byte", workers=1, **options)
    assert tokens_of(tmp_path / "out") == tokens_of(tmp_path / "gz")
    found = [one for split in ("train", "val") for one in documents(tmp_path / "out", split)]
    whole = [one for one in found if one.endswith("line\n")]
    assert len(data) // 1000 <= len(whole) <= len(found) <= len(data) // 1000 + 2
    assert sorted("".join(found).splitlines()) == sorted("".join(lines).splitlines())


PEAKS = r"""
import json, re, resource, sys
from pathlib import Path
from flatout.data.prepare.pipeline import Options, prepare_dataset
prepare_dataset([sys.argv[1]], Path(sys.argv[2]), Options(**json.loads(sys.argv[3])), workers=2)
# ru_maxrss would count the process that started this one too
own = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps([own / 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""


def peaks_mib(source, out, **options):
    """Return the peak memory of this process and of the largest of its two workers in a prepare."""
    program = [sys.executable, "-c", PEAKS, str(source), str(out), json.dumps(options)]
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_words(path, size):
    draw = random.Random(0)
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyzéü", k=draw.randint(1, 12)))
        for _ in range(50_000)
    ]
    with path.open("wb") as file:
        while file.tell() < size:
            block = " ".join(draw.choices(words, k=20_000)) + ".\n"
            file.write(block.encode() * 20)


def test_a_text_of_64_mib_needs_little_memory(tmp_path):
    write_words(tmp_path / "a.txt", 64 << 20)
    parent, worker = peaks_mib(
        tmp_path / "a.txt", tmp_path / "out", tokenizer="byte", split="tail 0.1"
    )
    assert worker < 200
    assert parent < 150


@pytest.mark.faults
@pytest.mark.parametrize(
    ("tokenizer", "options"),
    [("train:4096", {"split": "tail 0.1"}), ("char", {"split": "hash 0.5", "on_bad_row": "skip"})],
    ids=str,
)
def test_a_text_of_1_gb_needs_less_than_300_mb(tmp_path, tokenizer, options):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    try:
        write_words(corpus / "a.txt", 1_000_000_000)
        write_rows(corpus / "b.jsonl", (f"short {number}" for number in range(20)))
        parent, worker = peaks_mib(corpus, tmp_path / "out", tokenizer=tokenizer, **options)
    finally:
        shutil.rmtree(tmp_path)
    assert worker < 300e6 / 2**20
    assert parent < 300e6 / 2**20
