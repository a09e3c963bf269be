"""Verifying and resuming."""

import shutil

from case import Case, World, run_command, table


def without_checkpoints(world: World) -> None:
    shutil.rmtree(world.path / "runs/first/checkpoints")


def other_text(world: World) -> None:
    """Replace the dataset of an unfinished run by one of another text."""
    line = "train my.yaml --run-dir runs/second"
    assert run_command(line, world.path).code == 0
    journal = world.path / "runs/second/events.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(line for line in lines if '"event": "end"' not in line))
    shutil.rmtree(world.path / "data/book")
    world.write("other.txt", "Call me Ishmael. Some years ago, I went to sea. " * 70)
    line = "prepare other.txt --out data/book --tokenizer byte"
    assert run_command(line, world.path).code == 0


CASES = [
    *table("""
a key for `verify` without --resume
    verify data/book optim.lr=1
    uses optim.lr=1 only with --resume -> Remove optim.lr=1
--steps of `verify` that are not two numbers
    verify --resume my.yaml --steps ten
    --steps 'ten' is not two numbers -> --steps 5,5
--steps of `verify` beyond the end of the recipe
    verify --resume my.yaml --steps 3,3
    needs 6 steps, but the recipe has 2 -> --steps 1,1 | train.steps=6
`verify --resume` of a recipe with one step
    verify --resume my.yaml train.steps=1
    A recipe of 1 step -> train.steps=2
"""),
    Case("`verify --resume` of a dataset", "verify --resume data/book", ("data/book",), ()),
    *table("""
`verify` of a step without a checkpoint
    verify runs/first/checkpoints/step-999
    There is no checkpoint runs/first/checkpoints/step-999 -> Steps that have one: 2.
an option of `runs` that was removed
    runs first --remove-aside
    has no option '--remove-aside' -> `flatout runs RUN --keep N`
`verify` of a recipe
    verify my.yaml
    my.yaml is a recipe -> `flatout verify --resume my.yaml`
--keep without a run
    runs --keep 1
    --keep deletes checkpoints of one run -> flatout runs RUN --keep 1
"""),
    Case(
        "`verify` of a run without checkpoints",
        "verify first",
        ("The run runs/first has no checkpoint yet",),
        ("flatout train",),
        without_checkpoints,
    ),
    Case(
        "resuming on a dataset of other tokens",
        "train my.yaml --run-dir runs/second",
        ("The training tokens of runs/second have changed since step-2", "data/book: tokens "),
        ("Restore the dataset", "--resume runs/second --run-dir DIR"),
        other_text,
    ),
]
