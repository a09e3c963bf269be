import fcntl

import numpy as np
import pytest

from flatout.data.prepare.pack.range_files import RangeRecord, ShardWriter, record_path
from flatout.data.prepare.pack.work_items import ALL_TRAIN, ALL_VAL, ByHash, ByPosition
from flatout.data.prepare.plan.make import make_plan
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.prepare.request.inputs import Corpus
from flatout.data.prepare.request.options import Options
from flatout.data.sources import ReadTask
from flatout.errors import DataError
from flatout.storage.files import Unfinished


def read(*texts):
    return texts


@pytest.fixture
def parts():
    return [
        ReadTask(read, ("abc", "de"), "one", num_bytes=5),
        ReadTask(read, ("f" * 20,), "two", num_bytes=20),
        ReadTask(read, ("g",), "three", num_bytes=1),
    ]


def record_range(work, number=0, tokens=()):
    """Write a range as a worker does."""
    writer = ShardWriter(work.dataset, number, vocab_size=300)
    if len(tokens):
        writer.append("train", np.array(tokens), [len(tokens)], text_bytes=1)
    record = RangeRecord(number=number, num_bytes=1, shards=writer.finish())
    record_path(work.ranges, number).write_text(record.model_dump_json())
    return record


def planned(parts, *, split="tail 0.3", validation=(), **limits):
    """Return the plan of some read tasks."""
    held_out = Corpus(("val",), tuple(validation)) if validation else None
    return make_plan(Corpus(("x",), tuple(parts), split, held_out, "mtimes"), Options(**limits))


@pytest.mark.parametrize(
    "limits",
    [{}, {"split": "hash 0.5"}, {"max_documents": 3}, {"max_bytes": 9}, {"max_documents": 1}],
)
def test_a_plan_is_restored_as_written(tmp_path, parts, stub_tokenizer, limits):
    plan = planned(parts, **limits)
    with WorkDir(tmp_path / "out") as work:
        assert work.plan() is None
        work.begin(plan, stub_tokenizer)
        record_range(work)
    with WorkDir(tmp_path / "out") as work:
        found = work.plan()
        assert found.read_tasks == ()
        assert found.restore(parts) == plan
        assert type(found.items[0].assignment) in (ByHash, ByPosition)
        assert sorted(work.done()) == [0]


@pytest.mark.parametrize("limits", [{}, {"max_documents": 1}, {"max_bytes": 2}])
def test_a_plan_with_separate_validation_text_is_restored(tmp_path, parts, stub_tokenizer, limits):
    plan = planned(parts[:2], validation=parts[2:], **limits)
    with WorkDir(tmp_path / "out") as work:
        found = work.begin(plan, stub_tokenizer)
    assert found.restore([*parts[2:], *parts[:2]]) == plan
    assert [item.assignment for item in found.items] == [ALL_VAL, ALL_TRAIN]


def test_a_work_directory_without_records_is_removed(tmp_path, parts, stub_tokenizer):
    plan = planned(parts)
    with WorkDir(tmp_path / "out") as work:
        work.begin(plan, stub_tokenizer)
        (work.dataset / "00000.bin").write_bytes(b"whole, but not recorded")
    assert list(tmp_path.iterdir()) == []


def test_unfinished_files_are_removed_and_records_stay(tmp_path, parts, stub_tokenizer):
    plan = planned(parts)
    with WorkDir(tmp_path / "out") as work:
        work.begin(plan, stub_tokenizer)
        record_range(work)
        (work.dataset / "00001.bin.1234.part").write_bytes(b"torn")
    assert sorted(path.name for path in (tmp_path / ".out.part" / "ranges").iterdir()) == [
        "000000.json"
    ]
    assert not list((tmp_path / ".out.part" / "dataset").iterdir())


@pytest.mark.parametrize(
    "spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:3])]
)
def test_a_range_whose_files_are_lost_is_packed_again(tmp_path, parts, stub_tokenizer, spoil):
    with WorkDir(tmp_path / "out") as work:
        work.begin(planned(parts), stub_tokenizer)
        records = [record_range(work, number, [1, 2, 3]) for number in range(3)]
        work.require_files(records)
        spoil(work.dataset / "00001.bin")
        with pytest.raises(Unfinished, match=r"1 ranges .* have lost files.*packs them again"):
            work.require_files(records)
        assert sorted(work.done()) == [0, 2]


def test_a_work_directory_that_its_owner_removes_is_made_again(tmp_path, monkeypatch):
    path, lock = tmp_path / ".out.part", fcntl.flock

    def late(*how):
        monkeypatch.setattr(fcntl, "flock", lock)
        path.rmdir()
        lock(*how)

    monkeypatch.setattr(fcntl, "flock", late)
    with WorkDir(tmp_path / "out"):
        assert path.exists(), "made again"
        with (
            pytest.raises(DataError, match="Another process is writing"),
            WorkDir(tmp_path / "out"),
        ):
            pass
    assert not path.exists()


def test_a_damaged_plan_is_named(tmp_path, parts, stub_tokenizer):
    plan = planned(parts)
    with WorkDir(tmp_path / "out") as work:
        work.begin(plan, stub_tokenizer)
        record_range(work)
        (work.path / "plan.json").write_text("{")
        with pytest.raises(DataError, match=r"plan\.json is damaged or was not written") as caught:
            work.plan()
    assert str(work.path) in caught.value.fix


def test_parts_cover_every_range_once():
    parts = [WorkPart.parse(f"{index}/3") for index in (1, 2, 3)]
    assert [[part.has(number) for part in parts].count(True) for number in range(7)] == [1] * 7
    assert WorkPart.parse("1/1").has(5)
    for wrong in ("0/3", "4/3", "3", "a/b", "1/0", "-1/3"):
        with pytest.raises(DataError, match="is not a part"):
            WorkPart.parse(wrong)


def test_parts_share_a_work_directory(tmp_path, parts, stub_tokenizer):
    plan = planned(parts)
    out = tmp_path / "out"
    with WorkDir(out, WorkPart(1, 2)) as first, WorkDir(out, WorkPart(2, 2)) as second:
        assert first.begin(plan, stub_tokenizer).restore(parts) == plan
        other = plan.model_copy(update={"rule": "another"})
        found = second.begin(other, stub_tokenizer)
        assert found.restore(parts) == plan, "the first plan stays"
        with pytest.raises(DataError, match="Another process"), WorkDir(out, WorkPart(2, 2)):
            pass
        with pytest.raises(DataError, match="Another process"), WorkDir(out):
            pass
        first.clear()
        assert first.path.exists(), "other processes work in it"
        assert second.parts_of([1, 3]) == ": part 2/2"
    with WorkDir(out) as work:
        assert work.plan().restore(parts) == plan


def test_a_part_with_another_count_is_rejected(tmp_path, parts, stub_tokenizer):
    plan = planned(parts)
    out = tmp_path / "out"
    with WorkDir(out, WorkPart(1, 2)) as work:
        work.begin(plan, stub_tokenizer)
        before = sorted(work.path.rglob("*"))
        with (
            pytest.raises(
                DataError,
                match=r"--part 2/3: the work in .* is divided into 2 parts\. .*--part I/2",
            ),
            WorkDir(out, WorkPart(2, 3)),
        ):
            pass
        assert sorted(work.path.rglob("*")) == before
    with WorkDir(out, WorkPart(2, 2)) as work:
        assert work.plan().restore(parts) == plan
