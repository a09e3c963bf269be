"""Writes changes that were measured from outside as a patch of the user's own files. No torch."""

from __future__ import annotations

import ast
import difflib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any

from pydantic import Field

from flatout.measure.attach.request import Site
from flatout.measure.scripts.options import (
    EVALUATION,
    Option,
    Parser,
    entry_at,
    flag_of,
    namespace_at,
    nodes_of,
    options_in,
    parser_in,
    scopes_at,
)
from flatout.measure.scripts.syntax import blocks_of, items_of, names_in, reads_values
from flatout.storage.files import Stored

DECIDED = "the script decides it there"
"""Why an argument that is an expression is left alone. Said where no other call can be edited."""
OWN = "the script has an option of its own, "
"""Why no option is added. What follows is its name."""
LINE = 88
"""Columns of a line that no style finds too long."""
Spans = Sequence[tuple[int, int]]
"""Where pieces of text start and end."""
Made = dict[tuple[int, int, str], bytes]
"""New text by the bytes that it replaces, and by what it is if it replaces none."""


@dataclass(frozen=True)
class Edit:
    """An edit of the user's files at the call sites of a kind."""

    at: str = ""
    """Kind of `Site`. With "", lines belong to the optimizer, and other edits nowhere."""
    around: str = ""
    """What the loss is computed inside, as the expression of a `with` statement. With an option,
    the type of the device in it gives way to what the script calls its own."""
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
    option: Option | None = None
    """None: it is made for everybody who runs the script."""

    def under(self, flag: str, device: str | None = None) -> Edit:
        """Return the edit that is only made where an expression is true.

        `device`: an expression for the type of the device.
        """
        stated = self.option.values if self.option else {}
        values = {name: text.replace("{flag}", flag) for name, text in stated.items()}
        around = self.around and f"{self.around[:-1]}, enabled={flag})"
        return replace(
            self,
            around=re.sub(r'"\w+"', device, around, count=1) if device else around,
            lines=self.lines and (f"if {flag}:", *(f"    {line}" for line in self.lines)),
            library={
                known: {name: values.get(name, text) for name, text in keywords.items()}
                for known, keywords in self.library.items()
            },
        )


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
    options: list[str] = Field(default_factory=list)
    """Words to add to the command that starts the script: without them, the edits under options do
    nothing."""
    files: dict[str, str] = Field(default_factory=dict, exclude=True)
    """The whole new files, by their paths in the root. Not stored."""


def patch_of(
    edits: Mapping[str, Edit], sites: Sequence[Site], root: Path, *, has_options: bool = True
) -> Patch:
    """Return the patch that makes the edit of each change in the files below `root`.

    Every byte that is not part of an edit does not change. `has_options`: whether words that are
    added to the command reach the script.
    """
    root = root.resolve()
    sources = {file: _read(Path(file), root) for file in {site.file: None for site in sites}}
    known = [one for one in sources.values() if isinstance(one, _Source)]
    for one in known:
        one.project, one.parser = known, _parser_of(known) if has_options else None
    by_hand: list[ByHand] = []
    for change, edit in edits.items():
        places = _sites_of(edit, sites)
        if not any(site.is_direct for site in places) or edit.around:
            left = [one.set_in_library(change, edit) for one in known]
            if any(one is not None for one in left):
                by_hand += chain(*filter(None, left))
                continue
        decided: list[ByHand] = []
        is_edited = False
        homes = ((sources[site.file], site.line) for site in places)
        is_option = any(
            isinstance(one, _Source) and one.is_optional(edit, line) for one, line in homes
        )
        for site in places or (None,):
            reason: str | None = "no line of the script that calls it is known"
            file = line = None
            call = " or ".join(edit.only) or edit.at
            if site is not None:
                source = sources[site.file]
                reason = source if isinstance(source, str) else source.edit(edit, site, is_option)
                file, line, call = site.file, site.line, site.name
            if reason is not None:
                words = (edit.by_hand if site is None else "") or _words(edit, reason, call)
                noted = decided if reason == DECIDED else by_hand
                noted.append(ByHand(change=change, file=file, line=line, words=words))
            is_edited |= reason is None
        by_hand += [] if is_edited else decided
    files, diff = {}, ""
    for source in known:
        if source.edits:
            name = source.path.relative_to(root).as_posix()
            files[name] = source.text().decode()
            tab = "\t" if " " in name else ""  # ends a name with spaces
            before, after = (
                [*io.StringIO(whole, newline="\n")] for whole in (source.data.decode(), files[name])
            )
            for text in difflib.unified_diff(before, after, f"a/{name}{tab}", f"b/{name}{tab}"):
                diff += text if text.endswith("\n") else f"{text}\n\\ No newline at end of file\n"
    options = dict.fromkeys(chain.from_iterable(source.words for source in known))
    return Patch(diff=diff, by_hand=by_hand, options=[*chain(*options)], files=files)


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
    if why.startswith(OWN):
        return f"Use what is there for it already: {why}."
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


def _parser_of(known: Sequence[_Source]) -> tuple[_Source, Parser] | None:
    """Return the parser of a script's options, with its file. None: it has none, or several."""
    files = [one for one in known if b"ArgumentParser" in one.data]
    parser = parser_in(files[0]._tree) if len(files) == 1 else None
    return (files[0], parser) if parser else None


class _Source:
    """A file, and the edits of it so far."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data = path, data
        self.edits: Made = {}
        self.words: list[tuple[str, ...]] = []
        """Options for the command, each with its value."""
        self._said: list[tuple[str, ...]] = []
        """Those of the edit that is being made."""
        self.project = [self]
        """All files that can be edited."""
        self.parser: tuple[_Source, Parser] | None = None
        """The parser of the script's options, with its file. None: options do not reach it."""
        self._unit = b"\t" if b"\n\t" in data else b"    "
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

    def edit(self, edit: Edit, site: Site, is_option: bool) -> str | None:
        """Edit at a site, or return why that is not possible.

        `is_option`: other sites have the edit under an option, so that it cannot be for everybody.
        """
        under = self.optional(edit, site.line, site.names.get("device"))
        if isinstance(under, str):
            return under
        if is_option and under[0] is edit:
            return "its option does not reach this line"
        self._said = []
        made = self._wrapped(under[0], site) if edit.around else self._edit(under[0], site)
        if isinstance(made, str):
            return made
        return self._commit([(self, made), *under[1]])

    def _commit(self, made: list[tuple[_Source, Made]]) -> str | None:
        """Make edits of one change, or return why that is not possible."""
        if not all(source._is_valid(each) for source, each in made):
            return "the file would not be valid Python with it"
        for source, each in made:
            source.edits |= each
            self.words += [(key,) for *_, key in each if key.startswith("--")]
        self.words += self._said
        return None

    def optional(
        self, edit: Edit, line: int, device: str | None = None
    ) -> tuple[Edit, list[tuple[_Source, Made]]] | str:
        """Return an edit under an option of the script, with the edits that add the option.

        Functions and classes that do not see it get it as an argument: without options, from other
        files. Where nobody could pass it, this is the edit itself. A string says that the script
        has such an option already.
        """
        option = edit.option
        if option is None:
            return edit, []
        for source in self.project:
            for name, call in (options_in(source._tree) or {}).items():
                if option.is_done_by(name):
                    return f"{OWN}{flag_of(call)}"
        if edit.around and any(re.search(rb"\bDataParallel\(", one.data) for one in self.project):
            return "threads of nn.DataParallel do not get the type of autocast"
        parser, more = self.parser, list[tuple[_Source, Made]]()
        if parser is not None:
            more = [(parser[0], parser[0]._declared(parser[1], option))]
            owner = namespace_at(self._tree, line, parser[1])
            if owner is not None:
                return edit.under(f"{owner}.{option.name}", device), more
        entry, name = entry_at(self._tree, line), f"use_{option.name}"
        if entry is None:
            return edit, []
        for one in ast.walk(entry[1].args):
            if isinstance(one, ast.arg) and option.is_done_by(one.arg):
                return f"{OWN}{one.arg} of {entry[0]}"
        made = self._parameter(entry[1], name, option.does)
        if made is None:
            return edit, []
        calls = []
        for source in self.project:
            for call in source._calls_of(entry[0], self):
                owner = namespace_at(source._tree, call.lineno, parser[1]) if parser else None
                if owner is not None or (parser is None and source is not self):
                    value = f"{owner}.{option.name}" if parser else "True"
                    passed = source._set({name: value}, call, None)
                    calls += [(source, passed)] if isinstance(passed, dict) else []
        is_inside = entry[1].lineno <= line <= (entry[1].end_lineno or 0)
        flag = name if is_inside else f"self.{name}"
        new = [(self, made), *calls, *more]
        is_valid = calls and all(source._is_valid(each) for source, each in new)
        return (edit.under(flag, device), new) if is_valid else (edit, [])

    def is_optional(self, edit: Edit, line: int) -> bool:
        """Return whether an edit of a line is made under an option."""
        under = self.optional(edit, line)
        return isinstance(under, tuple) and under[0] is not edit

    def _calls_of(self, name: str, home: _Source) -> list[ast.Call]:
        """Return the calls of a function or class of another file, or of this one.

        None count where it is used in another way: passed on, or inherited from.
        """
        places = (home.path.stem, home.path.parent.name)
        is_known = home is self or any(
            isinstance(node, ast.ImportFrom)
            and (node.module or "").rpartition(".")[2] in places
            and name in [one.name for one in node.names]
            for node in ast.walk(self._tree)
        )
        calls = [c for c in self._calls if ast.unparse(c.func) == name]
        owners = [n.value for n in ast.walk(self._tree) if isinstance(n, ast.Attribute)]
        reads = [n for n in ast.walk(self._tree) if isinstance(n, ast.Name) and n.id == name]
        others = [one for one in reads if one not in owners]  # not what it has itself
        return calls if is_known and len(others) == len(calls) else []

    def _declared(self, parser: Parser, option: Option) -> Made:
        """Return the edit that adds an option, as the last one is added."""
        first, last = self._span(parser.last)
        line, at = self._at(parser.last.lineno, 0), self._starts[parser.last.end_lineno or 0]
        text = self.data[first:last]
        q = (re.findall(rb"[\"']", text) or [b'"'])[0].decode()
        head = f"{self.data[line:first].decode()}{parser.name}.add_argument("
        switch = f"{q}--{option.name}{q}, action={q}store_true{q}"
        rest = f"help={q}{option.does}{q})\n"
        is_long = b"\n" in text or len(f"{head}{switch}, {rest}") > self._width()
        indent = head[: len(head) - len(head.lstrip())]
        between = f",\n{indent.ljust(len(head))}" if is_long else ", "
        new = f"{head}{switch}{between}{rest}".encode().replace(b"\n", self._newline)
        return {(at, at, f"--{option.name}"): new}

    def _parameter(self, function: ast.FunctionDef, name: str, does: str) -> Made | None:
        """Return the edit that gives a function a switch, which a constructor keeps."""
        taken = function.args
        every = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]
        if taken.vararg or taken.kwarg or name in [one.arg for one in every]:
            return None
        ends = {self._span(one)[0]: self._span(one)[1] for one in every}
        for one, default in zip(
            every[::-1], (taken.defaults or taken.kw_defaults)[::-1], strict=False
        ):
            ends[self._span(one)[0]] = self._span(default or one)[1]
        kind = ": bool = False" if any(one.annotation for one in every) else "=False"
        closing = self.data.find(b")", max(ends.values()))
        made = self._added([*ends.items()], self._span(function)[0], closing, {name: name + kind})
        words = ast.get_docstring(function, clean=False) or ""
        told = re.findall(rb"(?m)^([ \t]*:param )\w+:.*\n", self.data[slice(*self._span(function))])
        if ":param " in words and told:  # the last of them, in the whole text
            at = self.data.rfind(told[-1], 0, self._span(function.body[0])[1])
            at = self.data.find(b"\n", at) + 1
            made[at, at, f":{name}"] = told[-1] + f"{name}: {does}".encode() + self._newline
        if function.name == "__init__":
            kept = [*function.body[: bool(words)]]
            for statement in function.body[len(kept) :]:  # the first lines only keep what is given
                is_plain = isinstance(statement, ast.Assign) and isinstance(
                    statement.value, ast.Name
                )
                is_kept = is_plain and ast.unparse(statement).startswith("self.")
                if not is_kept and not ast.unparse(statement).startswith("super().__init__("):
                    break
                kept.append(statement)
            line, start = self._at(function.body[0].lineno, 0), self._span(function.body[0])[0]
            indent, at = self.data[line:start], line
            if indent.strip():
                return None
            while not kept and self.data[:at].rstrip(b"\r\n").rpartition(b"\n")[2].startswith(
                indent + b"#"
            ):  # a comment belongs to the statement below it
                at = self.data.rfind(b"\n", 0, at - 1) + 1
            at = self._starts[kept[-1].end_lineno or 0] if kept else at
            made[at, at, f"self.{name}"] = indent + f"self.{name} = {name}".encode() + self._newline
        return made

    def set_in_library(self, change: str, edit: Edit) -> list[ByHand] | None:
        """Set the arguments with which a library makes the edit, and return what that leaves.

        None means that nothing here takes such arguments.
        """
        left, is_known = list[ByHand](), False
        for known, call in product(edit.library, self._calls):
            name = ast.unparse(call.func).rpartition(".")[2]
            every = (each.rpartition(":") for each in known.split())
            if any(name.endswith(end) for package, _, end in every if package in self._imported):
                is_known, keywords = True, edit.library[known]
                given = {k.arg for k in call.keywords if not isinstance(k.value, ast.Constant)}
                is_stated = edit.option and given & {*edit.option.values}  # by the script
                under = (edit, []) if is_stated else self.optional(edit, call.lineno)
                why: str | None = None
                if isinstance(under, str):
                    why = under
                else:
                    self._said = []
                    made = self._set(under[0].library[known], call, None)
                    new = under[1]
                    why = made if isinstance(made, str) else self._commit([(self, made), *new])
                if why is not None:
                    words = _words(Edit(keywords=keywords), why, name)
                    left.append(
                        ByHand(change=change, file=str(self.path), line=call.lineno, words=words)
                    )
        return left if is_known else None

    def text(self, more: Made | None = None) -> bytes:
        """Return the file with its edits, and more of them."""
        data, edits = self.data, self.edits | (more or {})
        # a line comes before the block that begins in its place
        order = sorted(edits, key=lambda key: (*key[:2], key[2].startswith("with ")))
        for start, end, what in order[::-1]:
            data = data[:start] + edits[start, end, what] + data[end:]
        return data

    def _has(self, pattern: str) -> bool:
        """Return whether the code has a call that a pattern describes."""
        calls = (ast.unparse(n) for n in ast.walk(self._tree) if isinstance(n, ast.Call))
        return any(re.match(pattern, call) for call in calls)

    def _is_valid(self, more: Made) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's code
            try:
                compile(self.text(more), str(self.path), "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
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
        for block in blocks_of(self._tree):
            spans = [self._span(statement) for statement in block]
            first = next((n for n, (a, b) in enumerate(spans) if a <= here < b), None)
            last = next((n for n, (a, b) in enumerate(spans) if a <= there < b), None)
            if first is not None and last is not None and first < last:
                break
        else:
            return "one statement calls the model and goes backward"
        read = names_in(block[last], ast.Load)
        while last > first + 1 and not read & names_in(block[last - 1], ast.Store):
            last -= 1
        inside = edit.around.replace("{torch}", site.names["torch"])
        begin, end = block[first].lineno, block[last - 1].end_lineno or 0
        before = self.data[self._at(begin, 0) : spans[first][0]]
        inner = {name for one in block[first:last] for name in names_in(one, ast.Store)}
        made: Made = {}
        for statement in block[last:]:  # which reads fp32 so far
            for name in sorted(inner & {*site.floats} & names_in(statement, ast.Load)):
                if not reads_values(statement, name, self._tree.body):
                    continue
                at = self._starts[end]
                made[at, at, name] = before + f"{name} = {name}.float()".encode() + self._newline
                inner.discard(name)
            inner -= names_in(statement, ast.Store)
        after = self.data[spans[last - 1][1] : self._starts[end]].strip()
        if before.strip() or after[:1] not in (b"", b"#"):
            return "its statements share their lines with others"
        unit = self._unit
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
                made[at, at, head.decode()] = before + head + self._newline + unit
            elif line not in in_texts and self.data[at : self._starts[line]].strip():
                made[at, at, head.decode()] = unit
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
            new = [re.sub(rb"^    ", self._unit, one) for one in text.encode().split(b"\n")]
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
        made, new = Made(), dict[str, str]()
        spread = self._spread(call)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        given |= items_of(spread) if spread else {}
        has_star = not spread and None in given
        has_star |= any(isinstance(one, ast.Starred) for one in call.args)
        if not has_star:
            given |= dict(zip(parameters or (), call.args, strict=False))
        parser, workers = self.parser, ""
        shared = self._shared(call, parser[1]) if parser else {}
        for name, value in keywords.items():
            stated = given.get(name) or shared.get(name)
            said = None
            if stated is not None and not isinstance(stated, ast.Constant):
                said = parser[1].words(stated, value) if parser else None
                if said is None and name in given:
                    return DECIDED
            if said is not None and stated is not None:  # an option of the script has it
                self._said.append(said)
                value = ast.unparse(stated)
                workers = value if name.endswith("num_workers") else workers
                if name in given:
                    continue
            elif workers and name.endswith("persistent_workers"):
                value = f"{workers} > 0"
            if name in given:
                made[(*self._span(given[name]), "")] = value.encode()
            elif parameters is not None and name not in parameters:
                return f"{ast.unparse(call.func)} takes no {name}"
            elif has_star:
                return f"an argument with stars may contain {name}, which is then set there"
            elif value.startswith("not torch.") and not self._has_torch:
                return "torch has no name there"
            else:
                new[name] = value
        to, texts = spread or call, {n: f"{n}={value}" for n, value in new.items()}
        closing, opening = self._span(to)[1] - 1, self._span(to)[0] + 1
        if isinstance(to, ast.Dict):
            pairs = zip(to.keys, to.values, strict=True)
            spans = [(self._span(key or value)[0], self._span(value)[1]) for key, value in pairs]
            quote = "'" if b"'" in self.data[opening:closing] else '"'
            texts = {n: f"{quote}{n}{quote}: {value}" for n, value in new.items()}
        else:
            spans = [*map(self._span, [*to.args, *to.keywords])]
            opening = self.data.find(b"(", self._span(to.func)[1]) + 1
        return made | self._added(spans, opening, closing, texts)

    def _spread(self, call: ast.Call) -> ast.Dict | ast.Call | None:
        """Return what makes the dictionary that a call takes by two stars.

        None: it has none, or it is not made in one place for calls of this name alone.
        """
        stars = [ast.unparse(one.value) for one in call.keywords if one.arg is None]
        nodes, name = [*nodes_of(scopes_at(self._tree, call.lineno)[-1])], ast.unparse(call.func)
        made = [n.value for n in nodes if isinstance(n, ast.Assign)
                and [ast.unparse(n.targets[0])] == stars]  # fmt: skip
        taken = [
            word.value
            for node in nodes
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name
            for word in node.keywords
            if word.arg is None
        ]
        taken += [n.value for n in nodes if isinstance(n, ast.Attribute) and n.attr == "update"]
        reads = [n for n in nodes if isinstance(n, ast.Name) and [n.id] == stars]
        first = made[0] if len(made) == 1 else None
        if isinstance(first, ast.Call) and (ast.unparse(first.func) != "dict" or first.args):
            return None
        if not isinstance(first, ast.Call | ast.Dict) or None in items_of(first):
            return None
        is_alone = len([n for n in reads if n not in taken]) == 1  # where it is made
        return first if is_alone else None

    def _added(self, spans: Spans, opening: int, closing: int, texts: Mapping[str, str]) -> Made:
        """Return the edit that adds texts after others, on lines of their own if those are."""
        begin, end = max(spans, default=(closing, closing))
        line, stop = self.data.rfind(b"\n", 0, begin) + 1, self.data.find(b"\n", end) + 1
        indent, rest = self.data[line:begin], self.data[end:stop].strip()
        whole = self.data[self.data.rfind(b"\n", 0, end) + 1 : stop or None].rstrip()
        left = re.sub(rb"#.*", b"", self.data[stop:closing])
        is_alone = line > 0 and stop <= closing and not (indent + left).strip()
        first, last, then, at = b", " * bool(spans), b"", b", ", min(end, closing)
        if is_alone and rest[:1] == b",":
            first, last, then, at = indent, b"," + self._newline, indent, stop
        elif is_alone and not rest:
            first = then = b"," + self._newline + indent
        elif spans and len(whole) + sum(len(text) + 2 for text in texts.values()) > self._width():
            column = indent if line > opening else self.data[line:opening]
            margin = column[: len(column) - len(column.lstrip())]
            pad = margin if line > opening else margin.ljust(len(column))
            first = b"," + self._newline + pad
        heads = [first, *[then] * len(texts)]  # before the parenthesis of f(x for x in y), too
        return {
            (at, at, name): head + text.encode() + last
            for head, (name, text) in zip(heads, texts.items(), strict=False)
        }

    def _width(self) -> int:
        """Return how long lines of code are here, or may be."""
        lines = (one for one in self.data.splitlines() if b"#" not in one)
        return max(LINE, *map(len, lines), 0)

    def _shared(self, call: ast.Call, parser: Parser) -> dict[str | None, ast.expr]:
        """Return the options that other calls of the same name take, and that a call could."""
        owner = namespace_at(self._tree, call.lineno, parser)
        return {
            one.arg: one.value
            for other in self._calls
            if ast.unparse(other.func) == ast.unparse(call.func)
            for one in other.keywords
            if isinstance(one.value, ast.Attribute)
            and ast.unparse(one.value.value) == owner
            and not re.search(EVALUATION, one.value.attr)
        }
