import fcntl
import os

import pytest

from flatout.data.prepare.ranges import RangeWriter, make_ranges
from flatout.data.prepare.split_rule import make_named_plan, make_plan
from flatout.data.prepare.tokenize import ByHash, ByPlace, Whole
from flatout.data.prepare.work_dir import PartOf, StoredPlan, WorkFolder
from flatout.errors import DataError
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


def stored(parts, tokenizer, **limits):
    plan = make_plan(parts, split=limits.pop("split", "tail 0.3"), **limits)
    ranges = make_ranges(plan.jobs)
    return plan, ranges, StoredPlan.of(plan, ranges, parts, {"fingerprint": "x"}, tokenizer)


@pytest.mark.parametrize(
    "limits",
    [{}, {"split": "hash 0.5"}, {"max_documents": 3}, {"max_bytes": 9}, {"max_documents": 1}],
)
def test_a_plan_that_is_read_back_is_the_plan_that_was_written(
    tmp_path, parts, stub_tokenizer, limits
):
    plan, ranges, wanted = stored(parts, stub_tokenizer, **limits)
    with WorkFolder(tmp_path / "out") as work:
        assert work.plan() is None
        work.begin(wanted, stub_tokenizer)
        RangeWriter(work.ranges, 0, vocab_size=300).finish()
    with WorkFolder(tmp_path / "out") as work:
        found = work.plan()
        assert found == wanted
        assert found.restored(parts) == (plan, ranges)
        assert type(found.assignment) in (ByHash, ByPlace)
        assert sorted(work.done()) == [0]


@pytest.mark.parametrize("limits", [{}, {"max_documents": 1}, {"max_bytes": 2}])
def test_a_plan_with_validation_text_of_its_own_is_read_back_too(
    tmp_path, parts, stub_tokenizer, limits
):
    plan = make_named_plan(parts[:2], parts[2:], **limits)
    ranges = make_ranges(plan.jobs)
    packed = [*parts[2:], *parts[:2]]
    with WorkFolder(tmp_path / "out") as work:
        work.begin(
            StoredPlan.of(plan, ranges, packed, {"fingerprint": "x"}, stub_tokenizer),
            stub_tokenizer,
        )
        found = work.plan()
    assert found.restored(packed) == (plan, ranges)
    assert (found.assignment, found.validation_jobs) == (Whole("train"), 1)


def test_a_plan_of_before_validation_text_had_its_own_is_followed(tmp_path, parts, stub_tokenizer):
    plan, ranges, wanted = stored(parts, stub_tokenizer)
    older = wanted.model_dump(mode="json")
    del older["validation_jobs"]
    assert StoredPlan.model_validate(older).restored(parts) == (plan, ranges)


def test_what_is_not_worth_going_on_from_goes(tmp_path, parts, stub_tokenizer):
    _, _, wanted = stored(parts, stub_tokenizer)
    with WorkFolder(tmp_path / "out") as work:
        work.begin(wanted, stub_tokenizer)
        (work.ranges / "000000.train.bin").write_bytes(b"whole, but not recorded")
    assert list(tmp_path.iterdir()) == []


def test_what_is_half_written_goes_and_what_is_recorded_stays(tmp_path, parts, stub_tokenizer):
    _, _, wanted = stored(parts, stub_tokenizer)
    with WorkFolder(tmp_path / "out") as work:
        work.begin(wanted, stub_tokenizer)
        RangeWriter(work.ranges, 0, vocab_size=300).finish()
        (work.ranges / "000001.train.bin.1234.part").write_bytes(b"torn")
    assert sorted(path.name for path in (tmp_path / ".out.part" / "ranges").iterdir()) == [
        "000000.json"
    ]


def test_a_folder_that_another_process_owns_is_refused(tmp_path):
    (tmp_path / ".out.part").mkdir()
    other = os.open(tmp_path / ".out.part", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with (
            pytest.raises(DataError, match=r"Another process is writing .*out"),
            WorkFolder(tmp_path / "out"),
        ):
            pass
    finally:
        os.close(other)
    assert (tmp_path / ".out.part").exists()


def test_a_folder_that_its_owner_removes_meanwhile_is_not_owned(tmp_path, monkeypatch):
    path = tmp_path / ".out.part"
    path.mkdir()
    lock = fcntl.flock

    def late(*how):
        monkeypatch.setattr(fcntl, "flock", lock)
        path.rmdir()
        lock(*how)

    monkeypatch.setattr(fcntl, "flock", late)
    with WorkFolder(tmp_path / "out") as work:
        assert not path.exists(), "as when it is not there"
        path.mkdir()
        monkeypatch.setattr(fcntl, "flock", late)
        work.claim()
        assert path.exists(), "made again"
        with (
            pytest.raises(DataError, match="Another process is writing"),
            WorkFolder(tmp_path / "out"),
        ):
            pass
    assert not path.exists()


def test_a_plan_that_cannot_be_read_is_said(tmp_path, parts, stub_tokenizer):
    _, _, wanted = stored(parts, stub_tokenizer)
    with WorkFolder(tmp_path / "out") as work:
        work.begin(wanted, stub_tokenizer)
        RangeWriter(work.ranges, 0, vocab_size=300).finish()
        (work.path / "plan.json").write_text("{")
        with pytest.raises(DataError, match=r"plan\.json cannot be read") as caught:
            work.plan()
    assert str(work.path) in caught.value.fix


def test_parts_cover_every_range_once():
    parts = [PartOf.parse(f"{index}/3") for index in (1, 2, 3)]
    assert [[part.has(number) for part in parts].count(True) for number in range(7)] == [1] * 7
    assert PartOf.parse("1/1").has(5)
    for wrong in ("0/3", "4/3", "3", "a/b", "1/0", "-1/3"):
        with pytest.raises(DataError, match="is not a part"):
            PartOf.parse(wrong)


def test_parts_work_side_by_side_each_alone(tmp_path, parts, stub_tokenizer):
    _, _, wanted = stored(parts, stub_tokenizer)
    out = tmp_path / "out"
    with WorkFolder(out, PartOf(1, 2)) as first, WorkFolder(out, PartOf(2, 2)) as second:
        assert first.begin(wanted, stub_tokenizer) == wanted
        other = wanted.model_copy(update={"rule": "another"})
        assert second.begin(other, stub_tokenizer) == wanted, (
            "the plan of the one who was first stays"
        )
        with pytest.raises(DataError, match="Another process"), WorkFolder(out, PartOf(2, 2)):
            pass
        with pytest.raises(DataError, match="Another process"), WorkFolder(out):
            pass
        first.clear()
        assert first.path.exists(), "others work in it"
        assert second.whose([1, 3]) == ": part 2/2"
    with WorkFolder(out) as work:
        assert work.plan() == wanted


def test_parts_of_another_count_are_refused(tmp_path, parts, stub_tokenizer):
    _, _, wanted = stored(parts, stub_tokenizer)
    out = tmp_path / "out"
    with WorkFolder(out, PartOf(1, 2)) as work:
        work.begin(wanted, stub_tokenizer)
        before = sorted(work.path.rglob("*"))
        with (
            pytest.raises(
                DataError,
                match=r"--part 2/3: the work in .* was begun in parts of 2\. .*--part I/2",
            ),
            WorkFolder(out, PartOf(2, 3)),
        ):
            pass
        assert sorted(work.path.rglob("*")) == before
    with WorkFolder(out, PartOf(2, 2)) as work:
        assert work.plan() == wanted
