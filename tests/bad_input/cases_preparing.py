"""Preparing: limits, validation text, parts, unfinished work."""

import os
from pathlib import Path

from case import Case, World, run_command

from flatout.data.prepare.plan import make
from flatout.data.prepare.plan.work_dir import WorkDir, WorkPart
from flatout.data.sources import files

NEW = "--out data/new --tokenizer byte"
MANY = "".join(
    f'{{"text": "row {number}"}}\n' if number % 7 else f'{{"text": {number}}}\n'
    for number in range(1, 40)
)


def many_rows(world: World) -> None:
    """Write rows, of which every seventh has a number as its text."""
    world.write("many.jsonl", MANY)


def first_part_done(world: World) -> None:
    """Prepare the first of two parts, in several ranges."""
    world.patch.setattr(make, "range_bytes", lambda _: 100)
    world.patch.setattr(files, "PART_BYTES", 100)
    world.write("good.jsonl", "".join(f'{{"text": "row {number}"}}\n' for number in range(40)))
    assert run_command(f"prepare good.jsonl {NEW} --part 1/2", world.path).code == 0


def part_in_use(world: World) -> None:
    first_part_done(world)
    world.stack.enter_context(WorkDir(world.path / "data/new", WorkPart(1, 2)))


def text_changed(world: World) -> None:
    first_part_done(world)
    with (world.path / "good.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')


def file_rewritten(world: World) -> None:
    first_part_done(world)
    file = world.path / "good.jsonl"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))


def out_is_a_mount(world: World) -> None:
    (world.path / "data/new").mkdir()
    world.patch.setattr(os.path, "ismount", lambda path: Path(path).name == "new")


def validation_files(world: World) -> None:
    """Write text files, and prepare a dataset with one of them as validation text."""
    for name, rows in (("good", 40), ("copy", 40), ("held", 5), ("other", 7), ("none", 0)):
        world.write(
            f"{name}.jsonl", "".join(f'{{"text": "row {number}"}}\n' for number in range(rows))
        )
    assert (
        run_command(
            "prepare good.jsonl --out data/sides --tokenizer byte --val held.jsonl", world.path
        ).code
        == 0
    )


CASES = [
    Case(
        "more bad rows than allowed",
        f"prepare many.jsonl {NEW} --split 'hash 0.3' --on-bad-row skip --max-bad-rows 3",
        ("5 of the first 39 rows", "3 may be skipped", "many.jsonl, line 7"),
        ("--max-bad-rows 50", "keeps the work done"),
        many_rows,
        progress="The finished parts are kept in ",
        may_change=("data/.new.part",),
    ),
    Case(
        "--max-bad-rows without --on-bad-row skip",
        f"prepare many.jsonl {NEW} --max-bad-rows 3",
        ("--max-bad-rows 3",),
        ("--on-bad-row skip",),
        many_rows,
    ),
    Case(
        "validation text that is also training text",
        f"prepare good.jsonl {NEW} --val copy.jsonl",
        ("copy.jsonl", "both training and validation"),
        ("Remove it from one",),
        validation_files,
    ),
    Case(
        "--val and --split together",
        f"prepare good.jsonl {NEW} --val held.jsonl --split 'tail 0.1'",
        ("--val", "--split 'tail 0.1'"),
        ("Remove one",),
        validation_files,
    ),
    Case(
        "validation text that does not exist",
        f"prepare good.jsonl {NEW} --val hled.jsonl",
        ("hled.jsonl",),
        ("'held.jsonl'",),
        validation_files,
    ),
    Case(
        "validation text without documents",
        f"prepare good.jsonl {NEW} --val none.jsonl",
        ("none.jsonl", "no documents"),
        ("text in it",),
        validation_files,
    ),
    Case(
        "a dataset card as validation text",
        f"prepare good.jsonl {NEW} --val shakespeare",
        ("--val shakespeare",),
        ("as the source",),
        validation_files,
    ),
    Case(
        "other validation text for an existing dataset",
        "prepare good.jsonl --out data/sides --tokenizer byte --val other.jsonl",
        ("data/sides", "is held.jsonl", "other.jsonl is requested"),
        ("a different --out",),
        validation_files,
    ),
    Case("an invalid --part", f"prepare book.txt {NEW} --part 3/2", ("--part '3/2'",), ("2/8",)),
    Case(
        "--part and --join together",
        f"prepare book.txt {NEW} --part 1/2 --join",
        ("--part", "--join"),
        ("Remove one of the two",),
    ),
    Case(
        "--join before any --part", f"prepare book.txt {NEW} --join", ("data/new",), ("--part 1/N",)
    ),
    Case(
        "--join with a part missing",
        f"prepare good.jsonl {NEW} --join",
        ("data/new", "part 2/2"),
        ("Run those parts", "--join"),
        first_part_done,
    ),
    Case(
        "a part that another process is preparing",
        f"prepare good.jsonl {NEW} --part 1/2",
        ("data/new", "Another process"),
        ("a different --out",),
        part_in_use,
    ),
    Case(
        "a dataset that another process is preparing",
        f"prepare good.jsonl {NEW}",
        ("data/new", "Another process"),
        ("a different --out",),
        part_in_use,
    ),
    Case(
        "a --part with a different number of parts",
        f"prepare good.jsonl {NEW} --part 2/3",
        ("--part 2/3", "data/.new.part", "2 parts"),
        ("--part I/2",),
        first_part_done,
    ),
    Case(
        "a mount point as --out",
        f"prepare book.txt {NEW}",
        ("data/new", "mount point"),
        ("--out data/new/NAME",),
        out_is_a_mount,
    ),
    Case(
        "unfinished work for a text file that was rewritten",
        f"prepare good.jsonl {NEW}",
        ("The text has changed", "data/.new.part"),
        ("Restore the text", "remove the directory data/.new.part"),
        file_rewritten,
    ),
    Case(
        "unfinished work with other options",
        "prepare good.jsonl --out data/new --tokenizer char",
        ("data/.new.part", "tokenizer is 'byte', and 'char' is requested"),
        ("remove the directory data/.new.part",),
        first_part_done,
    ),
    Case(
        "unfinished work for text that has changed",
        f"prepare good.jsonl {NEW} --join",
        ("data/.new.part", "the text has changed"),
        ("remove the directory data/.new.part",),
        text_changed,
    ),
    Case(
        "a bad row in one of several parts",
        f"prepare many.jsonl {NEW} --split 'hash 0.3' --part 1/2",
        ("many.jsonl, line 7", "a number"),
        ("remove the directory data/.new.part", "every part again"),
        many_rows,
        may_change=("data/.new.part",),
    ),
    Case(
        "--workers 0",
        f"prepare book.txt {NEW} --workers 0",
        ("'--workers'", "x>=1"),
        ("Remove --workers",),
    ),
]
