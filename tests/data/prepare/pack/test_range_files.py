import os

import pytest

from flatout.data.prepare.pack.range_files import RangeRecord, read_records
from flatout.data.sources import RowLocation
from flatout.data.store.manifest import SkippedRows
from flatout.errors import DataError


def test_row_locations_survive_json_for_any_file_name(tmp_path):
    places = (RowLocation("/text/100%41, é.jsonl", 7), "é.parquet, row 3")
    record = RangeRecord(
        number=0,
        num_bytes=9,
        skipped=(SkippedRows(reason="bad", count=3, first=places),),
        bad_rows=1,
        first_bad=(places[0], "is bad"),
    )
    path = tmp_path / "000000.json"
    path.write_text(record.model_dump_json())
    assert read_records(tmp_path) == {0: record}
    odd = RowLocation(os.fsdecode(b"caf\xe9.jsonl"), 7)
    stored = record.model_copy(update={"first_bad": (odd, "is bad")}).model_dump_json()
    shown = RangeRecord.model_validate_json(stored).first_bad[0]
    assert str(shown) == "caf\ufffd.jsonl, byte 7"


def test_secrets_in_urls_are_not_stored():
    secret = RowLocation("https://me:word@host/a.jsonl?key=1", 7)
    record = RangeRecord(number=0, num_bytes=9, first_bad=(secret, "is bad"))
    assert record.model_dump()["first_bad"] == (("https://host/a.jsonl", 7), "is bad")


def test_a_record_of_another_version_is_named(tmp_path):
    path = tmp_path / ".out.part" / "ranges" / "000000.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"number": 0, "num_bytes": 1, "first_bad": "row 7 is bad"}')
    with pytest.raises(
        DataError,
        match=r"000000\.json is damaged or was not written by this version of flatout.*Remove "
        r"the directory .*\.out\.part to",
    ):
        read_records(path.parent)
