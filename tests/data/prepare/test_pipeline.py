import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prepared import Listener, content, documents, prepared, write_rows

from flatout.data.prepare import pipeline as stage
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.plan import make
from flatout.data.sources import ReadTask, files
from flatout.data.store.shards import Dataset
from flatout.errors import DataError


def test_tail_cuts_a_single_text_exactly(book, tmp_path):
    text = book.read_text()
    made = prepared(book, out=tmp_path / "out", tokenizer="char", split="tail 0.1")
    cut = int(len(text) * 0.9)
    assert documents(made.path, "train") == [text[:cut]]
    assert documents(made.path, "val") == [text[cut:]]
    train = Dataset.open(made.path).split("train")
    characters = sorted(set(text))
    assert train.read_tokens(0, cut).tolist() == [
        characters.index(character) for character in text[:cut]
    ]
    assert made.manifest.text_bytes == len(text)
    assert made.manifest.vocab_size == len(characters) + 1
    assert made.manifest.split_rule == "tail 0.1"


@pytest.mark.parametrize("tokenizer", ["char", "byte", "train:300"])
def test_rows_are_stored_completely_and_in_order(rows, tmp_path, tokenizer):
    values = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    made = prepared(rows, out=tmp_path / "out", tokenizer=tokenizer, split="tail 0.1")
    assert documents(made.path, "train") == values[:272]
    assert documents(made.path, "val") == values[272:]
    assert (made.manifest.documents, made.manifest.splits["val"].documents) == (300, 28)
    assert abs(sum(map(len, values[272:])) / sum(map(len, values)) - 0.1) < 0.005


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 500)
    monkeypatch.setattr(make, "range_bytes", lambda _: 1200)
    options = Options(tokenizer="train:300", split="hash 0.2")
    for count in (1, 2, 3):
        prepare_dataset([str(rows)], tmp_path / f"out{count}", options, workers=count)
    assert content(tmp_path / "out1") == content(tmp_path / "out2") == content(tmp_path / "out3")


def test_bad_rows_raise_by_name_or_are_counted_in_the_manifest(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": f"row {number}"}) for number in range(40)]
    for number in range(0, 24, 2):
        lines[number] = "{"
    lines[30] = '{"text": ""}'
    lines[31] = '{"text": "half \\ud800 pair"}'
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1 is not JSON"):
        prepared(path, out=tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]
    made = prepared(path, out=tmp_path / "out", on_bad_row="skip", split="tail 0.5")
    skipped = {entry.reason: entry for entry in made.manifest.skipped}
    assert skipped["not JSON"].count == 12
    assert skipped["not JSON"].first == tuple(
        f"{path}, line {number}" for number in range(1, 21, 2)
    )
    assert skipped["cannot be tokenised"].first == (f"{path}, line 32",)
    assert skipped["empty document"].count == 1
    assert made.manifest.documents == 26
    lines[0:24:2] = [json.dumps({"text": "good"})] * 12
    path.write_text("\n".join(lines))
    with pytest.raises(
        DataError, match=r"rows\.jsonl, line 32 cannot be tokenised: Character 5 is U\+D800"
    ):
        prepared(path, out=tmp_path / "raises")


@pytest.mark.parametrize("tokenizer", ["char", "byte", "train:300"])
@pytest.mark.parametrize("name", ["empty.txt", "blank.jsonl"])
def test_an_empty_corpus_is_rejected_and_leaves_nothing(tmp_path, tokenizer, name):
    (tmp_path / name).write_text("\n\n" if name.endswith("l") else "")
    with pytest.raises(DataError, match=r"contains no documents|corpus is empty"):
        prepared(tmp_path / name, out=tmp_path / "out", tokenizer=tokenizer)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_rule_with_an_empty_split_is_rejected_and_leaves_nothing(rows, tmp_path):
    with pytest.raises(DataError, match=r"none of the 300 documents for validation.*tail 0\.1"):
        prepared(rows, out=tmp_path / "out", split="hash 1e-9")
    with pytest.raises(DataError, match="for training"):
        prepared(rows, out=tmp_path / "out", split="hash 0.9999999")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.slow
def test_limits_take_the_beginning(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 700)
    monkeypatch.setattr(make, "range_bytes", lambda _: 700)
    values = [json.loads(line)["text"] for line in rows.read_text().splitlines()]
    for count in (1, 2):
        out = tmp_path / f"documents{count}"
        prepared(rows, out=out, split="tail 0.5", max_documents=100, workers=count)
        assert documents(out, "train") + documents(out, "val") == values[:100]
        out = tmp_path / f"bytes{count}"
        made = prepared(rows, out=out, split="tail 0.5", max_bytes=1000, workers=count)
        assert made.manifest.text_bytes == 1000
        assert "".join(documents(out, "train") + documents(out, "val")) == "".join(values)[:1000]


def test_a_compressed_tokenizer_is_rejected(book, tmp_path):
    with pytest.raises(DataError, match=r"x\.json\.gz is compressed") as raised:
        prepared(book, out=tmp_path / "out", tokenizer="x.json.gz")
    assert raised.value.fix.startswith("Decompress it first")


def test_skipped_rows_of_a_file_with_a_non_utf8_name_are_recorded(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / os.fsdecode(b"b\xfc.txt")).write_text("")
    (tmp_path / "texts" / "a.txt").write_text("text")
    made = prepared(tmp_path / "texts", out=tmp_path / "out")
    assert [entry.first for entry in made.manifest.skipped] == [(f"{tmp_path}/texts/b\ufffd.txt",)]


def test_a_full_disk_leaves_nothing(rows, tmp_path, monkeypatch):
    from flatout.storage import files as disk

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        prepared(rows, out=tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.slow
def test_ctrl_c_keeps_finished_ranges_and_leaves_no_process(tmp_path):
    (tmp_path / "slow_source.py").write_text(
        "import time\nfrom flatout.data.sources import ReadTask\n"
        "def read(number):\n    yield f'document {number}'\n    time.sleep(600 if number > 1 "
        "else 0)\n"
        "def slow():\n    return [ReadTask(read, (number,), str(number)) for number in range(6)]\n"
    )
    (tmp_path / "out_parent").mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path[:] = {[str(tmp_path), *sys.path]!r}\n"
        "from pathlib import Path\n"
        "import psutil\n"
        "from flatout.data.prepare.pipeline import Options, prepare_dataset\n"
        "from flatout.data.prepare.workers.local import LocalWorkers\n"
        "pack = LocalWorkers.pack\n"
        "def pack_and_print(crew, ranges, setup, report):\n"
        "    for item in pack(crew, ranges, setup, report):\n"
        "        found = psutil.Process().children(recursive=True)\n"
        "        print('pids', *[each.pid for each in found], flush=True)\n"
        "        yield item\n"
        "LocalWorkers.pack = pack_and_print\n"
        f"out = Path({str(tmp_path / 'out_parent' / 'out')!r})\n"
        "prepare_dataset(['slow_source:slow'], out, Options(tokenizer='byte', split='hash "
        "0.1'), workers=2)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()[1:]]
        assert len(pids) == 3, "two workers and their parent"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert errors.splitlines().count("KeyboardInterrupt") == 1, "workers print nothing"
    assert [path.name for path in (tmp_path / "out_parent").iterdir()] == [".out.part"], (
        "finished ranges stay"
    )
    assert sorted(path.name for path in tmp_path.glob("out_parent/.out.part/ranges/*.json"))[
        :1
    ] == ["000000.json"]
    assert list(tmp_path.rglob("*.part")) == [tmp_path / "out_parent" / ".out.part"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_long_steps_report_progress_to_the_end(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 500)
    monkeypatch.setattr(make, "range_bytes", lambda _: 1200)
    listener = Listener()
    prepared(rows, out=tmp_path / "out", tokenizer="train:300", progress=listener)
    assert [task.split()[0] for task in listener.tasks] == ["Counting", "Training", "Tokenising"]
    assert listener.done["Counting documents"] == 300
    assert listener.done["Tokenising"] == pytest.approx(rows.stat().st_size / 1e6)


def test_little_text_uses_one_process(rows, monkeypatch):
    monkeypatch.setattr(stage, "usable_cores", lambda: 64)
    monkeypatch.setattr(stage, "cgroup_limits", lambda: (None, None))
    assert stage.default_workers(files.files(str(rows))) == 1
    large = [ReadTask(list, (), "x", num_bytes=10**9)]
    assert stage.default_workers(large) == 64
    monkeypatch.setattr(stage, "cgroup_limits", lambda: (3, None))
    assert stage.default_workers(large) == 3, "a container's limit counts"


def test_names_of_files_need_not_be_utf8(tmp_path):
    names = [os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9" + end) for end in (b".txt", b".md")]
    for name in names:
        Path(name).write_text(f"text of {name[-3:]} " * 20)
    made = prepared(names[0], out=tmp_path / "out", val=(names[1],))
    shown = [f"{tmp_path}/caf\ufffd{end}" for end in (".txt", ".md")]
    assert [*made.manifest.source["names"], *made.manifest.source["val"]] == shown
    again = prepared(names[0], out=tmp_path / "out", val=(names[1],))
    assert again.existed


@pytest.mark.parametrize("tokenizer", ["char", "train:300"])
def test_a_tokenizer_is_trained_on_prompts_too(tmp_path, tokenizer):
    rows = ({"prompt": f"QUESTION {number}?", "text": f"answer {number}"} for number in range(40))
    path = write_rows(tmp_path / "rows.jsonl", rows)
    made = prepared(
        path,
        out=tmp_path / "out",
        tokenizer=tokenizer,
        split="tail 0.5",
        mask_field="prompt",
        workers=1,
    )
    assert documents(made.path, "train")[0].startswith("QUESTION 0?answer 0")
    known = Dataset.open(made.path).tokenizer
    if tokenizer != "char":
        assert len(known.encode("QUESTION")) < len("QUESTION"), "merges are learned from prompts"
    plain = prepared(path, out=tmp_path / "plain", tokenizer=tokenizer, split="tail 0.5", workers=1)
    assert "Q" not in getattr(Dataset.open(plain.path).tokenizer, "characters", "")
    if tokenizer != "char":
        assert len(Dataset.open(plain.path).tokenizer.encode("QUESTION")) == len("QUESTION"), (
            "text that is not packed is not learned"
        )


def write_column(path, name):
    if path.suffix == ".jsonl":
        path.write_text(json.dumps({name: "some text of a row"}) + "\n")
    elif path.suffix == ".csv":
        path.write_text(f"{name}\nsome text of a row\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pyarrow.table({name: ["some text of a row"]}), path)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("split", [None, "hash 0.5"], ids=["counted", "packed"])
def test_no_field_is_advised_that_another_file_lacks(tmp_path, suffix, split):
    if suffix == ".csv":
        pytest.importorskip("pyarrow")
    first, second = (tmp_path / f"{name}{suffix}" for name in "ab")
    write_column(first, "text")
    write_column(second, "body")
    for field, bad, other, lacks in (
        (None, second, first, "body"),
        ("body", first, second, "text"),
    ):
        with pytest.raises(DataError, match=f"{bad}.* has no field '{field or 'text'}'") as caught:
            prepared(first, second, out=tmp_path / "out", text_field=field, split=split, workers=1)
        assert f"{other} has no '{lacks}'" in caught.value.fix
        assert "--text-field" not in caught.value.fix
    write_column(first, "body")
    with pytest.raises(DataError, match="Did you mean --text-field body"):
        prepared(first, second, out=tmp_path / "out", split=split, workers=1)
