"""Documents read in chunks give the same dataset as documents read whole."""

import base64
import errno
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prepared import content, prepared, write_rows
from texts import byte_level_json

from flatout.data.prepare.pack import tokenize
from flatout.data.prepare.pack.range_files import RangeRecord
from flatout.data.prepare.pack.work_items import ByHash, WorkItem
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.plan import make
from flatout.data.sources import file_reading, files, long
from flatout.data.tokenizers import tokenizer as tokenizing
from flatout.errors import DataError
from flatout.storage import files as disk
from flatout.storage.files import Unfinished

pytestmark = pytest.mark.slow

WORDS = [
    *("the", "cat", "isn't", "éclair", "日本", "🙂", "12345", "x_1", "<|endoftext|>"),
    *("don't\n", "end.\n\n", "  two", "\tTab", "\ufeffmark"),
]
PIECES = [bytes([value]) for value in range(256)]
PIECES += [b"th", b"the", b" t", b" the", b"at", b"cat", b" cat", b"12", b"is"]


def text_of(seed, count):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


@pytest.fixture
def corpus(tmp_path):
    """Short and long texts, one of the long ones twice, with rows between them."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, seed, count in (
        ("a", 0, 900),
        ("b", 1, 12),
        ("d", 2, 700),
        ("e", 0, 900),
        ("f", 3, 20),
        ("g", 4, 400),
    ):
        (folder / f"{name}.txt").write_bytes(
            b"\xef\xbb\xbf" * (name in "ad") + text_of(seed, count).encode()
        )
    write_rows(folder / "c.jsonl", (text_of(seed, 30) for seed in range(5, 15)))
    return folder


@pytest.fixture
def in_chunks(monkeypatch):
    """Read texts over 1,000 bytes in chunks from now on, and tokenise them in small pieces."""

    def begin(chunk=100):
        monkeypatch.setattr(file_reading, "LONG_BYTES", 1_000)
        monkeypatch.setattr(long, "CHUNK_BYTES", chunk)
        monkeypatch.setattr(tokenize, "HELD_CHARACTERS", 500)
        monkeypatch.setattr(tokenize, "HELD_TOKENS", 64)
        monkeypatch.setattr(tokenize, "PIECES_PER_REPORT", 2)
        monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 40)
        monkeypatch.setattr(tokenizing, "LOOKAHEAD_CHARACTERS", 20)

    return begin


def tokenizer_named(name, tmp_path):
    if name == "tiktoken":
        path = tmp_path / "own.tiktoken"
        path.write_bytes(
            b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(PIECES))
        )
        return {"tokenizer": str(path), "pattern": r"\s?\S+|\s+"}
    if name == "tokenizer.json":
        (tmp_path / "tokenizer.json").write_text(byte_level_json([text_of(0, 500)], 299))
        return {"tokenizer": str(tmp_path / "tokenizer.json")}
    return {"tokenizer": name}


SPLITS = [
    {"split": "tail 0.1"},
    {"split": "tail 0.6"},
    {"split": "hash 0.5"},
    {},
    {"max_bytes": 9_000},
    {"max_bytes": 6_400, "split": "tail 0.5"},
    {"max_documents": 14, "split": "tail 0.3"},
    {"split": "hash 0.5", "max_bytes": 14_000, "on_bad_row": "skip"},
]


@pytest.mark.parametrize(
    ("tokenizer", "options", "chunk"),
    [
        *(("byte", options, 7) for options in SPLITS),
        *(
            (tokenizer, SPLITS[number], 1000)
            for number, tokenizer in enumerate(["char", "train:300", "tiktoken", "tokenizer.json"])
        ),
    ],
    ids=str,
)
def test_long_documents_give_the_same_bytes(corpus, tmp_path, in_chunks, tokenizer, options, chunk):
    wanted = Options(**tokenizer_named(tokenizer, tmp_path), **options)
    whole = prepare_dataset([str(corpus)], tmp_path / "whole", wanted, workers=1)
    assert whole.manifest.splits["train"].tokens > 500
    in_chunks(chunk)
    prepare_dataset([str(corpus)], tmp_path / "chunks", wanted, workers=1)
    assert content(tmp_path / "chunks") == content(tmp_path / "whole")


def bad_utf8(folder):
    path = folder / "e.txt"
    path.write_bytes(path.read_bytes()[:3_000] + b"\xe9 au lait" + path.read_bytes()[3_000:])


def nowhere_to_cut(folder):
    path = folder / "e.txt"
    path.write_text(path.read_text() + " " + "a" * 9_000 + " " + path.read_text())


@pytest.mark.parametrize(
    "options",
    [{"split": "tail 0.1"}, {"split": "hash 0.5"}, {"split": "tail 0.4"}],
    ids=str,
)
@pytest.mark.parametrize(
    ("spoil", "tokenizer", "said"),
    [
        (bad_utf8, "byte", "offset 3000"),
        (nowhere_to_cut, "train:300", "anywhere in the 2,000 characters"),
    ],
)
def test_an_unusable_long_text_is_one_bad_row_and_leaves_no_tokens(
    corpus, tmp_path, in_chunks, monkeypatch, spoil, tokenizer, said, options
):
    monkeypatch.setattr(tokenizing, "MAX_PIECE_CHARACTERS", 2_000)
    monkeypatch.setattr(tokenizing, "LOOKAHEAD_CHARACTERS", 20)
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 40)
    spoil(corpus)
    errors = []
    for out, begin in (("whole", lambda: None), ("chunks", in_chunks)):
        begin()
        with pytest.raises(DataError, match=said) as raised:
            prepared(corpus, out=tmp_path / "none", tokenizer=tokenizer, **options, workers=1)
        errors.append(str(raised.value))
        made = prepared(
            corpus, out=tmp_path / out, tokenizer=tokenizer, on_bad_row="skip", **options, workers=1
        )
        (bad,) = made.manifest.skipped
        assert (bad.count, bad.first) == (1, (str(corpus / "e.txt"),))
    assert errors[0] == errors[1]
    assert str(corpus / "e.txt") in errors[0]
    assert content(tmp_path / "chunks") == content(tmp_path / "whole")


def test_an_unknown_character_is_found_before_anything_is_written(corpus, tmp_path, in_chunks):
    lacking = Options(
        tokenizer=str(tmp_path / "char" / "tokenizer.json"), on_bad_row="skip", split="tail 0.2"
    )
    prepared(corpus, out=tmp_path / "char", tokenizer="char", workers=1)
    (corpus / "d.txt").write_text(text_of(2, 600) + "ß")
    prepare_dataset([str(corpus)], tmp_path / "whole", lacking, workers=1)
    in_chunks()
    made = prepare_dataset([str(corpus)], tmp_path / "chunks", lacking, workers=1)
    assert content(tmp_path / "chunks") == content(tmp_path / "whole")
    assert [entry.reason for entry in made.manifest.skipped] == ["cannot be tokenised"]


def test_a_word_of_3_mib_is_rejected(tmp_path):
    (tmp_path / "a.txt").write_text("a" * (3 << 20))
    with pytest.raises(
        DataError,
        match=r"a\.txt cannot be tokenised: .* cannot cut the text anywhere in the "
        r"1,048,576 characters from 0 on",
    ):
        prepared(
            tmp_path / "a.txt",
            out=tmp_path / "out",
            tokenizer="train:300",
            split="tail 0.1",
            workers=1,
        )
    assert not (tmp_path / "out").exists()


def test_prepare_resumes_after_a_full_disk_within_a_long_text(
    corpus, tmp_path, in_chunks, monkeypatch
):
    monkeypatch.setattr(files, "PART_BYTES", 1_000)
    monkeypatch.setattr(make, "range_bytes", lambda _: 1_000)
    options = Options(tokenizer="byte", split="tail 0.1")
    prepare_dataset([str(corpus)], tmp_path / "whole", options, workers=1)
    in_chunks()
    written = 0
    write = disk.CheckedFile.write

    def full(file, items):
        nonlocal written
        written += items.size
        if written > 9_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, items)

    with monkeypatch.context() as patched:
        patched.setattr(disk.CheckedFile, "write", full)
        with pytest.raises(Unfinished):
            prepare_dataset([str(corpus)], tmp_path / "out", options, workers=1)
    done = {path.name for path in (tmp_path / ".out.part" / "ranges").glob("*.json")}
    assert 0 < len(done) < 6
    assert not list((tmp_path / ".out.part" / "ranges").glob("*.part"))
    prepare_dataset([str(corpus)], tmp_path / "out", options, workers=1)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_progress_is_reported_within_a_long_text(corpus, in_chunks):
    in_chunks()
    parts = files.files(str(corpus / "a.txt"))
    told = []

    class Nowhere:
        def append(self, *packed, **more):
            pass

    from flatout.data.tokenizers import make_tokenizer

    packing = tokenize.Packing(make_tokenizer("byte", lambda _: ()), Options(), Path())
    item = WorkItem(number=0, num_tasks=1, first=0, assignment=ByHash(0.5), read_tasks=(parts[0],))
    record = RangeRecord(number=0, num_bytes=0)
    tokenize.pack(item, packing, Nowhere(), record, told.append)
    size = (corpus / "a.txt").stat().st_size
    assert len(told) > 5
    assert sum(tally.num_bytes for tally in told) == size
    assert (sum(tally.documents for tally in told), sum(tally.tokens for tally in told)) == (
        1,
        size - 3 + 1,
    )


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
    assert worker < 150
    assert parent < 150


@pytest.mark.faults
@pytest.mark.parametrize(
    ("tokenizer", "options"),
    [
        ("train:4096", {"split": "tail 0.1"}),
        ("char", {"split": "hash 0.5", "on_bad_row": "skip"}),
    ],
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
