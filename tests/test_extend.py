"""docs/extend.md does what it says: its files, written into a copy of the package, are found,
listed and used. So is the Python of the documents.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RAIN = "An empty shelf. A door ajar. Rain on the roof.\n" * 400

PROGRAM = """
import json, sys
from flatout.cli import main
for words in json.loads(sys.argv[1]):
    print(">>>", " ".join(words), flush=True)
    try:
        main(words)
    except SystemExit as stop:
        if stop.code:
            sys.exit(f"exit {stop.code}: {' '.join(words)}")
"""


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def written_files() -> dict[str, str]:
    found = [*blocks("extend.md", "python"), *blocks("extend.md", "yaml")]
    return {named[1]: block for block in found if (named := re.match(r"# (flatout/\S+)\n", block))}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder that holds a copy of the package, with the guide's files in it, and some text."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(
        ROOT / "flatout", folder / "flatout", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, block in written_files().items():
        assert not (folder / name).exists(), name
        (folder / name).write_text(block, encoding="utf-8")
    (folder / "rain.txt").write_text(RAIN, encoding="utf-8")
    (folder / "book.txt").write_text(RAIN, encoding="utf-8")
    return folder


def python(place: Path, program: str, *arguments: str) -> str:
    """Run a program in a fresh Python that sees the copy first, whatever is installed."""
    program = f"import sys; sys.path.insert(0, {str(place)!r})\n{program}\nimport flatout; assert flatout.__file__.startswith({str(place)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def flatout(place: Path, *lines: str) -> dict[str, str]:
    """Run command lines one after the other, and return what each printed."""
    output = python(place, PROGRAM, json.dumps([line.split() for line in lines]))
    shown = [part.partition("\n")[::2] for part in output.split(">>> ")[1:]]
    assert [line for line, _ in shown] == list(lines)
    return dict(shown)


def test_the_guide_has_a_file_for_each_kind_of_entry():
    folders = {Path(name).parent.name for name in written_files()}
    kinds = {
        path.name
        for path in (ROOT / "flatout").iterdir()
        if path.is_dir() and path.name.endswith("s")
    }
    assert folders == kinds - {"ops"}


def test_the_lists_pick_them_up(place):
    shown = flatout(
        place,
        *(
            f"list {kind}"
            for kind in (
                "recipes",
                "datasets",
                "sources",
                "machines",
                "models",
                "optimizers",
                "speedups",
            )
        ),
        "--help",
    )
    for name in written_files():
        kind, entry = Path(name).parent.name, Path(name).stem.replace("_", "-")
        assert re.search(
            rf"\b{entry}\b", shown["--help" if kind == "commands" else f"list {kind}"]
        ), name


def test_a_command_a_data_set_and_a_source_work(place):
    shown = flatout(
        place,
        "words book.txt --json",
        "prepare rain --from rain.txt --out data/rain --tokenizer char --workers 1 --json",
        "prepare counting:documents=300 --out data/counting --tokenizer byte --workers 1 --json",
    )
    results = [json.loads(text.strip().splitlines()[-1]) for text in shown.values()]
    assert results[0]["words"] == len(RAIN.split())
    assert results[1]["bytes"] == len(RAIN)
    assert results[2]["documents"] == 300


def test_a_model_an_optimiser_and_optimisations_train(place):
    prepare = "prepare counting:documents=300 --out data/trained --tokenizer byte --workers 1"
    common = "data.path=data/trained train.device=cpu --json"
    speedups = "speedups=pretokenised,foreach-adamw,row-by-row-loss"
    own = f"train small-bigram {common} --run-dir runs/bigram"
    theirs = f"train shakespeare-char {common} {speedups} train.steps=2 batch.tokens_per_step=256 optim.kind=adamw --run-dir runs/transformer"
    shown = flatout(place, prepare, own, theirs)
    for line in (own, theirs):
        result = json.loads(shown[line].strip().splitlines()[-1])
        assert 0 < result["val_loss"] < 8
    config = (place / "runs" / "bigram" / "config.yaml").read_text(encoding="utf-8")
    assert "bigram" in config
    assert "sgd" in config


def test_the_kernel_matches_the_reference(place):
    program = """
import torch
from flatout.ops.cross_entropy import reference
from flatout.assembly.recipe import baseline
from flatout.registry import SPEEDUPS
kernel = baseline().with_speedup(SPEEDUPS.get("row-by-row-loss")).ops.cross_entropy
results = []
for function in (reference, kernel):
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(-1, 11, (3, 5))
    loss, count = function(hidden, weight, targets)
    loss.backward()
    results.append((loss.detach(), count, hidden.grad, weight.grad))
for a, b in zip(*results):
    torch.testing.assert_close(a, b)
"""
    python(place, program)


def test_the_machine_is_known(place):
    python(
        place,
        "from flatout.hardware import row_of\nassert row_of('NVIDIA Example 1000').peak_tflops['bf16'].value == 200",
    )


@pytest.mark.parametrize("document", ["quickstart.md", "extend.md"])
def test_the_python_of_the_documents_runs(place, document):
    programs = [
        block for block in blocks(document, "python") if not re.match(r"# \S+\.py\n", block)
    ]
    assert programs
    prepare = 'if __import__("pathlib").Path("data/book").exists() is False: flatout.prepare(["book.txt"], out="data/book", workers=1)\n'
    for block in programs:
        short = block.replace(
            "train.steps=100", f'train.steps=3", "train.device=cpu", "name={document}'
        )
        first, _, rest = short.partition("\n")
        assert first == "import flatout"
        assert short != block
        python(place, f"{first}\n{prepare}{rest}")
