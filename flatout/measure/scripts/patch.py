"""Writes changes that were measured from outside as a patch of the user's own files. No torch."""

from __future__ import annotations

import ast
import difflib
import io
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from pydantic import Field

from flatout.files import Stored
from flatout.measure.scripts.request import Site

NAMES = ("model", "optimizer", "torch")
"""What inserted lines can name."""
UNITS = ast.Name | ast.Attribute | ast.Call | ast.Subscript
"""Mappings of a call that `|` can follow."""
IMPORT = re.compile(rb"^import torch(?: as (\w+))?\s*(?:#|$)", re.MULTILINE)


@dataclass(frozen=True)
class Edit:
    """An edit of the user's files at the call sites of a kind."""

    at: str = ""
    """Kind of `Site`; start: after the imports of the script's main file; "": nowhere."""
    keywords: Mapping[str, str] = field(default_factory=dict)
    """Arguments to set in the call, as source text."""
    lines: tuple[str, ...] = ()
    """Statements to insert after a call by the user, or before a call of a library that makes it.
    `{model}`, `{optimizer}` and `{torch}` become names; without `{optimizer}` inserted once."""
    remove: bool = False
    """Whether the statement goes."""
    only: tuple[str, ...] = ()
    """Names of classes to which it applies; (): all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the process, which no edit can set early enough."""
    by_hand: str = ""
    """What the user can do where there is no such site."""


class ByHand(Stored):
    """An edit that the user must make."""

    change: str
    """Name of the change."""
    file: str | None
    """None: not known."""
    line: int | None
    """None: not known."""
    words: str
    """What to write, and why the patch does not."""


class Patch(Stored):
    """Edits of the user's files."""

    diff: str
    """A unified diff that `git apply` and `patch -p1` take in the root; "": no edits."""
    by_hand: list[ByHand]
    """What it leaves to the user."""
    files: dict[str, str] = Field(default_factory=dict, exclude=True)
    """The whole new files, by their paths in the root; not stored."""


def patch_of(edits: Mapping[str, Edit], sites: Sequence[Site], root: Path) -> Patch:
    """Return the patch that makes the edit of each change in the files below `root`.

    Every byte that is not part of an edit stays as it is.
    """
    root = root.resolve()
    sources: dict[str, _Source | str] = {}
    by_hand: list[ByHand] = []
    for change, edit in edits.items():
        found = _sites_of(edit, sites)
        if not found:
            call = " or ".join(edit.only) or edit.at
            words = edit.by_hand or _words(
                edit, "no line of the script that calls it is known", call
            )
            by_hand.append(ByHand(change=change, file=None, line=None, words=words))
        for site in found:
            source = sources.setdefault(site.file, _read(Path(site.file), root))
            reason = source if isinstance(source, str) else source.edit(change, edit, site)
            if reason is not None:
                words, number = _words(edit, reason, site.name), site.line or None
                by_hand.append(ByHand(change=change, file=site.file, line=number, words=words))
    files, diff = {}, ""
    for source in sources.values():
        if isinstance(source, _Source) and source.edits:
            name = source.path.relative_to(root).as_posix()
            files[name] = source.text().decode()
            tab = "\t" if " " in name else ""  # ends a name with spaces
            before, after = (
                [*io.StringIO(text, newline="\n")] for text in (source.data.decode(), files[name])
            )
            for line in difflib.unified_diff(before, after, f"a/{name}{tab}", f"b/{name}{tab}"):
                diff += line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    return Patch(diff=diff, by_hand=by_hand, files=files)


def apply(patch: Patch, folder: Path) -> None:
    """Write the patched files into a copy of the root; for a patch that `patch_of` returned."""
    for name, text in patch.files.items():
        (folder / name).write_bytes(text.encode())


def _sites_of(edit: Edit, sites: Sequence[Site]) -> list[Site]:
    """Return where an edit applies; calls by libraries only without calls by the user."""
    text = "".join(edit.lines)
    kinds = {edit.at, "caller"} if text and edit.at == "optimizer" else {edit.at}
    found = [s for s in sites if s.kind in kinds and (not edit.only or s.name in edit.only)]
    if text and "{optimizer}" not in text:
        return sorted(
            found, key=lambda s: ("model" not in s.names, not s.is_direct, s.kind == "caller")
        )[:1]
    return [site for site in found if site.is_direct] or found


def _words(edit: Edit, why: str, call: str) -> str:
    """Return what to write by hand."""
    if edit.environment:
        variables = " ".join(f"{name}={value}" for name, value in edit.environment.items())
        return f"Start the script with these environment variables: {variables}"
    if edit.remove:
        return f"Remove {call}: {why}."
    if edit.keywords:
        values = ", ".join(f"{name}={value}" for name, value in edit.keywords.items())
        return f"Set {values} in {call}: {why}."
    lines = re.sub(rf"{{({'|'.join(NAMES)})}}", r"\1", "\n".join(edit.lines))
    return f"Write these lines: {why}.\n{lines}"


def _read(path: Path, root: Path) -> _Source | str:
    """Return a file that a patch of `root` can edit, or why it cannot."""
    path = path.resolve()
    if not path.is_relative_to(root):
        return f"the file is not in {root}"
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        if data.isascii() or encoding == "utf-8":
            return _Source(path, data)
    except (OSError, SyntaxError, ValueError) as error:
        return f"the file cannot be read ({error})"
    return f"the file is in {encoding}, and a patch in UTF-8"


class _Source:
    """A file, and the edits of it so far."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data = path, data
        self.edits: dict[tuple[int, int, str], bytes] = {}
        """New text by the bytes that it replaces, and by what it is if it replaces none."""
        self._tree = ast.parse(data)
        self._starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]

    def text(self) -> bytes:
        """Return the file with its edits."""
        data = self.data
        for start, end, what in sorted(self.edits, key=lambda span: span[:2])[::-1]:
            data = data[:start] + self.edits[start, end, what] + data[end:]
        return data

    def edit(self, change: str, edit: Edit, site: Site) -> str | None:
        """Edit at a site, or return why that is not possible."""
        before = dict(self.edits)
        reason = self._edit(change, edit, site)
        if reason is None and not self._parses():
            reason = "the file would not be valid Python with it"
        if reason is not None:
            self.edits = before
        return reason

    def _parses(self) -> bool:
        try:
            ast.parse(self.text())
        except SyntaxError:
            return False
        return True

    def _edit(self, change: str, edit: Edit, site: Site) -> str | None:
        if site.kind == "start":
            heads = takewhile(lambda one: not hasattr(one, "body"), self._tree.body)
            imports = [one for one in heads if isinstance(one, ast.Import | ast.ImportFrom)]
            if not imports:
                return "the file does not start with imports"
            known = IMPORT.findall(self.data[: self._span(imports[-1])[1]])
            names = {"torch": known[-1].decode() or "torch"} if known else {}
            return self._insert(change, edit.lines, names, imports[-1], after=True)
        # a call of a method on several lines starts at the method's name for Python
        start, end = self._at(site.line, site.column), self._at(site.end_line, site.end_column)
        call = statement = None
        for node in ast.walk(self._tree):  # from the outside in
            if isinstance(node, ast.Call | ast.stmt):
                first, last = self._span(node)
                if isinstance(node, ast.stmt) and first <= start and end <= last:
                    statement = node
                elif isinstance(node, ast.Call) and first <= start and end == last:
                    call = node
        if call is None or statement is None:
            return "the call is not there any more, or its position is not known"
        if edit.lines:
            names = dict(site.names)
            if isinstance(statement, ast.Assign) and statement.value is call and site.is_direct:
                names["optimizer"] = ast.unparse(statement.targets[0])
            after = site.is_direct and not isinstance(statement, ast.Return)
            return self._insert(change, edit.lines, names, statement, after=after)
        if not site.is_direct:
            return "a library makes it, which this line calls"
        if edit.remove:
            return self._remove(call, statement)
        return self._set(edit.keywords, call, site)

    def _at(self, line: int, column: int) -> int:
        """Return the offset of a position, also of one that the file no longer has."""
        return self._starts[min(line, len(self._starts)) - 1] + column

    def _span(self, node: Any) -> tuple[int, int]:
        """Return the offsets of the start and the end of a node."""
        end = self._at(node.end_lineno, node.end_col_offset)
        return self._at(node.lineno, node.col_offset), end

    def _lines(self, statement: ast.stmt) -> tuple[int, int] | None:
        """Return the offsets of the lines of a statement; None if it shares one of them."""
        first, last = self._span(statement)
        start, end = self._at(statement.lineno, 0), self._starts[statement.end_lineno or 0]
        rest = self.data[last:end].strip()
        return None if self.data[start:first].strip() or rest[:1] not in b"#" else (start, end)

    def _set(self, keywords: Mapping[str, str], call: ast.Call, site: Site) -> str | None:
        """Set arguments of a call."""
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        mappings = [keyword for keyword in call.keywords if keyword.arg is None]
        has_star = any(isinstance(one, ast.Starred) for one in call.args)
        if not has_star:
            given |= dict(zip(site.parameters, call.args, strict=False))
        arguments = [*call.args, *call.keywords]
        for name, value in keywords.items():
            if name in given:
                self.edits[(*self._span(given[name]), "")] = value.encode()
                continue
            if name not in site.parameters:
                return f"{site.name} takes no {name}"
            if (
                has_star
                or len(mappings) > 1
                or not all(isinstance(one.value, UNITS) for one in mappings)
            ):
                return f"an argument with a star may contain {name}"
            text = f"{', ' if arguments else ''}{name}={value}"
            closing = self._span(call)[1] - 1
            at = max([self._span(one)[1] for one in arguments], default=closing)
            if at > closing:  # f(x for x in y)
                return "its only argument must be put in parentheses first"
            if mappings:
                at, text = self._span(mappings[0])[1], f' | {{"{name}": {value}}}'
            self.edits[at, at, name] = text.encode()
        return None

    def _insert(
        self,
        change: str,
        lines: Sequence[str],
        names: dict[str, str],
        statement: ast.stmt,
        *,
        after: bool,
    ) -> str | None:
        """Insert lines after or before a statement."""
        text = "\n".join(lines)
        if "{torch}" in text and "torch" not in names:
            text, names["torch"] = f"import torch\n{text}", "torch"
        for key in NAMES:
            if f"{{{key}}}" in text and key not in names:
                return f"the {key} has no name there"
            text = text.replace(f"{{{key}}}", names.get(key, ""))
        whole = self._lines(statement)
        if whole is None or (after and hasattr(statement, "body")):  # or in the head of a block
            return "there is no place for a line of its own"
        indent = self.data[self._at(statement.lineno, 0) : self._span(statement)[0]]
        newline = b"\r\n" if b"\r\n" in self.data else b"\n"
        first, *rest = text.encode().split(b"\n")
        new = [first + f"  # flatout: {change}".encode(), *rest]
        at = whole[after]
        lead = newline if after and not self.data[:at].endswith(b"\n") else b""
        self.edits[at, at, text] = lead + b"".join(indent + line + newline for line in new)
        return None

    def _remove(self, call: ast.Call, statement: ast.stmt) -> str | None:
        """Remove a statement that is only a call."""
        if not isinstance(statement, ast.Expr) or statement.value is not call:
            return "it is part of a longer statement"
        lines = self._lines(statement)
        if lines is not None:
            self.edits[(*lines, "")] = b""
            if self._parses():
                return None
            del self.edits[(*lines, "")]
        self.edits[(*self._span(statement), "")] = b"pass"
        return None
