import gzip
import json
import random

import pytest
from prepared import prepared

from flatout.data.prepare.pack.range_files import RangeRecord
from flatout.data.prepare.pipeline import BAD_ROWS, BadRowLimit
from flatout.data.store.manifest import FileEntry, ShardEntry, SkippedRows, SplitCounts
from flatout.errors import DataError
from flatout.storage.files import Unfinished


def record(documents, bad, left_out=0, first="row"):
    skipped = [
        SkippedRows(reason=reason, count=count)
        for reason, count in (("bad", bad), ("dull", left_out))
        if count
    ]
    file = FileEntry(name="00000.bin", size_bytes=0, block_crc32=())
    splits = {"train": SplitCounts(documents=documents), "val": SplitCounts()}
    return RangeRecord(
        number=0,
        num_bytes=0,
        shards=(ShardEntry(tokens=file, ends=file, splits=splits, crc32={}),),
        skipped=skipped,
        bad_rows=bad,
        first_bad=(first, "is bad"),
    )


@pytest.mark.parametrize(("most", "enough"), [(None, BAD_ROWS), (0, 0), (7, 7)])
def test_too_many_bad_rows_stop_prepare(most, enough):
    count = BadRowLimit(most, 1)
    count.add(record(50, enough, left_out=500, first="book, line 3"))
    with pytest.raises(
        Unfinished,
        match=rf"{enough + 1} of the first {551 + enough} rows .* {enough} may be skipped. The "
        rf"first: .*bad",
    ) as caught:
        count.add(record(0, 1, first="line 9"))
    assert f"--max-bad-rows {10 * (enough + 1)}" in caught.value.fix


def test_one_row_in_a_hundred_may_be_bad():
    count = BadRowLimit(None, 1)
    count.add(record(99_000, 1_000))
    with pytest.raises(Unfinished):
        count.add(record(0, 1))


def test_a_higher_limit_resumes_the_work(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "row {number}"}}\n{{\n' for number in range(30)))
    options = {"tokenizer": "byte", "split": "tail 0.5", "on_bad_row": "skip"}
    with pytest.raises(
        Unfinished,
        match=r"30 of the first 60 rows .* 5 may be skipped. The first: .*rows\.jsonl, line 2 "
        r"is not JSON",
    ):
        prepared(rows, out=tmp_path / "out", **options, max_bad_rows=5)
    assert (tmp_path / ".out.part" / "ranges" / "000000.json").is_file()
    made = prepared(rows, out=tmp_path / "out", **options, max_bad_rows=30)
    assert [(entry.reason, entry.count, len(entry.first)) for entry in made.manifest.skipped] == [
        ("not JSON", 30, 10)
    ]
    assert prepared(rows, out=tmp_path / "out", **options).existed, (
        "the limit is not part of the description"
    )


SKIPPING = {"tokenizer": "byte", "split": "tail 0.5", "on_bad_row": "skip"}


def cut_archive(path):
    generator = random.Random(0)
    rows = "".join(
        json.dumps({"text": f"row {generator.random()}"}) + "\n" for _ in range(2000)
    ).encode()
    path.write_bytes(gzip.compress(rows)[:2000])


def test_the_rows_of_a_table_without_the_column_count_towards_the_limit(tmp_path):
    for name, field, count in (("a.csv", "text", 300), ("b.csv", "body", 200)):
        (tmp_path / name).write_text(f"{field}\n" + f"some {field}\n" * count)
    options = {"out": tmp_path / "out", "tokenizer": "byte", "on_bad_row": "skip"}
    with pytest.raises(Unfinished, match=r"200 of the first 500 rows .* first: .*b\.csv has no"):
        prepared(f"{tmp_path}/*.csv", **options)
    made = prepared(f"{tmp_path}/*.csv", **options, max_bad_rows=200)
    assert [(rows.reason, rows.count) for rows in made.manifest.skipped] == [
        ("no field 'text'", 200)
    ]


@pytest.mark.parametrize("most", [None, 1, 10**6])
def test_a_damaged_file_stops_prepare_for_any_limit_of_bad_rows(tmp_path, most):
    cut_archive(tmp_path / "rows.jsonl.gz")
    with pytest.raises(
        DataError,
        match=r"100\.0% of the text is in damaged files, .* and at most 1% may be: "
        r".*rows\.jsonl\.gz\. Fix: Download",
    ):
        prepared(tmp_path / "rows.jsonl.gz", out=tmp_path / "out", **SKIPPING, max_bad_rows=most)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    made = prepared(tmp_path / "rows.jsonl.gz", out=tmp_path / "out", **SKIPPING)
    assert made.manifest.documents == 2, "a repaired file is different text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl.gz"]


def test_little_damage_is_skipped_and_counts_as_one_row(tmp_path):
    cut_archive(tmp_path / "rows.jsonl.gz")
    (tmp_path / "book.txt").write_text("word " * 200_000)
    made = prepared(tmp_path, out=tmp_path / "out", **SKIPPING)
    assert [(entry.reason, entry.count) for entry in made.manifest.skipped] == [
        ("cannot be read", 1)
    ]
    with pytest.raises(
        Unfinished, match=r"1 of the first \d+ rows are unusable, and 0 may be skipped"
    ):
        prepared(tmp_path, out=tmp_path / "other", **SKIPPING, max_bad_rows=0)
