"""Harmful tokenizer files give an error that names the file, in bounded time and memory."""

import base64
import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from flatout.data import tokenizers
from flatout.data.prepare.workers import local as local_workers
from flatout.data.tokenizers import check, load_tokenizer, make_tokenizer
from flatout.data.tokenizers.base import NotEncodable
from flatout.data.tokenizers.bpe import GPT2_PATTERN, RankTokenizer
from flatout.data.tokenizers.byte import ByteTokenizer
from flatout.data.tokenizers.byte_level import byte_level_alphabet
from flatout.data.tokenizers.check import bound_pieces, require_usable
from flatout.errors import DataError
from flatout.storage import process_limits

VOCABULARY = {"<unk>": 0, "<|endoftext|>": 1, "a": 2, "b": 3}
END = {
    "id": 1,
    "content": "<|endoftext|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
DOUBLING = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30,
}
BYTES = [bytes([value]) for value in range(256)]


@pytest.fixture
def tokenizers_are_trusted():
    """Override the suite's fixture, so that tokenizers are tried out here."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_process(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))


def definition(**parts):
    model = {"type": "BPE", "unk_token": "<unk>", "vocab": VOCABULARY, "merges": []}
    return {
        "version": "1.0",
        "added_tokens": [END],
        "normalizer": None,
        "pre_tokenizer": None,
        "decoder": None,
        "model": model,
    } | parts


def hub_file(tmp_path, **parts):
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition(**parts)))
    return tmp_path / "tokenizer.json"


def tiktoken_file(tmp_path, more=b""):
    path = tmp_path / "own.tiktoken"
    path.write_bytes(
        b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(BYTES))
        + more
    )
    return path


def charsmap(data):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": charsmap(b"\x08\0\0\0" + b"\xff" * 8 + b"abc")}, "index out of bounds"),
        (
            {"normalizer": charsmap(b"\xff\xff\xff\x7fabc")},
            r"crashes or takes too much memory \(the limits are 30 s and 2 GiB\)",
        ),
        ({"normalizer": DOUBLING}, r"takes too much CPU time|takes too much memory"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
    ],
    ids=["a panic", "allocation", "doubling", "no length"],
)
def test_harmful_file_is_rejected_in_bounded_time(tmp_path, monkeypatch, parts, message):
    if DOUBLING in parts.values():
        monkeypatch.setattr(check, "CPU_S", 0)
    path = hub_file(tmp_path, **parts)
    with pytest.raises(
        DataError,
        match=r"tokenizer\.json cannot be used: loading it and encoding a few short texts fails: "
        rf".*({message})",
    ) as caught:
        load_tokenizer(path)
    assert "a different tokenizer" in caught.value.fix
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_usable_file_is_tried_once(tmp_path, cache, monkeypatch):
    path = hub_file(tmp_path, pre_tokenizer={"type": "Whitespace"})
    tokenizer = load_tokenizer(path)
    assert not tokenizer.proven
    assert len(list((cache / "tokenizers").iterdir())) == 1
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert load_tokenizer(path).encode("a b") == [2, 3]
    with pytest.raises(pytest.fail.Exception):
        load_tokenizer(hub_file(tmp_path, pre_tokenizer={"type": "WhitespaceSplit"}))


@pytest.mark.slow
def test_saved_tokenizer_is_tried_too(tmp_path, monkeypatch):
    load_tokenizer(hub_file(tmp_path, pre_tokenizer={"type": "Whitespace"})).save(
        tmp_path / "saved.json"
    )
    tried = []
    monkeypatch.setattr(
        tokenizers, "require_usable", lambda text, name, *, cache: tried.append(name)
    )
    load_tokenizer(tmp_path / "saved.json")
    assert tried == [str(tmp_path / "saved.json")]


def test_proven_tokenizers_start_no_process(tmp_path, no_process):
    alphabet = {character: index + 2 for index, character in enumerate(byte_level_alphabet())}
    model = {"type": "BPE", "vocab": {"<|endoftext|>": 0} | alphabet, "merges": []}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = load_tokenizer(
        hub_file(
            tmp_path,
            model=model,
            added_tokens=[END | {"id": 0}],
            pre_tokenizer=level,
            decoder=level,
        )
    )
    assert tokenizer.proven
    tokenizer.save(tmp_path / "saved.json")
    assert load_tokenizer(tmp_path / "saved.json").proven
    for kind in ("byte", "char", "train:300"):
        make_tokenizer(kind, lambda _: ["the cat sat on the mat"]).save(tmp_path / "kind.json")
        assert load_tokenizer(tmp_path / "kind.json").proven
    assert load_tokenizer(tiktoken_file(tmp_path), pattern=GPT2_PATTERN).proven


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            b"YWI= 1099511627776\n",
            "line 257: the rank 1,099,511,627,776 is not between 0 and 16,777,215",
        ),
        (b"YWI= -1\n", "line 257: the rank -1 is not between"),
        (b"YWI= 9\n", "line 257: the rank 9 appears twice"),
        (b"YW!= 256\n", "line 257 is not `BASE64 RANK`"),
        (b"YWI= " + b"9" * 5000, "line 257 is not `BASE64 RANK`"),
    ],
    ids=["large", "negative", "twice", "base64", "digits"],
)
def test_error_names_an_invalid_rank(tmp_path, no_process, more, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(tiktoken_file(tmp_path, more), pattern=GPT2_PATTERN)


def test_error_names_an_id_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "require_usable", lambda *_, **__: None)
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "vocab": VOCABULARY | {"z": 2**32 - 2},
        "merges": [],
    }
    with pytest.raises(DataError, match=r"has the id 4,294,967,294\. Ids must be below 16,777,216"):
        load_tokenizer(hub_file(tmp_path, model=model))
    with pytest.raises(DataError, match="Ids must be below"):
        RankTokenizer("x", BYTES, GPT2_PATTERN, 2**40)


def try_pattern(pattern, name="x"):
    check.encode_texts(RankTokenizer("x", BYTES, pattern, 256), [], name)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"\w+", "omits text"),
        ("(", "The pattern of the tokenizer 'x' cannot be used"),
        ("a*", "cannot be used: .* Correct --pattern"),
        ("(a|a)*", "fails: the engine failed internally"),
    ],
)
def test_pattern_that_does_not_split_text_is_rejected(pattern, message):
    with pytest.raises(DataError, match=message):
        try_pattern(pattern)


def test_patterns_that_split_all_text_pass():
    try_pattern(r"\s?\S+|\s+")
    try_pattern(r"[\s\S]")


@pytest.mark.slow
def test_invalid_pattern_is_rejected_when_the_file_is_loaded(tmp_path):
    with pytest.raises(
        DataError, match=r"The pattern of the tokenizer 'own' cannot be used: .* Correct --pattern"
    ):
        load_tokenizer(tiktoken_file(tmp_path), pattern="(")


def test_empty_pattern_is_rejected(tmp_path):
    with pytest.raises(DataError, match="--pattern must not be empty"):
        load_tokenizer(tiktoken_file(tmp_path), pattern="")


def test_engine_failure_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "require_usable", lambda *_, **__: None)
    model = {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "nothing"}
    with pytest.raises(
        NotEncodable,
        match=r"The tokenizer 'tokenizer' fails: WordLevel error: Missing \[UNK\] token",
    ):
        load_tokenizer(hub_file(tmp_path, model=model)).encode("c")
    broken = load_tokenizer(hub_file(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0}))
    with pytest.raises(
        NotEncodable, match="The tokenizer 'tokenizer' fails: chunk size must be non-zero"
    ):
        broken.encode("a")


@pytest.mark.parametrize("kind", ["fifo", "large"])
def test_special_and_large_files_are_not_read(tmp_path, kind):
    path = tmp_path / "tokenizer.json"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(
        DataError, match="is not a regular file" if kind == "fifo" else "is larger than 128 MiB"
    ):
        load_tokenizer(path)


def test_cpu_limit_ends_with_the_block():
    before = resource.getrlimit(resource.RLIMIT_CPU)
    with process_limits.cpu_bounded(1000):
        assert 1000 <= resource.getrlimit(resource.RLIMIT_CPU)[0] < 100_000
    assert resource.getrlimit(resource.RLIMIT_CPU) == before


def test_workers_limit_unproven_tokenizers(monkeypatch):
    bounded = []
    monkeypatch.setattr(check, "bound_memory", bounded.append)
    proven, other = ByteTokenizer(), RankTokenizer("x", BYTES, r"[\s\S]", 256)
    bound_pieces(proven)
    assert (bounded, proven.limits) == ([], ByteTokenizer.limits)
    bound_pieces(other)
    assert bounded == [check.PIECE_BYTES]
    limits = []
    encode = other.encode_piece
    monkeypatch.setattr(
        other,
        "encode_piece",
        lambda *given: limits.append(resource.getrlimit(resource.RLIMIT_CPU)) or encode(*given),
    )
    assert other.encode("ab") == [97, 98]
    assert limits[0][0] != resource.RLIM_INFINITY


@pytest.mark.slow
def test_worker_reports_that_the_tokenizer_ran_out_of_cpu_time():
    code = (
        "from flatout.storage.process_limits import cpu_bounded\n"
        "with cpu_bounded(0):\n  while True: pass"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    error = local_workers._Worker(process, None).death()
    assert "The tokenizer took more than 300 s of CPU time for one piece of text" in str(error)


def test_failure_is_not_cached(tmp_path, monkeypatch):
    message = SimpleNamespace(returncode=3, stdout=b'{"what": "x is bad.", "fix": "Mend it."}')
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: message)
    with pytest.raises(DataError, match=r"x is bad\. Fix: Mend it\."):
        require_usable(b"{}", "x", cache=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
