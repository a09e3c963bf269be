"""`push` and `pull` move a dataset and back, checked, and replace nothing."""

import pytest

import flatout
from flatout.errors import DataError


@pytest.mark.parametrize("kind", ["checkpoint", "export", "run"])
def test_a_run_and_what_comes_from_it_move_too(fox_run, tmp_path, kind):
    run, there = fox_run[0] / "runs" / "fox", (tmp_path / "store").as_uri()
    folder = {"run": run, "checkpoint": run / "checkpoints" / "step-3"}.get(kind, tmp_path / "hf")
    if kind == "export":
        flatout.export(run, out=folder)
        (folder / "README.md").write_text("edited")
    copy = tmp_path / "copy" / folder.name
    flatout.pull(flatout.push(folder, there).path, copy)
    if kind == "run":
        assert contents(copy / "checkpoints" / "step-3") == contents(run / "checkpoints" / "step-3")
    else:
        assert contents(copy) == contents(folder)
    assert flatout.verify(copy).ok
    flatout.pull(flatout.push(folder, there).path, copy)  # everything is there
    assert flatout.verify(copy).ok


def test_a_run_that_is_named_by_dots_is_sent_under_its_name(fox_run, tmp_path, monkeypatch):
    run = fox_run[0] / "runs" / "fox"
    monkeypatch.chdir(run / "checkpoints")
    store = tmp_path / "a" / "store"
    assert flatout.push("..", store.as_uri()).path == f"{store.as_uri()}/fox"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["store"]
    flatout.pull(store.as_uri(), tmp_path / "copy" / "fox")
    assert flatout.verify(tmp_path / "copy" / "fox").ok


@pytest.mark.parametrize("kind", ["run", "checkpoint"])
def test_the_url_that_was_pushed_to_is_enough_where_it_has_one_directory(fox_run, tmp_path, kind):
    run, store = fox_run[0] / "runs" / "fox", (tmp_path / "store").as_uri()
    folder = {"run": run, "checkpoint": run / "checkpoints" / "step-3"}[kind]
    flatout.push(folder, store)
    flatout.pull(store, tmp_path / "copy" / folder.name)
    assert flatout.verify(tmp_path / "copy" / folder.name).ok
    (tmp_path / "store" / "another").mkdir()
    (tmp_path / "store" / "another" / "file").touch()
    with pytest.raises(DataError, match=r"no whole directory .* It has another, ") as caught:
        flatout.pull(store, tmp_path / "more" / folder.name)
    assert "one of these" in caught.value.fix
    assert not (tmp_path / "more").exists()


def test_an_interrupted_pull_continues_and_an_altered_file_is_named(tiny_set, tmp_path):
    sent = flatout.push(tiny_set, (tmp_path / "store").as_uri())
    there = tmp_path / "store" / sent.path.rpartition("/")[2]
    shard = there / "00000.bin"
    original = shard.read_bytes()
    shard.write_bytes(b"x" * len(original))
    for _ in range(2):
        with pytest.raises(DataError, match=r"00000\.bin is damaged"):
            flatout.pull(sent.path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    shard.write_bytes(original)
    flatout.pull(sent.path, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(tiny_set)
    assert flatout.push(tiny_set, (tmp_path / "store").as_uri()).path == sent.path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_dataset_comes_back_equal_and_the_same_call_again_changes_nothing(tiny_set, tmp_path):
    there = (tmp_path / "store").as_uri()
    sent = flatout.push(tiny_set, there)
    assert sent.path.startswith(f"{there}/{tiny_set.name}-")
    for _ in range(2):
        assert flatout.pull(sent.path, tmp_path / "copy").path == str(tmp_path / "copy")
        assert contents(tmp_path / "copy") == contents(tiny_set)
    assert flatout.push(tiny_set, there).path == sent.path
