"""Build the documentation site into site/: `make docs`, or `python docs/tools/build_site.py`.

The pages are docs/, the results of benchmarks and the Markdown files of the repository's root,
copied to build/docs with their links rewritten. The references of configuration keys and commands
are generated from the code; a test keeps the files in docs/reference current. The build is strict:
a broken link, a missing anchor or an unknown name on the API page is an error.
"""

from __future__ import annotations

import contextlib
import html
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from unittest import mock

import yaml

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LOG.md": "log.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository's root, and the pages they become."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
ESCAPE = "\\|"
ESCAPED_BAR = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")
GENERATED = "<!-- generated: python -m pytest tests/docs/test_build_site.py --write-tables -->\n"
HEAD = "| key | type | default | meaning |\n|---|---|---|---|"
HELP_COLUMNS = 88


def pages() -> dict[Path, str]:
    """Return every source file with the path of its page."""
    found = {ROOT / name: page for name, page in PAGES.items() if (ROOT / name).exists()}
    found |= {path: f"results/{path.name}" for path in RESULTS.glob("*.md")}
    docs = ROOT / "docs"
    return found | {path: path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}


def with_site_links(text: str, source: Path, staged: dict[Path, str], assets: Path) -> str:
    """Return a page's text with its relative links pointing into the site.

    A linked picture is copied to `assets`. A link to any other file that is not a page leads to the
    repository; while pyproject.toml names no repository, only its text stays.
    """
    page = Path(staged[source])

    def rewritten(found: re.Match[str]) -> str:
        bang, label, target, anchor = found.groups(default="")
        file = (source.parent / target).resolve()
        if file in staged:
            link = os.path.relpath(staged[file], page.parent)
        elif file.suffix in {".svg", ".png"}:
            shutil.copyfile(file, assets / file.name)
            link = os.path.relpath(f"assets/{file.name}", page.parent)
        elif url := repository_url():
            return f"[{label}]({url}/blob/main/{file.relative_to(ROOT).as_posix()}{anchor})"
        else:
            return label
        return f"{bang}[{label}]({link}{anchor})"

    return LINK.sub(rewritten, text)


def with_bars_in_code(text: str) -> str:
    r"""Return a page with code that contains an escaped bar, `\|`, as HTML.

    In a table GitHub drops the backslash and Python-Markdown shows it.
    """
    return ESCAPED_BAR.sub(
        lambda found: f"<code>{html.escape(found[1]).replace(ESCAPE, '&#124;')}</code>", text
    )


def repository_url() -> str | None:
    """Return the URL of the repository in pyproject.toml, or None when it states none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls = {name.lower(): url for name, url in project.get("urls", {}).items()}
    url = urls.get("repository") or urls.get("homepage")
    return url.rstrip("/") if url else None


def config_reference() -> Iterator[str]:
    """Yield a table of keys for each section, for the keys outside of one, and for each model."""
    from flatout.config.registry import MODELS
    from flatout.config.schema import RunConfig
    from flatout.config.sections import Section

    top = {}
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from section_reference(name, field.annotation)
        else:
            top[name] = field
    yield from ["## Keys outside a section", "", HEAD]
    yield from (key_reference(name, field) for name, field in top.items())
    yield ""
    for kind in MODELS.names():
        yield from section_reference("model", MODELS.get(kind).Config, title=f"model.kind={kind}")


def section_reference(name: str, section: Any, *, title: str | None = None) -> Iterator[str]:
    """Yield a section's heading, its description and its keys."""
    yield from [f"## {title or name}", "", inspect.cleandoc(section.__doc__ or ""), "", HEAD]
    yield from (key_reference(f"{name}.{key}", one) for key, one in section.model_fields.items())
    yield ""


def key_reference(key: str, field: Any) -> str:
    """Return a key as a row: type, default, help, and whether it may change on resume."""
    from flatout.training.run_dir.resume import FREE_KEYS, LENGTH_KEYS

    bounds = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    limits = [
        f"{words} {limit:,}"
        for bound in field.metadata
        for name, words in bounds.items()
        if (limit := getattr(bound, name, None)) is not None and limit < 10**30  # else none
    ]
    default = "" if field.is_required() else f"`{shown(field.get_default())}`"
    change = ""
    if key.startswith((*FREE_KEYS, *LENGTH_KEYS)) and key != "name":
        change = "It may change when a run resumes."
    elif key in {"batch.rows_per_device", "batch.accumulate"}:
        change = "It may change when a run resumes if a step keeps its tokens."
    elif key in {"data.path", "data.mix"}:
        change = "It may name other paths of the same data when a run resumes."
    kind = ", ".join([f"`{type_name(field.annotation)}`", *limits])
    meaning = " ".join([*(field.description or "").split(), change])
    cells = (cell.replace("|", ESCAPE) for cell in (f"`{key}`", kind, default, meaning.strip()))
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def shown(value: Any) -> str:
    """Return a default in YAML notation."""
    value = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def type_name(annotation: Any) -> str:
    """Return a type in plain notation, such as `int or auto`, without None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(one) for one in arguments if one is not type(None))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(type_name(one) for one in arguments)}]"
    return "..." if annotation is Ellipsis else annotation.__name__


def command_reference() -> Iterator[str]:
    """Yield the help of every command, as `flatout COMMAND --help` prints it."""
    from flatout.config.registry import COMMANDS

    for words in [[], *([name] for name in COMMANDS.names())]:
        yield from [f"## {' '.join(['flatout', *words])}", "", "```text"]
        yield from [help_text(words).strip(), "```", ""]


def help_text(words: list[str]) -> str:
    """Return what a command prints for `--help`."""
    from flatout.cli.main import main

    screen = mock.patch.dict(os.environ, COLUMNS=str(HELP_COLUMNS), NO_COLOR="1", TERM="dumb")
    printed = io.StringIO()
    with screen, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()


REFERENCES = {"reference/config.md": config_reference, "reference/commands.md": command_reference}


def with_reference(text: str, page: str) -> str:
    """Return a page's text with its generated part, if it has one."""
    if page not in REFERENCES:
        return text
    return "\n".join([text.partition(GENERATED)[0] + GENERATED, *REFERENCES[page]()])


def stage(folder: Path) -> Path:
    """Write the pages to FOLDER/docs and the configuration beside them; return its path."""
    pages_dir = folder / "docs"
    shutil.rmtree(pages_dir, ignore_errors=True)
    shutil.copytree(ROOT / "docs" / "assets", pages_dir / "assets")
    staged = pages()
    for source, page in staged.items():
        text = with_reference(source.read_text(encoding="utf-8"), page)
        if source.parent == RESULTS:
            text = f"# Measured: {source.stem.replace('_', ' ')}\n\n{text}"
        text = with_site_links(with_bars_in_code(text), source, staged, pages_dir / "assets")
        (pages_dir / page).parent.mkdir(parents=True, exist_ok=True)
        (pages_dir / page).write_text(text, encoding="utf-8")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    [handlers] = [p["mkdocstrings"]["handlers"] for p in config["plugins"] if "mkdocstrings" in p]
    handlers["python"]["paths"] = [str(ROOT)]
    handlers["python"]["options"]["extensions"] = [str(Path(__file__).with_name("docstrings.py"))]
    path = folder / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return path


def build(folder: Path) -> int:
    """Stage the pages in a folder, build FOLDER/site from them, and return the exit code."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file"]
    return subprocess.run([*command, str(stage(folder))], cwd=folder, check=False).returncode


def main() -> int:
    """Build the site, and move it to site/ when the build succeeds."""
    sys.path.insert(0, str(ROOT))
    if code := build(ROOT / "build"):
        return code
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    shutil.move(ROOT / "build" / "site", ROOT / "site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
