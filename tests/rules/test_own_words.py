"""No file names a machine's paths, a package index, or who wrote it and where."""

import re
import subprocess

import pytest

# Written in pieces, so that this file does not find itself.
FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w.$}~])/(?:" + "root|work|opt|mnt|scratch|Users" + r")/\w",
            r"(?<![\w.$}~])/" + r"home/(?!flatout)\w",
            r"(?<![\w.$}~])/" + r"tmp/\w",
            r"\.\./" + "shared",
            r"\b(?:py"
            + r"pi\.org|download\.py"
            + r"torch\.org|pythonhosted\.org|ghcr\.io|quay\.io|docker\.io|nvcr\.io)",
            r"\b(?i:clau" + r"de|anthro" + r"pic|chat" + r"gpt|cop" + r"ilot|sub-?" + r"agent)\b",
            r"\b(?i:work" + r"place|this ses" + r"sion)\b",
        ]
    )
)


def written_files(root) -> list[str]:
    """Return the files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        return sorted(
            {
                name
                for name in listed.stdout.decode().split("\0")
                if name and (root / name).is_file()
            }
        )
    hidden = (".venv", ".git", "__pycache__")
    return sorted(
        p.relative_to(root).as_posix()
        for p in root.rglob("*")
        if p.is_file() and not any(part.startswith(hidden) for part in p.parts)
    )


@pytest.mark.slow
def test_no_file_names_a_machine_or_an_index(root, no_violations):
    wrong = []
    for name in written_files(root):
        try:
            lines = (root / name).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        wrong += [
            f"{name}:{number} {found.group()!r}"
            for number, line in enumerate(lines, 1)
            if (found := FOREIGN.search(line))
        ]
    no_violations(wrong)


def test_the_rule_finds_violations():
    for text in (
        "see /ro" + "ot/x",
        "open('/tm" + "p/a')",
        "from https://py" + "pi.org/simple",
        "made by Clau" + "de",
    ):
        assert FOREIGN.search(text), text
    for text in (
        "https://example.org/work/x",
        "runs/work/a",
        "~/work/x",
        "$HOME/tmp/x",
        "a network/tmp/x",
        "/home/flatout/data",
    ):
        assert not FOREIGN.search(text), text
