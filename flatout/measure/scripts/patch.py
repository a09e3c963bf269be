"""Writes changes that were measured from outside as a patch of the user's own files. No torch."""

from __future__ import annotations

import ast
import difflib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any

from pydantic import Field

from flatout.measure.attach.request import Site
from flatout.storage.files import Stored

DECIDED = "the script decides it there"
"""Why an argument that is an expression is left alone. Said where no other call can be edited."""
EXACT = r"{0}\.(?:argmax|shape|size)\b|\bargmax\({0}"
"""What reads of a result its type does not change."""
Made = dict[tuple[int, int, str], bytes]
"""New text by the bytes that it replaces, and by what it is if it replaces none."""


@dataclass(frozen=True)
class Edit:
    """An edit of the user's files at the call sites of a kind."""

    at: str = ""
    """Kind of `Site`. With "", lines belong to the optimizer, and other edits nowhere."""
    around: str = ""
    """What the loss is computed inside, as the expression of a `with` statement."""
    library: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Arguments that do the same where a library makes the calls, by the last words of the
    classes that take them, of one with a common name after the package that a file imports."""
    keywords: Mapping[str, str] = field(default_factory=dict)
    """Arguments to set in the call, as source text."""
    lines: tuple[str, ...] = ()
    """Statements to insert once: after the user constructs an optimizer, or before a call of a
    library that does. `{model}` and `{torch}` become names."""
    remove: bool = False
    """Whether the statement goes."""
    only: tuple[str, ...] = ()
    """Names of classes to which it applies. () means all."""
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
    """A unified diff that `git apply` and `patch -p1` take in the root. "" means no edits."""
    by_hand: list[ByHand]
    """What it leaves to the user."""
    files: dict[str, str] = Field(default_factory=dict, exclude=True)
    """The whole new files, by their paths in the root. Not stored."""


def patch_of(edits: Mapping[str, Edit], sites: Sequence[Site], root: Path) -> Patch:
    """Return the patch that makes the edit of each change in the files below `root`.

    Every byte that is not part of an edit does not change.
    """
    root = root.resolve()
    sources: dict[str, _Source | str] = {}
    by_hand: list[ByHand] = []
    for change, edit in edits.items():
        places = _sites_of(edit, sites)
        if not any(site.is_direct for site in places) or edit.around:
            known = [_source_in(sources, file, root) for file in {s.file: None for s in sites}]
            left = [one.set_in_library(change, edit) for one in known if isinstance(one, _Source)]
            if any(one is not None for one in left):
                by_hand += chain(*filter(None, left))
                continue
        decided: list[ByHand] = []
        is_edited = False
        for site in places or (None,):
            reason: str | None = "no line of the script that calls it is known"
            file = line = None
            call = " or ".join(edit.only) or edit.at
            if site is not None:
                source = _source_in(sources, site.file, root)
                reason = source if isinstance(source, str) else source.edit(edit, site)
                file, line, call = site.file, site.line, site.name
            if reason is not None:
                words = (edit.by_hand if site is None else "") or _words(edit, reason, call)
                noted = decided if reason == DECIDED else by_hand
                noted.append(ByHand(change=change, file=file, line=line, words=words))
            is_edited |= reason is None
        by_hand += [] if is_edited else decided
    files, diff = {}, ""
    for source in sources.values():
        if isinstance(source, _Source) and source.edits:
            name = source.path.relative_to(root).as_posix()
            files[name] = source.text().decode()
            tab = "\t" if " " in name else ""  # ends a name with spaces
            before, after = (
                [*io.StringIO(whole, newline="\n")] for whole in (source.data.decode(), files[name])
            )
            for text in difflib.unified_diff(before, after, f"a/{name}{tab}", f"b/{name}{tab}"):
                diff += text if text.endswith("\n") else f"{text}\n\\ No newline at end of file\n"
    return Patch(diff=diff, by_hand=by_hand, files=files)


def _source_in(sources: dict[str, _Source | str], file: str, root: Path) -> _Source | str:
    """Return a file as the edits so far leave it, or why it cannot be edited."""
    if file not in sources:
        sources[file] = _read(Path(file), root)
    return sources[file]


def apply(patch: Patch, folder: Path) -> None:
    """Write the files of a patch that `patch_of` returned into a copy of the root."""
    for name, text in patch.files.items():
        (folder / name).write_bytes(text.encode())


def _sites_of(edit: Edit, sites: Sequence[Site]) -> list[Site]:
    """Return where an edit applies. Calls by libraries only count without calls by the user.

    Loaders that read in order only count without others: those of evaluations are short.
    """
    if edit.lines:
        found = [site for site in sites if site.kind in ("optimizer", "caller")]
        found.sort(key=lambda s: (s.names.get("model", "self") == "self", not s.is_direct))
        return found[:1]
    found = [s for s in sites if s.kind == edit.at and (not edit.only or s.name in edit.only)]
    direct = [site for site in found if site.is_direct] or found
    return [site for site in direct if not site.is_in_order] or direct


def _words(edit: Edit, why: str, call: str) -> str:
    """Return what to write by hand."""
    if edit.environment:
        variables = " ".join(f"{name}={value}" for name, value in edit.environment.items())
        return f"Start the script with these environment variables: {variables}"
    if edit.remove:
        return f"Remove {call}: {why}."
    if edit.around:
        inside = f"with {edit.around.replace('{torch}', 'torch')}:"
        return f"Call the model and compute the loss in `{inside}`, and backward() after it: {why}."
    if edit.keywords:
        values = ", ".join(f"{name}={value}" for name, value in edit.keywords.items())
        return f"Set {values} in {call}: {why}."
    text = "\n".join(edit.lines).replace("{model}", "model").replace("{torch}", "torch")
    return f"Write these lines: {why}.\n{text}"


def _read(path: Path, root: Path) -> _Source | str:
    """Return a file that a patch of `root` can edit, or why it cannot."""
    path = path.resolve()
    if not path.is_relative_to(root):
        return f"the file is not in {root}"
    try:
        data = path.read_bytes()
        data.decode()
        return _Source(path, data)
    except (OSError, SyntaxError, ValueError) as error:
        return f"the file cannot be read as UTF-8 ({error})"


class _Source:
    """A file, and the edits of it so far."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data = path, data
        self.edits: Made = {}
        self._tree, self._newline = ast.parse(data), b"\r\n" if b"\r\n" in data else b"\n"
        modules = (n for n in ast.walk(self._tree) if isinstance(n, ast.Import | ast.ImportFrom))
        self._imported = " ".join(map(ast.unparse, modules))
        self._has_torch = bool(re.search(r"import (\S+, )*torch(?! as|\.)\b", self._imported))
        nodes = [n for n in ast.walk(self._tree) if isinstance(n, ast.Call | ast.Attribute)]
        called = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
        owners = {n.value for n in nodes if isinstance(n, ast.Attribute) and id(n) not in called}
        self._calls = [n for n in nodes if isinstance(n, ast.Call) and n not in owners]
        """All but those of whose results only an attribute is read."""
        self._starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]

    def edit(self, edit: Edit, site: Site) -> str | None:
        """Edit at a site, or return why that is not possible."""
        made = self._wrapped(edit, site) if edit.around else self._edit(edit, site)
        if isinstance(made, str):
            return made
        if not self._is_valid(made):
            return "the file would not be valid Python with it"
        self.edits |= made
        return None

    def set_in_library(self, change: str, edit: Edit) -> list[ByHand] | None:
        """Set the arguments with which a library makes the edit, and return what that leaves.

        None means that nothing here takes such arguments.
        """
        left, is_known = list[ByHand](), False
        for (known, keywords), call in product(edit.library.items(), self._calls):
            name = ast.unparse(call.func).rpartition(".")[2]
            every = (each.rpartition(":") for each in known.split())
            if any(name.endswith(end) for package, _, end in every if package in self._imported):
                is_known, made = True, self._set(keywords, call, None)
                if isinstance(made, dict) and self._is_valid(made):
                    self.edits |= made
                    continue
                words = _words(Edit(keywords=keywords), str(made or DECIDED), name)
                left.append(
                    ByHand(change=change, file=str(self.path), line=call.lineno, words=words)
                )
        return left if is_known else None

    def text(self, more: Made | None = None) -> bytes:
        """Return the file with its edits, and more of them."""
        data, edits = self.data, self.edits | (more or {})
        for start, end, what in sorted(edits, key=lambda span: span[:2])[::-1]:
            data = data[:start] + edits[start, end, what] + data[end:]
        return data

    def _has(self, pattern: str) -> bool:
        """Return whether the code has a call that a pattern describes."""
        calls = (ast.unparse(n) for n in ast.walk(self._tree) if isinstance(n, ast.Call))
        return any(re.match(pattern, call) for call in calls)

    def _is_valid(self, more: Made) -> bool:
        try:
            ast.parse(self.text(more))
        except SyntaxError:
            return False
        return True

    def _at(self, line: int, column: int) -> int:
        """Return the offset of a position, also of one that the file no longer has."""
        return self._starts[min(line, len(self._starts)) - 1] + column

    def _span(self, node: Any) -> tuple[int, int]:
        """Return the offsets of the start and the end of a node."""
        end = self._at(node.end_lineno, node.end_col_offset)
        return self._at(node.lineno, node.col_offset), end

    def _wrapped(self, edit: Edit, site: Site) -> Made | str:
        """Return the edit that puts what computes a loss into a `with` statement, or why not."""
        if "torch" not in site.names:
            return "torch has no name there"
        here, there = self._at(site.line, site.column), self._at(site.end_line, site.end_column)
        for block in _blocks_of(self._tree):
            spans = [self._span(statement) for statement in block]
            first = next((n for n, (a, b) in enumerate(spans) if a <= here < b), None)
            last = next((n for n, (a, b) in enumerate(spans) if a <= there < b), None)
            if first is not None and last is not None and first < last:
                break
        else:
            return "one statement calls the model and goes backward"
        read = _names(block[last], ast.Load)
        while last > first + 1 and not read & _names(block[last - 1], ast.Store):
            last -= 1
        inside = edit.around.replace("{torch}", site.names["torch"])
        begin, end = block[first].lineno, block[last - 1].end_lineno or 0
        before = self.data[self._at(begin, 0) : spans[first][0]]
        inner = {name for one in block[first:last] for name in _names(one, ast.Store)}
        made: Made = {}
        for statement in block[last:]:  # which reads fp32 so far
            text = ast.unparse(statement)
            for name in sorted(inner & {*site.floats} & _names(statement, ast.Load)):
                one = rf"(?<![\w.]){re.escape(name)}\b"
                if not re.search(one, re.sub(EXACT.format(one), "", text)):
                    continue
                at = self._starts[end]
                made[at, at, name] = before + f"{name} = {name}.float()".encode() + self._newline
                inner.discard(name)
            inner -= _names(statement, ast.Store)
        after = self.data[spans[last - 1][1] : self._starts[end]].strip()
        if before.strip() or after[:1] not in (b"", b"#"):
            return "its statements share their lines with others"
        unit = b"\t" if b"\n\t" in self.data else b"    "
        head = f"with {inside}:".encode()
        in_texts = {
            line
            for statement in block[first:last]
            for node in ast.walk(statement)
            if isinstance(node, ast.JoinedStr | ast.Constant)
            for line in range(node.lineno + 1, (node.end_lineno or 0) + 1)
        }
        for line in range(begin, end + 1):
            at = self._at(line, 0)
            if line == begin:
                made[at, at, edit.around] = before + head + self._newline + unit
            elif line not in in_texts and self.data[at : self._starts[line]].strip():
                made[at, at, edit.around] = unit
        return made

    def _edit(self, edit: Edit, site: Site) -> Made | str:
        """Return an edit at a site, or why that is not possible."""
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
        first, last = self._span(statement)
        lines = self._at(statement.lineno, 0), self._starts[statement.end_lineno or 0]
        indent, rest = self.data[lines[0] : first], self.data[last : lines[1]].strip()
        has_own_lines = not indent.strip() and rest[:1] in b"#"
        if edit.lines:
            text, names = "\n".join(edit.lines), site.names
            if "{torch}" in text and "torch" not in names:
                text, names = f"import torch\n{text}", names | {"torch": "torch"}
            if "{model}" in text and "model" not in names:
                return "the model has no name there"
            for key, name in names.items():
                text = text.replace(f"{{{key}}}", name)
            after = site.is_direct and not isinstance(statement, ast.Return)
            if not has_own_lines or (after and hasattr(statement, "body")):  # in a block's head
                return "there is no place for a separate line"
            if ".compile()" in text and self._has(r"torch\.compile\("):
                return "the script has a torch.compile of its own, which is off"
            at, row = lines[after], statement.lineno - 1
            while not after and self.data[self._at(row, 0) : at].startswith(indent + b"#"):
                at, row = self._at(row, 0), row - 1  # a comment belongs to the statement below it
            new = text.encode().split(b"\n")
            lead = self._newline if after and not self.data[:at].endswith(b"\n") else b""
            return {(at, at, text): lead + b"".join(indent + line + self._newline for line in new)}
        if not site.is_direct:
            return "a library makes it, which this line calls"
        if edit.keywords:
            return self._set(edit.keywords, call, site.parameters)
        if not isinstance(statement, ast.Expr) or statement.value is not call:
            return "it is part of a longer statement"
        without: Made = {(*lines, ""): b""}
        name = ast.unparse(call.func).partition(".")[0]
        uses = [n for n in ast.walk(self._tree) if isinstance(n, ast.Name) and n.id == name]
        for one in ast.walk(self._tree) if len(uses) == 1 else ():  # what imports it goes, too
            if isinstance(one, ast.Import) and [ast.unparse(each) for each in one.names] == [name]:
                whole = self._at(one.lineno, 0), self._starts[one.end_lineno or 0]
                more = {**without, (*whole, ""): b""}
                alone = self.data[slice(*whole)].strip() == self.data[slice(*self._span(one))]
                without = more if alone and self._is_valid(more) else without
        is_removed = has_own_lines and self._is_valid(without)
        return without if is_removed else {(first, last, ""): b"pass"}

    def _set(
        self, keywords: Mapping[str, str], call: ast.Call, parameters: Sequence[str] | None
    ) -> Made | str:
        """Return the edit that sets arguments of a call, or why that is not possible.

        `parameters` are those that it takes, in order. None: not known.
        """
        made: Made = {}
        arguments = [*call.args, *call.keywords]
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        has_star = None in given or any(isinstance(one, ast.Starred) for one in call.args)
        if not has_star:
            given |= dict(zip(parameters or (), call.args, strict=False))
        closing = self._span(call)[1] - 1
        begin, end = max(map(self._span, arguments), default=(0, closing))
        line, stop = self.data.rfind(b"\n", 0, begin) + 1, self.data.find(b"\n", end) + 1
        indent, rest = self.data[line:begin], self.data[end:stop].strip()
        # arguments on lines of their own, up to the parenthesis
        is_alone = line > 0 and stop <= closing and not (indent + self.data[stop:closing]).strip()
        for name, value in keywords.items():
            if name in given and not isinstance(given[name], ast.Constant):
                return DECIDED
            if name in given:
                made[(*self._span(given[name]), "")] = value.encode()
            elif parameters is not None and name not in parameters:
                return f"{ast.unparse(call.func)} takes no {name}"
            elif has_star:
                return f"an argument with a star may contain {name}"
            elif value.startswith("not torch.") and not self._has_torch:
                return "torch has no name there"
            else:  # before the parenthesis of f(x for x in y), too
                text, at = f"{name}={value}".encode(), min(end, closing)
                if is_alone and rest[:1] == b",":
                    at, text = stop, indent + text + b"," + self._newline
                elif is_alone and not rest:
                    text = b"," + self._newline + indent + text
                elif arguments:
                    text = b", " + text
                made[at, at, name] = text
        return made


def _blocks_of(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements in a tree."""
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _names(tree: ast.AST, use: type[ast.expr_context]) -> set[str]:
    """Return the names and attributes that are read, or written."""
    return {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, use)
    }
