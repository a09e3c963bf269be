"""No deleted, renamed or retyped key in a JSON or YAML file of a run causes a traceback."""

import copy
import json
import shutil
from contextlib import suppress

import pytest
import yaml

from flatout.cli.commands.eval import evaluate
from flatout.cli.commands.generate import generate
from flatout.cli.commands.runs import runs
from flatout.cli.commands.train import train
from flatout.config.schema import load_config
from flatout.errors import CheckpointError, FlatoutError
from flatout.training.checkpoint import catalog

pytestmark = pytest.mark.slow

RETYPED = (None, -3, "x", [], {})
"""Replacement values. Successive keys take successive values, so that each file sees every kind."""
FEW_KEYS, MANY_KEYS = 1, 20
"""Keys tried per file; in a longer file, every n-th key."""


def paths_of(document, prefix=()):
    """Yield the path of every key and every item."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:2])
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield (*prefix, key)
        yield from paths_of(value, (*prefix, key))


def damaged(document, most_keys):
    """Yield descriptions of damage and the damaged documents, for about `most_keys` keys."""
    yield "empty", {}
    yield "a list", []
    yield "a number", 7
    paths = list(paths_of(document))
    for number, path in enumerate(paths[:: max(len(paths) // most_keys, 1)]):
        for what in ("deleted", "renamed", "retyped"):
            copied = copy.deepcopy(document)
            holder = copied
            for key in path[:-1]:
                holder = holder[key]
            value = holder.pop(path[-1])
            if what == "renamed" and isinstance(holder, dict):
                key = path[-1]
                holder[chr(ord(key[0]) ^ 1) + key[1:]] = value
            elif what == "retyped":
                holder.insert(path[-1], RETYPED[number % 5]) if isinstance(
                    holder, list
                ) else holder.update({path[-1]: RETYPED[number % 5]})
            yield f"{'.'.join(map(str, path))} {what}", copied


def attempt(call):
    """Make the call and ignore a FlatoutError; other errors propagate."""
    with suppress(FlatoutError):
        call()


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, tiny_set, tiny):
    """A run with a checkpoint per step, started from another run."""
    root = tmp_path_factory.mktemp("damage")
    small = {
        "data.path": str(tiny_set),
        "train.steps": 2,
        "train.eval_every": 1,
        "checkpoint.every_steps": 1,
        "checkpoint.keep": 9,
    }
    first = load_config().with_values({**tiny, **small})
    train(first, run=root / "first")
    config = first.with_values({"train.steps": 4})
    train(config, run=root / "run", resume=root / "first" / "checkpoints" / "step-1")
    return root, config


FILES = {
    "run/config.yaml": ("train", "generate", "runs"),
    "run/events.jsonl": ("train", "runs"),
    "run/metrics.jsonl": ("train", "runs"),
    "run/checkpoints/step-4/manifest.json": ("train", "eval"),
    "run/checkpoints/step-4/index.json": ("train", "eval"),
    "run/checkpoints/step-4/state.json": ("train", "eval"),
}


@pytest.mark.quick_cases(
    "run/config.yaml-1", "run/events.jsonl-1", "run/checkpoints/step-4/manifest.json-1"
)
@pytest.mark.parametrize("most_keys", [FEW_KEYS, pytest.param(MANY_KEYS, marks=pytest.mark.faults)])
@pytest.mark.parametrize("name", FILES)
def test_every_damaged_key_is_tolerated_or_rejected_with_a_fix(
    name, most_keys, finished_run, tmp_path, survived
):
    root, config = finished_run
    run, file = root / "run", root / name
    kept = tmp_path / "kept"
    shutil.copytree(root, kept, symlinks=True)
    calls = {
        "train": lambda: train(
            config, run=run, resume=root / "first" / "checkpoints" / "step-1"
        ).summary(),
        "eval": lambda: evaluate(run, "last", max_tokens=32),
        "generate": lambda: generate(run, max_tokens=2),
        "runs": lambda: runs(root).summary(),
    }
    text = file.read_text()
    lines = file.suffix == ".jsonl"
    document = (
        yaml.safe_load(text)
        if file.suffix == ".yaml"
        else json.loads(text.splitlines()[-1] if lines else text)
    )
    tries, problems = 0, []
    for what, changed in damaged(document, most_keys):
        for command in FILES[name]:
            tries += 1
            written = yaml.safe_dump(changed) if file.suffix == ".yaml" else json.dumps(changed)
            file.write_text(text + written + "\n" if lines else written)
            try:
                attempt(calls[command])
            except Exception as error:
                problems.append(f"{command}, {what}: {type(error).__name__}: {error}")
            shutil.rmtree(root)
            shutil.copytree(kept, root, symlinks=True)
    survived("key", tries, problems)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"files"', '"fhles"'),
        ('"state.json"', '"ctate.json"'),
        ('"size_bytes"', '"sixe_bytes"'),
        ('"step"', '"rtep"'),
    ],
)
def test_a_flipped_bit_in_the_newest_manifest_falls_back_to_the_previous_checkpoint(
    old, new, finished_run, tmp_path
):
    root, _ = finished_run
    shutil.copytree(root / "run", tmp_path / "run")
    manifest = tmp_path / "run" / "checkpoints" / "step-4" / "manifest.json"
    assert old in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(old, new, 1))
    assert catalog.latest(tmp_path / "run").name == "step-3"


def test_a_manifest_that_lacks_a_file_of_the_index_is_incomplete(finished_run, tmp_path):
    root, _ = finished_run
    path = shutil.copytree(root / "run" / "checkpoints" / "step-4", tmp_path / "step-4")
    manifest = json.loads((path / "manifest.json").read_text())
    names = [file["name"] for file in manifest["files"]]
    del manifest["files"][names.index("optimizer-00000.safetensors")]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"optimizer-00000\.safetensors is not in the manifest"
    ):
        catalog.require_complete(path)


def test_a_date_in_a_yaml_file_is_text(tmp_path):
    (tmp_path / "recipe.yaml").write_text("name: 2026-13-01\n")
    assert load_config(tmp_path / "recipe.yaml").name == "2026-13-01"
