"""Exports."""

import shutil

from case import Case, World, table


def without_weights(world: World) -> None:
    for path in (world.path / "runs/first/checkpoints").glob("*/model-*.safetensors"):
        path.unlink()


def without_checkpoints(world: World) -> None:
    shutil.rmtree(world.path / "runs/first/checkpoints")


def exported(world: World) -> None:
    world.write("hf/manifest.json", '{"kind": "export", "files": []}')


CASES = [
    Case(
        "an export of a run that does not exist",
        "export runs/firts --out hf",
        ("no run directory runs/firts",),
        ("Did you mean runs/first?",),
    ),
    Case(
        "an export of a run without a checkpoint",
        "export first --out hf",
        ("has no checkpoint yet",),
        ("Train it first",),
        spoil=without_checkpoints,
    ),
    Case(
        "an export of a run with no whole checkpoint",
        "export first --out hf",
        ("No checkpoint of runs/first is complete", "is missing"),
        ("Restore that file",),
        spoil=without_weights,
        progress="cannot be used",
    ),
    *table("""
an export of a step that was not saved
    export first --out hf --checkpoint 77
    no checkpoint of step 77 -> Steps that have one: 2
an export into a directory with other files
    export first --out data
    data contains files that are not part of an export -> a different --out DIR
an export in place of a file
    export first --out book.txt
    book.txt is not a directory -> --out DIR
"""),
    Case(
        "an export in place of an earlier one",
        "export first --out hf",
        ("hf already contains an export",),
        ("--overwrite",),
        spoil=exported,
    ),
    *table("""
a URL as --out of `export`
    export first --out s3://bucket/hf
    --out s3://bucket/hf is a URL -> a local path
a format that does not exist
    export first --to onnx
    'onnx' is not one of -> --to
a format that was removed
    export first --to gguf
    'gguf' is not one of -> `python convert_hf_to_gguf.py DIR` of llama.cpp
"""),
    Case(
        "an export in place of a run",
        "generate hf",
        ("hf is an export, not a run directory",),
        ("train.init_from=hf", "`lm_eval --model hf --model_args pretrained=hf"),
        spoil=exported,
    ),
]
