"""The examples of docs/extend.md work in a copy of the package."""

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import warm

from flatout.config import registry

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
RAIN = "An empty shelf. A door ajar. Rain on the roof.\n" * 400

PROGRAM = """
import json, sys
from flatout.cli.main import main
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
def folder(tmp_path_factory):
    """A directory with a copy of the package, the guide's files in it, and some text."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(
        ROOT / "flatout", folder / "flatout", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, block in written_files().items():
        is_row = name == "flatout/hardware/machines.yaml"
        assert (folder / name).exists() == is_row, name
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write(f"\n{block}")
    (folder / "rain.txt").write_text(RAIN, encoding="utf-8")
    (folder / "book.txt").write_text(RAIN, encoding="utf-8")
    (folder / "book.ids").write_text("1 2 3\n\n4 5 256\n" * 20, encoding="utf-8")
    return folder


def python(folder: Path, program: str, *arguments: str) -> str:
    """Run a program in a process that imports the copy, and return its output."""
    script = folder / "program.py"
    script.write_text(
        "import sys\nfor name in [name for name in sys.modules if name.startswith('flatout')]:\n"
        f"    del sys.modules[name]\n{program}\n"
        f"import flatout; assert flatout.__file__.startswith({str(folder)!r})"
    )
    done = warm.run([script, *arguments], cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def flatout(folder: Path, *lines: str) -> dict[str, str]:
    """Run command lines in order, and return the output of each."""
    output = python(folder, PROGRAM, json.dumps([line.split() for line in lines]))
    shown = [part.partition("\n")[::2] for part in output.split(">>> ")[1:]]
    assert [line for line, _ in shown] == list(lines)
    return dict(shown)


def test_the_guide_has_an_example_of_every_kind_of_entry():
    folders = {Path(name).parent.name for name in written_files()}
    lists = [one for one in vars(registry).values() if hasattr(one, "folder")]
    kinds = {Path(one.folder).name for one in lists if isinstance(one.folder, str)}
    assert folders == kinds | {"rules", "hardware"}


def test_every_list_shows_its_new_entry(folder):
    shown = flatout(
        folder,
        *(
            f"list {kind}"
            for kind in (
                "architectures",
                "recipes",
                "datasets",
                "loggers",
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
        kind, entry = (part.replace("_", "-") for part in (Path(name).parent.name, Path(name).stem))
        if entry == "machines":  # a row, which has a name of its own
            kind, entry = "machines", "example-1000"
        if kind == "rules":
            continue
        kind = {"families": "architectures", "optim": "optimizers"}.get(kind, kind)
        assert re.search(
            rf"\b{entry}\b", shown["--help" if kind == "commands" else f"list {kind}"]
        ), name


def test_a_new_command_dataset_and_source_work(folder):
    shown = flatout(
        folder,
        "words book.txt --json",
        "prepare rain --from rain.txt --out data/rain --tokenizer char --workers 1 --json",
        "prepare counting:documents=300 --out data/counting --tokenizer byte --workers 1 --json",
    )
    results = [json.loads(text.strip().splitlines()[-1]) for text in shown.values()]
    assert results[0]["words"] == len(RAIN.split())
    assert results[1]["bytes"] == len(RAIN)
    assert results[2]["documents"] == 300


def test_a_new_model_optimizer_logger_and_speedups_train(folder):
    prepare = "prepare counting:documents=300 --out data/trained --tokenizer byte --workers 1"
    common = "data.path=data/trained train.device=cpu --json"
    speedups = "speedups=pretokenised,foreach-adamw,row-by-row-loss"
    own = f"train small-bigram {common} log.to=notes --run-dir runs/bigram"
    settings = "train.steps=2 batch.tokens_per_step=256 optim.kind=adamw"
    theirs = f"train shakespeare-char {common} {speedups} {settings} --run-dir runs/transformer"
    shown = flatout(folder, prepare, own, theirs)
    for line in (own, theirs):
        result = json.loads(shown[line].strip().splitlines()[-1])
        assert 0 < result["val_loss"] < 8
    config = (folder / "runs" / "bigram" / "config.yaml").read_text(encoding="utf-8")
    assert "bigram" in config
    assert "sgd" in config
    notes = (folder / "runs" / "bigram" / "notes.txt").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+: \d\.\d{4}\nfinished\n", notes)


def test_the_new_kernel_matches_the_reference(folder):
    program = """
import torch
from flatout.ops.cross_entropy import reference
from flatout.assembly.choices import assemble
kernel = assemble(["row-by-row-loss"]).cross_entropy
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
    python(folder, program)


def test_a_model_of_the_new_architecture_is_read(folder):
    program = """
import json, torch
from pathlib import Path
from flatout.models.families import tiny_gpt2
from flatout.models.families.source import ForeignWeights, find_model
from flatout.models.transformer import Transformer
from flatout.ops import Ops
document = {"model_type": "tiny_gpt2", "vocab_size": 9, "layers": 1, "width": 8, "heads": 2}
document["positions"] = 4
path = Path("theirs")
path.mkdir()
(path / "config.json").write_text(json.dumps(document))
tiny_gpt2 = tiny_gpt2.ARCHITECTURE
keys = tiny_gpt2.keys(document)
own = {key: value for key, value in keys.items() if key != "kind"}
model = Transformer(Transformer.check(own, seq_len=4), Ops.plain())
parts = {}
for one in tiny_gpt2.tensors(model.config):
    parts |= dict(zip(one.foreign, one.split(model.state_dict()[one.name])))
torch.save(parts, path / "pytorch_model.bin")
weights = ForeignWeights(find_model("theirs"), model)
weights.require_fit({name: tuple(p.shape) for name, p in model.named_parameters()})
assert all(torch.equal(weights.read(name), p) for name, p in model.named_parameters())
assert tiny_gpt2.keys(tiny_gpt2.document(model.config)) == keys
assert tiny_gpt2.why_not(model.config) is None
wider = Transformer.check(own | {"d_ff": 9}, seq_len=4)
assert tiny_gpt2.why_not(wider).startswith("model.d_ff is 9, but TinyGPT2LMHeadModel would have")
"""
    python(folder, program)


def test_the_new_finding_is_found(folder):
    program = """
from flatout.config.schema import load_config
from flatout.measure.diagnose.diagnosis import diagnosis_of
from flatout.measure.evidence import Evidence
config = load_config("gpt2-124m", ["model.d_model=700"])
found = diagnosis_of(Evidence(source="preflight", config=config, device="cuda"))
print([(finding.name, finding.fixes[0].text) for finding in found.findings])
"""
    assert python(folder, program).strip() == "[('odd-width', 'Set model.d_model=704.')]"


def test_the_new_machine_is_known(folder):
    program = """
from flatout.hardware.machine import row_of
assert row_of("NVIDIA Example 1000", 24.0).peak_tflops["bf16"].value == 200
"""
    python(folder, program)


def test_a_new_tokenizer_prepares(folder):
    [program] = [
        block
        for block in blocks("extend.md", "python")
        if block.startswith("# make_tokenizer.py\n")
    ]
    python(folder, program)
    line = "prepare book.txt --tokenizer tokenizer.json --out data/own --workers 1 --json"
    result = json.loads(flatout(folder, line)[line].strip().splitlines()[-1])
    assert result["bytes"] == len(RAIN)
    assert 0 < result["tokens"] < len(RAIN)


@pytest.mark.parametrize("document", ["quickstart.md", "extend.md"])
def test_the_python_examples_run(folder, document):
    programs = [
        block for block in blocks(document, "python") if not re.match(r"# \S+\.py\n", block)
    ]
    assert programs
    prepare = 'flatout.prepare(["book.txt"], out="data/book", workers=1)\n'
    for block in programs:
        short = block.replace(
            "train.steps=100", f'train.steps=3", "train.device=cpu", "name={document}'
        )
        first, _, rest = short.partition("\n")
        assert first == "import flatout"
        assert short != block
        python(folder, f"{first}\n{prepare}{rest}")


def test_the_walks_name_functions_of_their_files():
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8").partition("## Two walks")[2]
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w./]+)` \|", text, re.MULTILINE)
    assert len(rows) > 15
    for function, file in rows:
        found = importlib.import_module("flatout." + file.removesuffix(".py").replace("/", "."))
        for name in function.split("."):
            found = getattr(found, name)
        assert callable(found), function
