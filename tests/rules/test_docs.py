"""Commands, options, keys, make targets, links and names in the documentation exist."""

import importlib
import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

import flatout
from flatout.cli.parser import build
from flatout.config.messages import all_keys
from flatout.config.registry import COMMANDS, DATASETS, MODELS, RECIPES
from flatout.config.schema import RunConfig, load_config
from flatout.config.words import TABLE, removed
from flatout.errors import ConfigError

pytestmark = pytest.mark.slow

SHELL_BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:flatout|make|torchrun|python -m flatout) [^`\n]+)`")
PROGRAM = re.compile(r"^(?:flatout|python -m flatout|torchrun .*? -m flatout)\s+")
RUN_ALL = """
import json
from flatout.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as stop:
        assert not stop.code, words
"""
QUICK = {("list",), ("--help",), ("--version",)}


def documents(root):
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md", "SECURITY.md")
    return [*(root / name for name in names), *sorted((root / "docs").rglob("*.md"))]


def command_lines(text: str) -> list[str]:
    """Return the commands in shell blocks and inline code.

    Continuation lines are joined and comments removed.
    """
    lines = [
        line
        for block in SHELL_BLOCK.findall(text)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    lines = [re.sub(r"\s+#\s.*$", "", line.removeprefix("$ ")).strip() for line in lines]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [
        line
        for line in [*parts, *INLINE.findall(text)]
        if re.match(r"(flatout|make|torchrun|python -m flatout) ", line)
    ]


def problem_of(line: str, targets: set[str]) -> str | None:
    """Return what is wrong with one command line, or None."""
    if line.startswith("make "):
        words = [word for word in shlex.split(line)[1:] if "=" not in word]
        return next((f"no make target {word!r}" for word in words if word not in targets), None)
    if not PROGRAM.match(line):
        return "not a command of flatout"
    words = shlex.split(PROGRAM.sub("", line).partition(" -- ")[0])  # the rest is a script
    if words[0].startswith("--") or words[0] == "COMMAND":
        return None if words[0] in {"--help", "--version", "COMMAND"} else f"no option {words[0]}"
    if words[0] not in COMMANDS.names():
        return f"no command {words[0]!r}"
    if "--help" in words[1:]:
        return None
    try:
        values = build(words[0]).make_context(words[0], words[1:]).params
    except Exception as error:
        return str(getattr(error, "message", error))
    return wrong_keys(values) if words[0] == "train" else None


def wrong_keys(values) -> str | None:
    recipe = values["recipe"]
    try:
        load_config(recipe if recipe in RECIPES.names() else None, values["overrides"] or ())
    except ConfigError as error:
        return str(error)
    if recipe not in RECIPES.names() and not recipe.isupper() and not recipe.endswith(".yaml"):
        return f"no recipe {recipe!r}"
    return None


def test_every_command_parses(root, no_violations):
    targets = set(
        re.findall(
            r"^([a-z][a-z-]*):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    wrong, seen = [], 0
    for path in documents(root):
        for line in command_lines(path.read_text(encoding="utf-8")):
            seen += 1
            if message := problem_of(line, targets):
                wrong.append(f"{path.name}: {line}: {message}")
    assert seen > 20
    no_violations(wrong)


def test_every_configuration_key_exists(root, no_violations):
    """Keys in inline code exist and accept the values shown there. The changelog names old ones."""
    wrong = []
    sections = "|".join(key.partition(".")[0] for key in all_keys(RunConfig) if "." in key)
    known = {
        *all_keys(RunConfig),
        *(key for kind in MODELS.names() for key in all_keys(MODELS.get(kind).Config, "model.")),
    }
    for path in documents(root):
        for key, value in re.findall(
            rf"`((?:{sections})\.[a-z_]+)(=[^`\s]+)?`", path.read_text(encoding="utf-8")
        ):
            if path.name == "CHANGELOG.md" and removed(key):
                continue
            if key not in known:
                wrong.append(f"{path.name}: {key}")
            elif value and not value[1:].isupper() and not key.startswith("model."):
                load_config(None, [key + value])
    no_violations(wrong)


def mention_of(what: str) -> str | None:
    """Return a pattern that finds a removed command, option, key or entry of a list, if any can."""
    first, _, last = what.rpartition(" ")
    if first == "logger":
        return rf"\blog\.to=\S*\b{last}\b"
    if first == "source":
        return None if last in DATASETS.names() else rf"`flatout prepare {last}\b"
    if what.partition(" ")[0] in COMMANDS.names() or not first:
        words = what.replace(" ", r"\b[^`\n]* ")
        return rf"\b{re.escape(what)}\b" if "." in what else rf"`flatout {words}(?![\w-])"
    return rf"(?<![\w-]){last}(?![\w-])"


def test_what_was_removed_is_named_in_the_changelog_and_the_log_only(root, no_violations):
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    patterns = {what: mention_of(what) for what in table["removed"]}
    pages = {*documents(root), root / "benchmarks" / "README.md"}
    pages -= {root / "CHANGELOG.md", root / "LOG.md"}
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages}
    no_violations(
        [
            f"{name}: {what}"
            for name, text in texts.items()
            for what, pattern in patterns.items()
            if pattern and re.search(pattern, text)
        ]
    )


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("speedup fast-scan", "the speedup `fast-scan`"),
        ("train.max_rewinds", "`train.max_rewinds=2`"),
        ("eval --tasks", "`flatout eval runs/demo --tasks hellaswag`"),
        ("launch", "`flatout launch my.yaml`"),
        ("logger csv", "`log.to=tensorboard,csv`"),
        ("source synthetic", "`flatout prepare synthetic --out data/a`"),
    ],
)
def test_a_mention_of_what_was_removed_is_found(what, text):
    assert re.search(mention_of(what), text)
    assert not re.search(mention_of(what), "`lm_eval --tasks`, fast-scanner, `log.to=wandb`")


def test_quoted_messages_exist_in_the_code(root, no_violations):
    quoted = re.findall(
        r"^\| `([^`]* [^`]*)`",
        (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    code = [root / "Makefile", *(root / "flatout").rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in code]
    pieces = [
        piece.strip()
        for quote in quoted
        for piece in quote.split("...")
        if piece.strip() and not quote.startswith(("make ", "torchrun: "))
    ]
    assert len(pieces) > 3
    no_violations([piece for piece in pieces if not any(piece in text for text in texts)])


def test_quick_commands_run(root, tmp_path):
    lines = {
        line
        for path in documents(root)
        for line in command_lines(path.read_text(encoding="utf-8"))
        if PROGRAM.match(line)
    }
    words = sorted({tuple(shlex.split(PROGRAM.sub("", line))) for line in lines})
    quick = [
        line for line in words if line[:1] in QUICK and not any(word.isupper() for word in line)
    ]
    assert len(quick) > 2
    program = f"import sys; sys.path.insert(0, {str(root)!r})\n{RUN_ALL}"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(quick)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_example_of_every_command_parses(no_violations):
    examples = [COMMANDS.get(name).example for name in COMMANDS.names()]
    no_violations(
        [f"{line}: {message}" for line in examples if (message := problem_of(line, set()))]
    )


def test_every_relative_link_has_a_target(root, no_violations):
    wrong = []
    for path in [*documents(root), *root.glob("*.md")]:
        targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        wrong += [
            f"{path.name}: {target}" for target in targets if not (path.parent / target).exists()
        ]
    no_violations(wrong)


def test_the_api_page_documents_every_public_name(root, no_violations):
    text = (root / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    public = {f"flatout.{name}" for name in flatout.__all__ if not name.startswith("_")}
    no_violations([f"docs/reference/api.md lacks {name}" for name in public - set(documented)])
    no_violations(
        [f"docs/reference/api.md: {name} does not exist" for name in documented if not found(name)]
    )


def found(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def test_the_readme_starts_with_the_essentials(root):
    """One screen has the charts, the installation and the three commands, each block for itself."""
    text = (root / "README.md").read_text(encoding="utf-8")
    head = "\n".join(text.splitlines()[:60])
    assert head.startswith("# flatout\n")
    for part in ("cpu_peers.svg", "shakespeare_cpu.svg", "pip install", "PyPI"):
        assert part in head, part
    for line in ("flatout demo", "flatout demo book.txt", "flatout diagnose -- python train.py"):
        assert f"```sh\n{line}\n```" in head, line
    first = "flatout demo book.txt\nflatout tune --patch faster.patch -- python train.py"
    assert f"```sh\n{first}\n```" in "\n".join(text.splitlines()[:10])
    assert "make test" in text
    assert len(text.split()) <= 800


def test_the_pages_written_by_hand_stay_short(root):
    pages = [root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 28_000


def test_contributing_describes_every_folder(root):
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = sorted(
        p.name for p in (root / "flatout").iterdir() if p.is_dir() and p.name != "__pycache__"
    )
    tree = text[text.index("```\nflatout/") :]
    assert [name for name in folders if not re.search(rf"\b{name}/\S*\s+\S", tree)] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("flatout trian x", "no command 'trian'"),
        ("flatout prepare a --output b", "--output"),
        ("flatout train RECIPE optim.lrr=1", "optim.lr"),
        ("flatout train no-such-recipe", "no recipe"),
        ("make demmo", "no make target"),
        ("flatout train RECIPE optim.lr=1e-3", None),
        ("torchrun --nproc-per-node 2 -m flatout list models", None),
    ],
)
def test_the_check_of_commands_finds_problems(line, message):
    found = problem_of(line, {"demo"})
    assert (found is None) if message is None else (message in found)


def test_the_files_for_github_are_yaml(root):
    paths = sorted((root / ".github").rglob("*.yml"))
    assert len(paths) > 3
    for path in paths:
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path
