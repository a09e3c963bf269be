"""Datasets and runs on disk that cannot be used or must not be overwritten."""

import shutil
from collections import namedtuple

from case import Case, World, table

from flatout.training.run_dir.lock import hold_lock

FULL = namedtuple("usage", "total used free")(10**12, 10**12, 1000)


def replace_text(world: World, name: str, old: str, new: str) -> None:
    path = world.path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def foreign_code(world: World) -> None:
    """Write a configuration that names a file in the run directory."""
    world.write("runs/first/weights.py", "raise SystemExit('this code was run')")
    replace_text(
        world, "runs/first/config.yaml", "kind: transformer", "kind: runs.first.weights:Model"
    )


def run_in_use(world: World) -> None:
    world.stack.enter_context(hold_lock(world.path / "runs/first"))


CASES = [
    *table("""
a URL as --run-dir
    train my.yaml --run-dir s3://bucket/run
    --run-dir s3://bucket/run is a URL -> a local path
a URL as --resume
    train my.yaml --resume gs://bucket/run
    --resume gs://bucket/run -> a local path
a URL as train.init_from
    train my.yaml train.init_from=s3://bucket/run
    train.init_from=s3://bucket/run -> a local path
a URL as the run of `generate`
    generate s3://bucket/run
    s3://bucket/run is a URL -> a local path
a URL as --out of `bench`
    bench my.yaml --out s3://bucket/bench
    --out s3://bucket/bench is a URL -> a local path
a URL as data.path
    train my.yaml data.path=s3://bucket/set
    s3://bucket/set is a URL -> flatout pull URL DIR
a URL as --out of `prepare`
    prepare book.txt --tokenizer byte --out s3://bucket/set
    s3://bucket/set is a URL -> flatout push DIR URL
a directory that is not whole for `push`
    push runs file:///store
    runs is not a run, a checkpoint, a dataset or an export -> flatout prepare
a path that does not exist for `push`
    push data/bok file:///store
    data/bok is not a run -> flatout export
a path as the URL of `push`
    push data/book store
    store is not a URL -> s3://BUCKET/FOLDER | file:///PATH
a URL with a password for `push`
    push data/book s3://me:secret@bucket/sets
    s3://bucket/sets must not contain -> environment variables
the Hugging Face hub as the URL of `push`
    push data/book hf://me/sets
    read-only -> hf upload ORG/NAME DIR
a URL without a whole directory for `pull`
    pull file:///nowhere/at/all data/new
    no whole directory at file:///nowhere/at/all -> flatout push
a URL as --out of `profile`
    profile my.yaml --out s3://bucket/profile
    --out s3://bucket/profile is a URL -> a local path
a file as --out of `profile`
    profile my.yaml --out book.txt
    Cannot write book.txt | File exists -> --out DIR
a URL as the file of `report`
    report first --out s3://bucket/report.html
    --out s3://bucket/report.html is a URL -> a local path
a report of a run that does not exist
    report runs/firts
    no run directory runs/firts -> Did you mean runs/first?
a report in place of another file
    report first --out book.txt
    book.txt exists and is not a report -> --out
a report in a directory that does not exist
    report first --out pages/first.html
    Cannot write pages -> Choose a directory
a URL as the directory of `runs`
    runs gs://bucket/runs
    gs://bucket/runs is a URL -> a local path
no data
    train my.yaml data.path=
    data.path -> flatout prepare
data that is not prepared
    train my.yaml data.path=data/new
    data/new -> flatout prepare SOURCE --out data/new
a misspelt dataset directory
    train my.yaml data.path=data/bok
    data/bok -> 'data/book' | flatout prepare
text instead of a dataset
    train my.yaml data.path=book.txt
    book.txt -> flatout prepare book.txt --out data/book
a directory that is not a dataset
    train my.yaml data.path=runs
    runs | manifest.json -> flatout prepare
a directory without a manifest
    inspect runs
    runs | manifest.json -> flatout prepare
"""),
    Case(
        "a manifest that is not JSON",
        "train my.yaml",
        ("data/book/manifest.json",),
        ("again",),
        lambda w: w.write("data/book/manifest.json", "{"),
    ),
    Case(
        "a manifest with a changed number",
        "train my.yaml",
        ("data/book/manifest.json is damaged", "digest"),
        ("Restore it from a copy",),
        lambda w: replace_text(w, "data/book/manifest.json", '"text_bytes": 3', '"text_bytes": 2'),
    ),
    Case(
        "a dataset of a newer version of flatout",
        "train my.yaml",
        ("format 9", "newer version"),
        ("newer flatout",),
        lambda w: replace_text(
            w, "data/book/manifest.json", '"format_version": 3', '"format_version": 9'
        ),
    ),
    Case(
        "a missing shard",
        "train my.yaml",
        ("data/book/00000.bin", "missing"),
        ("flatout prepare",),
        lambda w: (w.path / "data/book/00000.bin").unlink(),
    ),
    Case(
        "a truncated shard",
        "train my.yaml",
        ("data/book/00000.bin", "bytes"),
        ("flatout prepare",),
        lambda w: w.write("data/book/00000.bin", b"short"),
    ),
    Case(
        "a shard whose block fails its checksum",
        "train my.yaml --run-dir runs/new",
        ("data/book/00000.bin, byte 0", "checksum"),
        ("flatout prepare",),
        lambda w: w.overwrite("data/book/00000.bin", 9, b"?"),
        progress="Training",
        may_change=("runs/new",),
    ),
    Case(
        "a tokenizer that does not match the dataset",
        "train my.yaml --run-dir runs/new",
        ("data/book/tokenizer.json",),
        ("flatout prepare",),
        lambda w: w.write("data/book/tokenizer.json", "{}"),
    ),
    Case(
        "a dataset shorter than one sequence",
        "train my.yaml data.seq_len=8192 batch.tokens_per_step=8192 batch.rows_per_device=1",
        ("data/book", "8192", "data.seq_len"),
        ("data.seq_len=",),
    ),
    Case(
        "a dataset with another vocabulary than the run's",
        "train my.yaml data.path=data/rows --run-dir runs/first",
        ("data/rows", "runs/first"),
        ("runs/first/tokenizer.json",),
        lambda w: w.rows(),
    ),
    Case(
        "a run directory with other settings",
        "train my.yaml optim.lr=1 --run-dir runs/first",
        ("runs/first", "optim.lr: 0.001 -> 1.0"),
        ("--run-dir DIR",),
    ),
    Case(
        "a longer run whose learning rate depended on its length",
        "train my.yaml train.steps=9 --run-dir runs/first",
        ("runs/first", "2 -> 9 steps", "schedule.kind=cosine"),
        ("`--resume runs/first --run-dir runs/first-9`",),
    ),
    *table("""
a shorter run in the same directory
    train my.yaml train.steps=1 --run-dir runs/first
    runs/first | 2 steps -> train.steps=2 | --run-dir DIR
a new run that is no longer than the checkpoint it starts from
    train my.yaml --run-dir runs/new --resume runs/first
    runs/first/checkpoints/step-2 is at step 2 | 2 steps
    -> train.steps to more than 2 | train.init_from=runs/first/checkpoints/step-2
"""),
    Case(
        "a run directory in use",
        "train my.yaml --run-dir runs/first",
        ("runs/first", "process"),
        ("--run-dir DIR",),
        run_in_use,
    ),
    *table("""
a run directory with other files in it
    train my.yaml --run-dir data
    data | book -> --run-dir DIR
a file instead of the run directory
    train my.yaml --run-dir book.txt
    book.txt -> --run-dir DIR
"""),
    Case(
        "a run directory without write permission",
        "train my.yaml --run-dir closed/new",
        ("closed/new", "Permission denied"),
        ("--run-dir DIR",),
        lambda w: w.protect("closed"),
    ),
    *table("""
--resume never with an existing run
    train my.yaml --run-dir runs/first --resume never
    runs/first -> --run-dir DIR
--resume with a missing checkpoint
    train my.yaml --run-dir runs/new --resume runs/old
    runs/old -> step-100
"""),
    Case(
        "a truncated checkpoint",
        "generate runs/first",
        ("step-2", "bytes"),
        ("copy",),
        lambda w: w.write("runs/first/checkpoints/step-2/model-00000.safetensors", b"torn"),
        progress="Checkpoint step-2 cannot be used",
    ),
    Case(
        "a run's config.yaml that is not YAML",
        "generate runs/first",
        ("runs/first/config.yaml", "line 1"),
        ("Correct",),
        lambda w: w.write("runs/first/config.yaml", "{"),
    ),
    Case(
        "a run's config.yaml with an unknown key",
        "eval runs/first",
        ("config.yaml", "'optimm'"),
        ("'optim'",),
        lambda w: replace_text(w, "runs/first/config.yaml", "optim:", "optimm:"),
    ),
    Case(
        "a run's config.yaml with an unknown speedup",
        "train my.yaml --run-dir runs/first train.steps=4",
        ("config.yaml", "no speedup named 'prefetched'"),
        ("'prefetch'",),
        lambda w: replace_text(w, "runs/first/config.yaml", "- prefetch\n", "- prefetched\n"),
    ),
    Case(
        "a run's config.yaml with a damaged key of the model",
        "generate runs/first",
        ("runs/first/config.yaml", "'model.d_modl'"),
        ("'model.d_model'",),
        lambda w: replace_text(w, "runs/first/config.yaml", "d_model:", "d_modl:"),
    ),
    Case(
        "a run from elsewhere that names code to import",
        "generate runs/first --max-tokens 8",
        ("runs/first/config.yaml", "'runs.first.weights:Model'", "runs/first/weights.py"),
        ("Read that code", "flatout generate --trust-code"),
        foreign_code,
    ),
    Case(
        "a recipe in such a run directory",
        "bench runs/first/config.yaml",
        ("runs/first/config.yaml", "'runs.first.weights:Model'"),
        ("copy the recipe",),
        foreign_code,
    ),
    Case(
        "a URL that is read through a different file system",
        "pull reference://data::https://example.org/data.json data/new",
        ("reference://data",),
        ("without `::`",),
    ),
    Case(
        "a run whose dataset is missing",
        "eval runs/first",
        ("data/book",),
        ("flatout prepare",),
        lambda w: shutil.rmtree(w.path / "data/book"),
    ),
    Case(
        "too little disk space to start",
        "train my.yaml --run-dir runs/new",
        ("checkpoints", "free"),
        ("checkpoint.keep",),
        lambda w: w.patch.setattr(shutil, "disk_usage", lambda _: FULL),
    ),
    *table("""
a text file for `inspect`
    inspect book.txt
    book.txt -> flatout prepare
a directory of checkpoints instead of a checkpoint
    train my.yaml --run-dir runs/new --resume runs/first/checkpoints
    runs/first/checkpoints -> step-100
train.init_from that does not exist
    train my.yaml train.init_from=runs/old
    train.init_from=runs/old -> flatout runs
a mix with a dataset that is not prepared
    train my.yaml 'data.mix={data/book: 3, data/code: 1}'
    data/code -> flatout prepare SOURCE --out data/code
"""),
]
