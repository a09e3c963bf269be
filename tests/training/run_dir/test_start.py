"""Where a command starts: one table of what the directory has, what is asked, and the answer."""

import shlex
from pathlib import Path

import pytest
from fakes import Recorder, fake_checkpoint

from flatout.config.schema import load_config
from flatout.errors import ConfigError, FlatoutError
from flatout.training.run_dir import layout
from flatout.training.run_dir.start import find_start, how_to_train_on

STORED = ["train.steps=10", "optim.lr=1e-3", "schedule.warmup=2", "schedule.decay=0.5"]
CONSTANT, WSD, COSINE = (f"schedule.kind={kind}" for kind in ("constant", "wsd", "cosine"))
EARLY = {"steps": 6, "stopped_early": True, "best_step": 2}
PATIENT = ["train.patience=2", "train.eval_every=2"]
OTHER = "other/checkpoints/step-4"

TABLE = {
    # name: (the run directory, what is asked, --resume, the answer)
    "nothing": ({}, [], "auto", "new at 0"),
    "nothing, never": ({}, [], "never", "new at 0"),
    "never in a run": ({"saved": [5]}, [], "never", "! would overwrite .*config.yaml"),
    "never saved": ({"saved": []}, ["optim.lr=2"], "auto", "new at 0"),
    "never saved, half a save": ({"half": [5]}, ["optim.lr=2"], "auto", "new at 0"),
    "stopped": ({"saved": [2, 5]}, [], "auto", "stored at run/step-5"),
    "stopped, by its path": ({"saved": [2, 5]}, [], "run", "stored at run/step-5"),
    "stopped, by its last step": (
        {"saved": [2, 5]}, [], "run/checkpoints/step-5", "stored at run/step-5",
    ),
    "an earlier step": (
        {"saved": [2, 5]}, [], "run/checkpoints/step-2",
        "! already saved step 5, and a run only goes forward.*"
        "--resume .*run/checkpoints/step-2 --run-dir .*run-from-2`",
    ),
    "the newest is damaged": ({"saved": [2], "damaged": [5]}, [], "auto", "stored at run/step-2"),
    "the newest is damaged, by path": (
        {"saved": [2], "damaged": [5]}, [], "run/checkpoints/step-2", "stored at run/step-2",
    ),
    "damaged, by path": (
        {"saved": [2], "damaged": [5]}, [], "run/checkpoints/step-5", "! state.json is damaged",
    ),
    "all damaged": ({"damaged": [5]}, [], "auto", "! No checkpoint .* is complete"),
    "a replacement was killed": ({"replaced": [5]}, ["optim.lr=2"], "auto", "! different settings"),
    "other settings": (
        {"saved": [5]}, ["optim.lr=2"], "auto",
        r"! different settings: optim\.lr: 0\.001 -> 2\.0.*--resume .*run --run-dir DIR",
    ),
    "no config": ({"saved": [5], "stored": None}, [], "auto", "! checkpoints, but no config.yaml"),
    # values that are not finite
    "bad twice": (
        {"saved": [2, 5], "journal": ["save 2", "save 5", "resume 5", *2 * ["divergence 7"]]},
        [], "auto", "stored at run/step-2",
    ),
    "bad twice, by path": (
        {"saved": [2, 5], "journal": ["save 2", "save 5", "resume 5", *2 * ["divergence 7"]]},
        [], "run/checkpoints/step-5", "stored at run/step-5",
    ),
    "bad once": (
        {"saved": [2, 5], "journal": ["save 2", "save 5", "resume 5", "divergence 7"]},
        [], "auto", "stored at run/step-5",
    ),
    "bad, then passed, then bad": (
        {"saved": [5, 8], "journal": ["save 5", "divergence 7", "resume 5", "save 8",
                                      "divergence 9"]},
        [], "auto", "stored at run/step-8",
    ),
    "bad twice, saved on the way": (
        {"saved": [2, 5, 6], "journal": ["save 2", "save 5", "divergence 7", "resume 5", "save 6",
                                         "divergence 7"]},
        [], "auto", "stored at run/step-2",
    ),
    "bad twice, replaced since": (
        {"saved": [2, 5], "journal": ["save 2", "save 5", "divergence 7", "resume 5",
                                      "divergence 7", "resume 2", "save 5"]},
        [], "auto", "stored at run/step-5",
    ),
    "all bad": (
        {"saved": [5], "journal": ["save 5", "resume 5", *2 * ["divergence 7"]]},
        [], "auto", r"! Every start from a checkpoint of .*init_from=.*run --run-dir DIR",
    ),
    # lengths
    "longer": (
        {"saved": [5]}, ["train.steps=12", CONSTANT], "auto", "longer 10 -> 12 at run/step-5",
    ),
    "longer after its end": (
        {"saved": [10], "summary": {}}, ["train.steps=12", CONSTANT], "auto",
        "longer 10 -> 12 at run/step-10",
    ),
    "longer with step 0, as of init_from": (
        {"saved": [0, 10], "summary": {}}, ["train.steps=12", CONSTANT], "auto",
        "longer 10 -> 12 at run/step-10",
    ),
    "cosine longer after its end": (
        {"saved": [0, 10], "summary": {}}, ["train.steps=12", COSINE], "auto",
        "! cannot be made longer, 10 -> 12 steps: it is at step 10, .*schedule.kind=cosine .*since "
        "step 4.*--resume .*run --run-dir .*run-12`.* continues from step 10 .*The rate changes",
    ),
    "wsd longer before its decay": (
        {"saved": [5]}, ["train.steps=12", WSD], "auto", "longer 10 -> 12 at run/step-5",
    ),
    "wsd longer after its decay": (
        {"saved": [2, 5, 10]}, ["train.steps=12", WSD], "auto",
        "! cannot be made longer.*--resume .*run/checkpoints/step-5 --run-dir .*run-12`.* step 5 ",
    ),
    "wsd longer, nothing before its decay": (
        {"saved": [10]}, ["train.steps=12", WSD], "auto",
        "! cannot be made longer.*--resume .*run --run-dir .*run-12`.* from step 10 .*The rate",
    ),
    "another run's rates do not count": (
        {"saved": [10], "origin": OTHER}, ["train.steps=12", CONSTANT], "auto",
        "longer 10 -> 12 at run/step-10",
    ),
    "shorter": ({"saved": [5]}, ["train.steps=7"], "auto", "! planned for 10 steps, but 7 were"),
    # the end
    "finished": ({"saved": [10], "summary": {}}, [], "auto", "finished: a new run"),
    "finished, constant": (
        {"saved": [10], "summary": {}}, [CONSTANT], "auto", "finished: train.steps to more than 10",
    ),
    "the last checkpoint was lost": (
        {"saved": [8], "summary": {}}, [], "auto", "stored at run/step-8",
    ),
    "evaluation was lost": ({"saved": [10]}, [], "auto", "stored at run/step-10"),
    "out of patience": (
        {"saved": [6], "summary": EARLY, "stated": PATIENT}, PATIENT, "auto",
        "finished: train.patience to more than 2",
    ),
    "more patience": (
        {"saved": [6], "summary": EARLY, "stated": PATIENT}, [*PATIENT, "train.patience=4"], "auto",
        "stored at run/step-6",
    ),
    # another run
    "from a run": ({}, [], "other", "new at other/step-4"),
    "from a checkpoint": ({}, ["optim.lr=2"], OTHER, "new at other/step-4"),
    "from a run, again, unsaved": (
        {"saved": [], "origin": OTHER}, [], "auto", "new at other/step-4",
    ),
    "from a run, again, saved": (
        {"saved": [6], "origin": OTHER}, [], OTHER, "stored at run/step-6",
    ),
    "from a run that is gone, saved": (
        {"saved": [6], "origin": "gone/checkpoints/step-9"}, [], "auto", "stored at run/step-6",
    ),
    "from a run that is gone, unsaved": (
        {"saved": [], "origin": "gone/checkpoints/step-9"}, [], "auto",
        "! started from .*step-9, which no longer exists",
    ),
    "from another run, saved": ({"saved": [5]}, [], "other", "! checkpoints of its own.*--run-dir"),
    "from nowhere": ({}, [], "missing", "! There is no checkpoint"),
    "from a run without checkpoints": ({}, [], "bare", "! has no checkpoint"),
    "from a directory that is none": ({}, [], "plain", "! is not a checkpoint"),
}  # fmt: skip


def make(root, saved=None, damaged=(), half=(), replaced=(), stored=STORED, stated=(), **more):
    """Write a run directory, and other directories that `--resume` may name."""
    run = root / "run"
    run.mkdir()
    is_run = any(map(bool, (saved, damaged, half, replaced))) or saved == []
    if stored and is_run:
        kind = more.get("kind", [])
        config = load_config(None, [*stored, *stated, *kind])
        layout.write_config(run, config, requested=config)
    for step in (*(saved or ()), *damaged, *replaced):
        fake_checkpoint(run, step)
    for step in damaged:
        (run / f"checkpoints/step-{step}/state.json").write_bytes(b"y")
    for step in half:
        (run / f"checkpoints/step-{step}.part-{'a' * 16}").mkdir(parents=True)
    for step in replaced:
        path = run / f"checkpoints/step-{step}"
        path.rename(path.with_name(f"{path.name}.old-{'a' * 16}"))
    for line in more.get("journal", ()):
        event, step = line.split()
        layout.append_event(run, event, step=int(step))
    if "summary" in more:
        layout.append_event(run, "end", **more["summary"])
    if "origin" in more:
        path = str((root / more["origin"]).resolve())
        layout.append_event(run, "origin", asked=path, checkpoint=path)
    fake_checkpoint(root / "other", 4)
    (root / "bare" / "checkpoints").mkdir(parents=True)
    (root / "plain").mkdir()
    return run


@pytest.mark.parametrize(("has", "asked", "resume", "answer"), TABLE.values(), ids=TABLE)
def test_where_a_command_starts(has, asked, resume, answer, tmp_path):
    kind = [word for word in asked if word.startswith("schedule.kind")] or [COSINE]
    run = make(tmp_path, kind=kind, **has)
    resume = resume if resume in ("auto", "never") else str(tmp_path / resume)
    before = sorted(tmp_path.rglob("*"))
    request = load_config(None, [*STORED, *kind, *asked])
    if answer.startswith("! "):
        with pytest.raises(FlatoutError, match=f"(?s){answer[2:]}"):
            find_start(run, request, resume, steps_of=lambda _: request.train.steps)
        return
    start = find_start(run, request, resume, steps_of=lambda _: request.train.steps)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
    if answer.startswith("finished: "):
        assert start.summary == has["summary"] | {}
        assert answer.partition(": ")[2] in start.message
        return
    kept = "stored" if start.stored else "new"
    if start.requested:
        kept = f"longer 10 -> {start.stored.train.steps}"
        assert start.requested.train.steps == start.stored.train.steps
    at = start.checkpoint
    where = f"{at.parts[-3]}/{at.name}" if at else "0"
    assert (start.summary, f"{kept} at {where}") == (None, answer)
    is_elsewhere = bool(at) and at.parts[-3] == "other" and "origin" not in has
    assert (start.origin is not None) == is_elsewhere


def test_what_is_unusual_is_said(tmp_path):
    run, recorder = make(tmp_path, saved=[2], damaged=[5], origin=OTHER), Recorder()
    request = load_config(None, STORED)
    start = find_start(run, request, str(tmp_path / OTHER), progress=recorder)
    assert "Resuming from step-2" in start.message
    assert "step-5 cannot be used" in recorder.lines[0]


def test_a_run_resumes_in_the_directory_of_its_checkpoints(tmp_path, monkeypatch):
    """`auto` is not a path there."""
    monkeypatch.chdir(make(tmp_path, saved=[2, 5]) / "checkpoints")
    assert find_start(Path(".."), load_config(None, STORED)).checkpoint.name == "step-5"


def test_a_new_run_starts_from_the_newest_checkpoint_that_is_not_bad(tmp_path):
    run = make(tmp_path, saved=[2, 5], journal=TABLE["bad twice"][0]["journal"])
    start = find_start(tmp_path / "new", load_config(None, STORED), str(run))
    assert start.checkpoint.name == "step-2"


def test_a_journal_that_was_deleted_is_said(tmp_path):
    recorder = Recorder()
    find_start(make(tmp_path, saved=[2]), load_config(None, STORED), progress=recorder)
    assert "events.jsonl is missing" in recorder.lines[0]


def test_an_origin_is_the_checkpoint_that_the_run_had_then(tmp_path):
    run = make(tmp_path, saved=[], origin=OTHER)
    fake_checkpoint(tmp_path / "other", 9)
    request = load_config(None, STORED)
    assert find_start(run, request).checkpoint.name == "step-4"
    assert find_start(run, request, str(tmp_path / "other")).checkpoint.name == "step-9"


AWKWARD = "my runs/$(touch X) it's"


def test_commands_in_errors_quote_the_path(tmp_path):
    root = tmp_path / AWKWARD
    root.mkdir(parents=True)
    run = make(root, saved=[2, 10])
    with pytest.raises(ConfigError) as refused:
        find_start(run, load_config(None, [*STORED, "train.steps=12"]), steps_of=lambda _: 12)
    words = shlex.split(refused.value.fix.split("`")[1])
    assert words == ["--resume", f"{run}/checkpoints/step-2", "--run-dir", f"{run}-12"]
    config = load_config(None, STORED)
    more = how_to_train_on(Path(AWKWARD), config, Path("checkpoints/step-10"), {})
    found = shlex.split(more[more.index("--resume") : more.index(", with")])
    assert found == ["--resume", AWKWARD, "--run-dir", "DIR"]
