"""Separate validation text."""

from functools import partial

import numpy as np
import pytest
from prepared import content, documents, prepared, write_rows

from flatout.data.prepare.pack.range_files import ShardWriter
from flatout.data.prepare.pipeline import Options, prepare_dataset
from flatout.data.prepare.plan import make
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.sources import files
from flatout.data.store.shards import Dataset
from flatout.errors import DataError

pytestmark = pytest.mark.slow

TRAIN = [f"row {number} " * (number % 5 + 1) for number in range(300)]
VAL = [f"held {number} é" for number in range(90)]


def write(path, texts):
    return str(write_rows(path, texts))


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 500)
    monkeypatch.setattr(make, "range_bytes", lambda _: 1_200)
    return write(tmp_path / "train.jsonl", TRAIN)


@pytest.fixture
def val(tmp_path):
    return write(tmp_path / "valid.jsonl", VAL)


@pytest.mark.quick_cases("train:300")
@pytest.mark.parametrize("tokenizer", ["char", "byte", "train:300"])
def test_each_split_is_the_text_named_for_it_for_any_number_of_workers(
    train, val, tmp_path, tokenizer
):
    for count in (1, 2, 3):
        made = prepared(
            train, out=tmp_path / f"out{count}", tokenizer=tokenizer, val=(val,), workers=count
        )
    assert content(tmp_path / "out1") == content(tmp_path / "out2") == content(tmp_path / "out3")
    assert documents(made.path, "train") == TRAIN
    assert documents(made.path, "val") == VAL
    assert (
        made.manifest.split_rule,
        made.manifest.source["split"],
        made.manifest.source["val"],
    ) == ("named", "named", [val])


def test_train_n_learns_from_training_text_alone_and_char_from_both_splits(train, val, tmp_path):
    own = prepared(train, out=tmp_path / "own", tokenizer="train:300", val=(val,), workers=1)
    alone = prepared(train, out=tmp_path / "alone", tokenizer="train:300", workers=1)
    assert own.manifest.tokenizer.digest == alone.manifest.tokenizer.digest
    characters = prepared(train, out=tmp_path / "char", tokenizer="char", val=(val,), workers=1)
    assert characters.manifest.vocab_size == len(set("".join(TRAIN + VAL))) + 1


@pytest.mark.parametrize(
    ("limits", "taken"),
    [
        ({"max_documents": 7}, TRAIN[:7]),
        ({"max_bytes": 31}, ["row 0 ", "row 1 row 1 ", "row 2 row 2 r"]),
    ],
)
def test_limits_apply_to_training_text(train, val, tmp_path, limits, taken):
    for count in (1, 2):
        made = prepared(
            train,
            out=tmp_path / f"out{count}",
            tokenizer="byte",
            val=(val,),
            **limits,
            workers=count,
        )
        assert documents(made.path, "train") == taken
        assert documents(made.path, "val") == VAL


def test_validation_text_may_have_several_sources_and_is_masked_too(tmp_path):
    rows = [{"text": f"answer {number}", "ask": "what?"} for number in range(6)]
    for name, part in (("train", rows[:3]), ("a", rows[3:5]), ("b", rows[5:])):
        write_rows(tmp_path / f"{name}.jsonl", part)
    options = Options(
        tokenizer="byte",
        mask_field="ask",
        val=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")),
    )
    made = prepare_dataset([str(tmp_path / "train.jsonl")], tmp_path / "out", options)
    assert documents(made.path, "val") == [f"what?answer {number}" for number in (3, 4, 5)]
    mask = (
        Dataset.open(made.path).split("val").read_mask_range(0, made.manifest.splits["val"].tokens)
    )
    assert np.array_equal(mask, ([False] * 5 + [True] * 9) * 3)


def test_an_existing_dataset_is_kept_and_other_validation_text_rejected(train, val, tmp_path):
    options = Options(tokenizer="byte", val=(val,))
    prepare_dataset([train], tmp_path / "out", options)
    moved = str((tmp_path / "valid.jsonl").rename(tmp_path / "moved.jsonl"))
    (tmp_path / "valid.jsonl").write_text((tmp_path / "moved.jsonl").read_text())
    assert prepare_dataset([train], tmp_path / "out", options).existed
    other = write(tmp_path / "other.jsonl", ["other"])
    named = f"its validation text is {val}, and"
    for texts, said in (
        ((other,), f"a different dataset: {named} {other} is requested"),
        ((val, moved), f"{named} {val} {moved} is requested"),
        ((), f"split is 'named', and None is requested; {named} nothing is requested"),
    ):
        with pytest.raises(DataError, match=said):
            prepared(train, out=tmp_path / "out", val=texts)
    write(tmp_path / "valid.jsonl", [*VAL, "one more"])
    with pytest.raises(DataError, match="a different dataset: the validation text has changed"):
        prepare_dataset([train], tmp_path / "out", options)
    prepared(train, out=tmp_path / "plain")
    with pytest.raises(DataError, match=f"its validation text is nothing, and {val} is requested"):
        prepare_dataset([train], tmp_path / "plain", options)


@pytest.mark.parametrize("tokenizer", ["byte", "train:300"])
def test_an_empty_split_is_named_and_leaves_nothing(train, val, tmp_path, tokenizer):
    empty = write(tmp_path / "empty.jsonl", [""])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"empty.jsonl contains no documents\."):
        prepared(train, out=tmp_path / "out", tokenizer=tokenizer, val=(empty,))
    with pytest.raises(DataError, match=r"empty.jsonl contains no documents \(1 empty document\)"):
        prepared(empty, out=tmp_path / "out", tokenizer=tokenizer, val=(val,))
    assert sorted(tmp_path.iterdir()) == before


def test_bad_rows_of_both_splits_raise_by_name_or_are_counted(tmp_path):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    train, val = str(tmp_path / "train.jsonl"), str(tmp_path / "valid.jsonl")
    (tmp_path / "valid.jsonl").write_text('{"text": "held"}\n{"text": 2}\n')
    with pytest.raises(DataError, match=r"valid.jsonl, line 2"):
        prepared(train, out=tmp_path / "out", val=(val,))
    made = prepared(train, out=tmp_path / "out", val=(val,), on_bad_row="skip")
    (entry,) = made.manifest.skipped
    assert (entry.count, entry.first) == (2, (f"{val}, line 2", f"{train}, line 2"))


def test_joined_parts_give_the_same_bytes(train, val, tmp_path):
    options = Options(tokenizer="train:300", val=(val,), max_documents=250)
    prepare_dataset([train], tmp_path / "whole", options)
    for index in (2, 3, 1):
        prepare_dataset([train], tmp_path / "out", options, part=WorkPart(index, 3), workers=1)
    other = write(tmp_path / "other.jsonl", ["other"])
    with pytest.raises(
        DataError,
        match=f"an unfinished, different dataset: its validation text is {val}, and {other} is "
        f"requested",
    ):
        prepare_dataset(
            [train],
            tmp_path / "out",
            Options(tokenizer="train:300", val=(other,), max_documents=250),
            join=True,
        )
    prepare_dataset([train], tmp_path / "out", options, join=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("done", [1, 3, 6])
def test_an_interrupted_prepare_resumes_and_repeats_no_work(
    train, val, tmp_path, monkeypatch, done
):
    options = Options(tokenizer="train:300", val=(val,), max_bytes=4_000)
    whole = prepare_dataset([train], tmp_path / "whole", options, workers=1)
    finishing = ShardWriter.finish
    left = iter(range(done))

    def finish(writer):
        if next(left, None) is None:
            writer.abandon()
            raise KeyboardInterrupt
        return finishing(writer)

    monkeypatch.setattr(ShardWriter, "finish", finish)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset([train], tmp_path / "out", options, workers=1)
    written = []
    monkeypatch.setattr(
        ShardWriter, "finish", lambda writer: written.append(writer) or finishing(writer)
    )
    monkeypatch.setattr(make, "make_plan", partial(pytest.fail, "planned again"))
    with WorkDir(tmp_path / "out") as work:
        there, count = len(work.done()), len(work.plan().items)
    prepare_dataset([train], tmp_path / "out", options, workers=1)
    assert 0 < there < count
    assert len(written) == count - there
    assert content(tmp_path / "out") == content(whole.path)
