import fcntl
import os

import pytest

from flatout.data.prepare.pack.jobs import ByHash, ByPosition, Whole
from flatout.data.prepare.pack.range_files import RangeWriter
from flatout.data.prepare.plan.split import make_plan
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.prepare.plan.work_plan import PlanFile
from flatout.data.prepare.request.inputs import Corpus
from flatout.data.prepare.request.options import Options
from flatout.data.prepare.request.request import Request
from flatout.errors import DataError
from flatout.progress import SILENT
from flatout.sources import ReadTask


def read(*texts):
    return texts


@pytest.fixture
def parts():
    return [
        ReadTask(read, ("abc", "de"), "one", num_bytes=5),
        ReadTask(read, ("f" * 20,), "two", num_bytes=20),
        ReadTask(read, ("g",), "three", num_bytes=1),
    ]


def stored(parts, tokenizer, *, split="tail 0.3", validation=(), **limits):
    """Return a plan and its plan file."""
    held_out = Corpus(("val",), tuple(validation)) if validation else None
    corpus = Corpus(("x",), tuple(parts), split, held_out, "mtimes")
    request = Request(corpus, Options(**limits), {"fingerprint": "x"}, SILENT)
    plan = make_plan(corpus, request.options)
    return plan, PlanFile.of(plan, request, tokenizer)


@pytest.mark.parametrize(
    "limits",
    [{}, {"split": "hash 0.5"}, {"max_documents": 3}, {"max_bytes": 9}, {"max_documents": 1}],
)
def test_a_plan_is_restored_as_written(tmp_path, parts, stub_tokenizer, limits):
    plan, wanted = stored(parts, stub_tokenizer, **limits)
    with WorkDir(tmp_path / "out") as work:
        assert work.plan() is None
        work.begin(wanted, stub_tokenizer)
        RangeWriter(work.ranges, 0, vocab_size=300).finish()
    with WorkDir(tmp_path / "out") as work:
        found = work.plan()
        assert found == wanted
        assert found.restore(parts) == plan
        assert type(found.assignment) in (ByHash, ByPosition)
        assert sorted(work.done()) == [0]


@pytest.mark.parametrize("limits", [{}, {"max_documents": 1}, {"max_bytes": 2}])
def test_a_plan_with_separate_validation_text_is_restored(tmp_path, parts, stub_tokenizer, limits):
    plan, wanted = stored(parts[:2], stub_tokenizer, validation=parts[2:], **limits)
    with WorkDir(tmp_path / "out") as work:
        work.begin(wanted, stub_tokenizer)
        found = work.plan()
    assert found.restore([*parts[2:], *parts[:2]]) == plan
    assert (found.assignment, found.validation_jobs) == (Whole("train"), 1)


def test_a_plan_older_than_separate_validation_text_is_restored(tmp_path, parts, stub_tokenizer):
    plan, wanted = stored(parts, stub_tokenizer)
    older = wanted.model_dump(mode="json", by_alias=True)
    del older["validation_jobs"], older["moment"]
    assert PlanFile.model_validate(older).restore(parts) == plan


def test_a_work_directory_without_records_is_removed(tmp_path, parts, stub_tokenizer):
    _, wanted = stored(parts, stub_tokenizer)
    with WorkDir(tmp_path / "out") as work:
        work.begin(wanted, stub_tokenizer)
        (work.ranges / "000000.train.bin").write_bytes(b"whole, but not recorded")
    assert list(tmp_path.iterdir()) == []


def test_unfinished_files_are_removed_and_records_stay(tmp_path, parts, stub_tokenizer):
    _, wanted = stored(parts, stub_tokenizer)
    with WorkDir(tmp_path / "out") as work:
        work.begin(wanted, stub_tokenizer)
        RangeWriter(work.ranges, 0, vocab_size=300).finish()
        (work.ranges / "000001.train.bin.1234.part").write_bytes(b"torn")
    assert sorted(path.name for path in (tmp_path / ".out.part" / "ranges").iterdir()) == [
        "000000.json"
    ]


def test_a_work_directory_of_another_process_is_refused(tmp_path):
    (tmp_path / ".out.part").mkdir()
    other = os.open(tmp_path / ".out.part", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with (
            pytest.raises(DataError, match=r"Another process is writing .*out"),
            WorkDir(tmp_path / "out"),
        ):
            pass
    finally:
        os.close(other)
    assert (tmp_path / ".out.part").exists()


def test_a_work_directory_that_its_owner_removes_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / ".out.part"
    path.mkdir()
    lock = fcntl.flock

    def late(*how):
        monkeypatch.setattr(fcntl, "flock", lock)
        path.rmdir()
        lock(*how)

    monkeypatch.setattr(fcntl, "flock", late)
    with WorkDir(tmp_path / "out") as work:
        assert not path.exists(), "treated as absent"
        path.mkdir()
        monkeypatch.setattr(fcntl, "flock", late)
        work.claim()
        assert path.exists(), "made again"
        with (
            pytest.raises(DataError, match="Another process is writing"),
            WorkDir(tmp_path / "out"),
        ):
            pass
    assert not path.exists()


def test_a_damaged_plan_is_named(tmp_path, parts, stub_tokenizer):
    _, wanted = stored(parts, stub_tokenizer)
    with WorkDir(tmp_path / "out") as work:
        work.begin(wanted, stub_tokenizer)
        RangeWriter(work.ranges, 0, vocab_size=300).finish()
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
    _, wanted = stored(parts, stub_tokenizer)
    out = tmp_path / "out"
    with WorkDir(out, WorkPart(1, 2)) as first, WorkDir(out, WorkPart(2, 2)) as second:
        assert first.begin(wanted, stub_tokenizer) == wanted
        other = wanted.model_copy(update={"rule": "another"})
        assert second.begin(other, stub_tokenizer) == wanted, "the first plan stays"
        with pytest.raises(DataError, match="Another process"), WorkDir(out, WorkPart(2, 2)):
            pass
        with pytest.raises(DataError, match="Another process"), WorkDir(out):
            pass
        first.clear()
        assert first.path.exists(), "other processes work in it"
        assert second.parts_of([1, 3]) == ": part 2/2"
    with WorkDir(out) as work:
        assert work.plan() == wanted


def test_a_part_with_another_count_is_refused(tmp_path, parts, stub_tokenizer):
    _, wanted = stored(parts, stub_tokenizer)
    out = tmp_path / "out"
    with WorkDir(out, WorkPart(1, 2)) as work:
        work.begin(wanted, stub_tokenizer)
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
        assert work.plan() == wanted
