"""Several processes, each doing a part of the work, and the join."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from prepared import content

from flatout.cli.commands.prepare import prepare
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.plan import make
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.prepare.request.inputs import open_corpus
from flatout.data.sources import files
from flatout.errors import DataError, UsageError

OPTIONS = Options(tokenizer="train:300", split="hash 0.2")


@pytest.fixture
def rows(rows, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 700)
    monkeypatch.setattr(make, "range_bytes", lambda _: 1_400)
    return str(rows)


@pytest.mark.slow
def test_joined_parts_give_the_same_bytes(rows, tmp_path):
    prepare_dataset([rows], tmp_path / "whole", OPTIONS)
    out = tmp_path / "out"
    left = []
    for index in (3, 1):
        done = prepare_dataset([rows], out, OPTIONS, part=WorkPart(index, 3), workers=index)
        left.append(done.left)
    assert left[0] > left[1] > 0
    with pytest.raises(DataError, match=r"\d of \d+ ranges of .*out are not done: part 2/3\."):
        prepare_dataset([rows], out, OPTIONS, join=True)
    assert prepare_dataset([rows], out, OPTIONS, part=WorkPart(2, 3)).left == 0
    again = prepare_dataset([rows], out, OPTIONS, part=WorkPart(2, 3))
    assert again.left == 0
    assert not out.exists()
    made = prepare_dataset([rows], out, OPTIONS, join=True)
    assert content(out) == content(tmp_path / "whole")
    assert not made.existed
    assert prepare_dataset([rows], out, OPTIONS, join=True).existed
    assert prepare_dataset([rows], out, OPTIONS, part=WorkPart(2, 3)).existed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.jsonl", "whole"]


def test_a_replaced_tokenizer_in_the_work_directory_is_rejected(rows, tmp_path):
    prepare_dataset([rows], tmp_path / "out", OPTIONS, part=WorkPart(1, 2))
    work = tmp_path / ".out.part"
    prepare_dataset(
        [rows], tmp_path / "other", replace(OPTIONS, tokenizer="byte"), part=WorkPart(1, 2)
    )
    shutil.copy(tmp_path / ".other.part/tokenizer.json", work)
    with pytest.raises(
        DataError,
        match=rf"{work}/tokenizer\.json is not the tokenizer that this work started "
        rf"with.*Remove the directory {work}",
    ):
        prepare_dataset([rows], tmp_path / "out", OPTIONS, part=WorkPart(2, 2))


def test_one_process_can_finish_what_parts_started(rows, tmp_path):
    prepare_dataset([rows], tmp_path / "whole", OPTIONS)
    prepare_dataset([rows], tmp_path / "out", OPTIONS, part=WorkPart(2, 2))
    prepare_dataset([rows], tmp_path / "out", OPTIONS)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_parts_of_a_different_dataset_are_rejected(rows, tmp_path):
    prepare_dataset([rows], tmp_path / "out", OPTIONS, part=WorkPart(1, 2))
    other = Options(tokenizer="byte", split="hash 0.2")
    for call in (
        lambda: prepare_dataset([rows], tmp_path / "out", other, part=WorkPart(2, 2)),
        lambda: prepare_dataset([rows], tmp_path / "out", other),
    ):
        with pytest.raises(
            DataError,
            match=r"an unfinished, different dataset: tokenizer is 'train:300', and 'byte' is "
            r"requested",
        ):
            call()


def test_a_part_that_plans_at_the_same_time_takes_the_plan_of_the_first(
    rows, tmp_path, monkeypatch
):
    prepare_dataset([rows], tmp_path / "out", OPTIONS, part=WorkPart(1, 2))
    stored = WorkDir.plan
    for options in (OPTIONS, Options(tokenizer="byte", split="hash 0.2")):
        answers = iter([lambda work: None])  # the other has not written it yet
        monkeypatch.setattr(WorkDir, "plan", lambda work: next(answers, stored)(work))  # noqa: B023
        if options is OPTIONS:
            prepare_dataset([rows], tmp_path / "out", options, part=WorkPart(2, 2))
        else:
            with pytest.raises(DataError, match="an unfinished, different dataset: tokenizer is"):
                prepare_dataset([rows], tmp_path / "out", options, part=WorkPart(2, 2))


@pytest.mark.slow
def test_a_bad_row_in_one_part_prevents_the_join_and_explains_what_to_do(rows, tmp_path):
    out, work = tmp_path / "out", tmp_path / ".out.part"
    good = Path(rows).read_text()
    Path(rows).write_text(good.replace('{"text": "row 150 "}', '{"text": 150}'))
    for workers in (1, 2):
        with pytest.raises(
            DataError,
            match=rf"rows\.jsonl.*151.*Other text or options make it a different dataset: "
            rf"remove the directory {work}, .* run every part again\.",
        ):
            prepare_dataset([rows], out, OPTIONS, part=part_of(rows, 150), workers=workers)
    assert (
        prepare_dataset(
            [rows], out, OPTIONS, part=WorkPart(part_of(rows, 150).index % 3 + 1, 3)
        ).left
        > 0
    )
    with pytest.raises(DataError, match=r"are not done: part .*Run those parts again"):
        prepare_dataset([rows], out, OPTIONS, join=True)
    skipping = replace(OPTIONS, on_bad_row="skip")
    prepare_dataset([rows], out, skipping, part=part_of(rows, 150))
    with pytest.raises(DataError, match=r"rows\.jsonl.*151"):
        prepare_dataset([rows], out, OPTIONS, part=part_of(rows, 150))
    Path(rows).write_text(good)
    for call in (
        lambda: prepare_dataset([rows], out, OPTIONS, join=True),
        lambda: prepare_dataset([rows], out, OPTIONS, part=WorkPart(1, 3)),
    ):
        with pytest.raises(
            DataError,
            match=rf"an unfinished, different dataset: the text has changed.*remove the "
            rf"directory {work}",
        ):
            call()
    assert not out.exists()
    shutil.rmtree(work)
    for index in (1, 2, 3):
        prepare_dataset([rows], out, OPTIONS, part=WorkPart(index, 3))
    prepare_dataset([rows], out, OPTIONS, join=True)
    prepare_dataset([rows], tmp_path / "whole", OPTIONS)
    assert content(out) == content(tmp_path / "whole")


def part_of(rows, number):
    """Return the part, of three, that packs a row."""
    line = 0
    for item in make.make_plan(open_corpus([rows], OPTIONS), OPTIONS).items:
        line += sum(1 for task in item.read_tasks for _ in task.rows())
        if number < line:
            return WorkPart(item.number % 3 + 1, 3)
    raise AssertionError(number)


def test_the_command_reports_remaining_parts(rows, tmp_path):
    first = prepare([rows], tmp_path / "out", tokenizer="byte", part="1/2")
    assert "part 1/2 done in" in first.summary()
    assert "are left for other parts" in first.summary()
    second = prepare([rows], tmp_path / "out", tokenizer="byte", part="2/2")
    assert "all parts are done. Join them with --join" in second.summary()
    made = prepare([rows], tmp_path / "out", tokenizer="byte", join=True)
    assert made.documents == first.documents + second.documents == 300
    assert (made.tokens, made.bytes) == (first.tokens + second.tokens, first.bytes + second.bytes)
    with pytest.raises(UsageError, match="cannot be combined"):
        prepare([rows], tmp_path / "out", tokenizer="byte", part="2/2", join=True)
