"""Changes become a patch of the user's own files in which every other byte is as it was."""

from __future__ import annotations

import ast
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.measure.attach.request import Site
from flatout.measure.scripts.patch import Edit, Patch, apply, patch_of

FUSED = Edit(at="optimizer", keywords={"fused": "True"}, only=("AdamW",))
WORKERS = Edit(at="loader", keywords={"num_workers": "4"})
PINNED = Edit(at="loader", keywords={"pin_memory": "True"})
COMPILE = Edit(lines=("{model}.compile()",))
NO_GC = Edit(at="gc-collect", remove=True)
NO_CACHE = Edit(at="empty-cache", remove=True)
AUTOCAST = Edit(at="loss", around="{torch}.autocast('cpu')")
FAST = Edit(lines=('{torch}.set_float32_matmul_precision("high")',))

KINDS = {
    "AdamW": "optimizer",
    "SGD": "optimizer",
    "DataLoader": "loader",
    "collect": "gc-collect",
    "empty_cache": "empty-cache",
    "set_detect_anomaly": "anomaly",
    "train": "optimizer",
    "model": "loss",
}
PARAMETERS = {
    "AdamW": ("params", "lr", "betas", "fused"),
    "DataLoader": (
        "dataset",
        "batch_size",
        "shuffle",
        "sampler",
        "batch_sampler",
        "num_workers",
        "collate_fn",
        "pin_memory",
    ),
    "set_detect_anomaly": ("mode", "check_nan"),
}


def sites_in(path, names=None) -> list[Site]:
    """Return the sites of a file; `trainer.train()` is a library's."""
    found = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", None) or node.func.attr
        if name not in KINDS:
            continue
        line, column = node.lineno, node.col_offset
        end_line, end_column = node.end_lineno, node.end_col_offset
        if name == "model":
            backward = next(
                call
                for call in ast.walk(ast.parse(path.read_bytes()))
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("backward")
            )
            end_line, end_column = backward.lineno, backward.col_offset
        found.append(
            Site(
                kind=KINDS[name],
                name="AdamW" if name == "train" else name,
                file=str(path),
                line=line,
                column=column,
                end_line=end_line,
                end_column=end_column,
                is_direct=name != "train",
                parameters=PARAMETERS.get(name, ()),
                names={"model": "model", "torch": "torch"} if names is None else names,
                floats=["out"],
            )
        )
    return found


@pytest.fixture
def patched(tmp_path):
    """Return a function that patches a source, and checks that the diff says the same."""
    path = tmp_path / "train.py"

    def patched(source: str | bytes, *edits: Edit, names=None) -> tuple[str, Patch]:
        data = source if isinstance(source, bytes) else source.encode()
        path.write_bytes(data)
        changes = {f"c{number}": edit for number, edit in enumerate(edits)}
        patch = patch_of(changes, sites_in(path, names), tmp_path)
        if patch.diff:
            for tool in (["git", "apply", "-"], ["patch", "-p1", "-s"]):
                path.write_bytes(data)
                done = subprocess.run(
                    tool, input=patch.diff.encode(), cwd=tmp_path, capture_output=True, check=False
                )
                assert done.returncode == 0, done.stderr
                assert path.read_bytes() == patch.files["train.py"].encode()
            path.write_bytes(data)
            apply(patch, tmp_path)
        return path.read_bytes().decode(errors="replace"), patch

    return patched


KEYWORDS = [
    ("o = AdamW(p, lr=1)\n", "o = AdamW(p, lr=1, fused=True)\n"),
    ("o = AdamW(p)", "o = AdamW(p, fused=True)"),
    ("o = AdamW(p, fused=False)\n", "o = AdamW(p, fused=True)\n"),
    ("o = AdamW(p, fused = (None), lr=1)\n", "o = AdamW(p, fused = (True), lr=1)\n"),
    ("o = AdamW(p, 1, b, None)\n", "o = AdamW(p, 1, b, True)\n"),
    ("o = AdamW(p, lr=(1))\n", "o = AdamW(p, lr=(1), fused=True)\n"),
    (
        "o = AdamW(\n    p,\n    lr=1,  # 1e-3 (too low)\n)\n",
        "o = AdamW(\n    p,\n    lr=1,  # 1e-3 (too low)\n    fused=True,\n)\n",
    ),
    (
        "o = AdamW(\n    p,\n    lr=1  # no comma\n)\n",
        "o = AdamW(\n    p,\n    lr=1, fused=True  # no comma\n)\n",
    ),
    ("é = 'ü'; o = AdamW('ß', lr='→')\n", "é = 'ü'; o = AdamW('ß', lr='→', fused=True)\n"),
    (
        "# -*- coding: utf-8 -*-\nö = AdamW(p)\n",
        "# -*- coding: utf-8 -*-\nö = AdamW(p, fused=True)\n",
    ),
    ("if x:\r\n\to = AdamW(p)\r\n", "if x:\r\n\to = AdamW(p, fused=True)\r\n"),
    ("a = '\x0c'\no = AdamW(p)  # \u2028\n", "a = '\x0c'\no = AdamW(p, fused=True)  # \u2028\n"),
    (
        "o = torch.optim.AdamW([q for q in p])\n",
        "o = torch.optim.AdamW([q for q in p], fused=True)\n",
    ),
    ("a, b = AdamW(p), AdamW(q)\n", "a, b = AdamW(p, fused=True), AdamW(q, fused=True)\n"),
    ("o = AdamW(p, fused=False, **more)\n", "o = AdamW(p, fused=True, **more)\n"),
]


@pytest.mark.parametrize(("source", "expected"), KEYWORDS)
def test_keywords_are_set_in_the_call(patched, source, expected):
    result, patch = patched(source, FUSED)
    assert result == expected
    assert patch.by_hand == []


def test_edits_of_one_call_merge(patched):
    source = "a = DataLoader(d, batch_size=2, num_workers=0)\no = AdamW(p)\n"
    result, patch = patched(source, PINNED, WORKERS, FUSED, WORKERS, COMPILE, FAST)
    assert result == (
        "a = DataLoader(d, batch_size=2, num_workers=4, pin_memory=True)\n"
        "o = AdamW(p, fused=True)\n"
        "model.compile()\n"
        'torch.set_float32_matmul_precision("high")\n'
    )
    assert patch.by_hand == []
    both, _ = patched(
        "d = DataLoader(x)\n",
        Edit(at="loader", keywords={"num_workers": "4", "pin_memory": "True"}),
    )
    assert both == "d = DataLoader(x, num_workers=4, pin_memory=True)\n"


def test_an_argument_is_on_a_line_of_its_own_where_others_are(patched):
    source = "d = DataLoader(\n    x,\n    shuffle=f(\n        y\n    ),  # all\n)\n"
    expected = source.replace("# all\n", "# all\n    num_workers=4,\n")
    assert patched(source, WORKERS)[0] == expected
    source = "d = DataLoader(\n    x, batch_size=2\n)\n"
    assert patched(source, WORKERS)[0] == source.replace("=2", "=2, num_workers=4")


def test_what_asks_torch_needs_its_name(patched):
    accelerated = "not torch.accelerator.is_available()"
    edit = Edit(at="loader", library={"Config": {"use_cpu": accelerated}})
    result, patch = patched("c = Config(a)\ntrainer.train()\n", edit)
    assert result == "c = Config(a)\ntrainer.train()\n"
    assert "torch has no name there" in patch.by_hand[0].words
    source = "import torch\nc = Config(a)\ntrainer.train()\n"
    assert f"Config(a, use_cpu={accelerated})" in patched(source, edit)[0]


def test_an_argument_that_the_script_decides_is_left_to_it(patched):
    source = "a = DataLoader(x, num_workers=0)\nb = DataLoader(x, num_workers=args.workers)\n"
    result, patch = patched(source, WORKERS)
    assert (result, patch.by_hand) == (source.replace("=0", "=4"), [])
    result, patch = patched(source.partition("\n")[2], WORKERS)
    assert patch.diff == ""
    assert patch.by_hand[0].words == "Set num_workers=4 in DataLoader: the script decides it there."


def test_an_argument_by_position_is_replaced(patched):
    result, _ = patched("d = DataLoader(x, 32, True, None, None, 0)\n", WORKERS)
    assert result == "d = DataLoader(x, 32, True, None, None, 4)\n"
    mode = Edit(at="anomaly", keywords={"mode": "False"})
    result, _ = patched("with set_detect_anomaly(True):\n    x()\n", mode)
    assert result == "with set_detect_anomaly(False):\n    x()\n"


WRAPPED = [
    (
        "for x, y in d:\n    o.zero_grad()\n    out = model(x)\n\n    loss = f(out, y)  # mean\n"
        "    print(1)\n    loss.backward()\n    o.step()\n",
        "for x, y in d:\n    o.zero_grad()\n    with torch.autocast('cpu'):\n        out = model(x)"
        "\n\n        loss = f(out, y)  # mean\n    print(1)\n    loss.backward()\n    o.step()\n",
    ),
    (  # what reads its values gets fp32, as before
        "out = model(x)\nloss = f(out)\nloss.backward()\nn += out.argmax(1) == y\nseen += out\n",
        "with torch.autocast('cpu'):\n    out = model(x)\n    loss = f(out)\nout = out.float()\n"
        "loss.backward()\nn += out.argmax(1) == y\nseen += out\n",
    ),
    (  # which of them is the largest is the same
        "out = model(x)\nloss = f(out)\nloss.backward()\nn += argmax(out, 1) == y\n"
        "n += out.shape[0] + out.argmax(1).sum()\n",
        "with torch.autocast('cpu'):\n    out = model(x)\n    loss = f(out)\nloss.backward()\n"
        "n += argmax(out, 1) == y\nn += out.shape[0] + out.argmax(1).sum()\n",
    ),
    (  # what the gradient needs is divided, and scaled
        "loss = model(x).mean()\nloss = loss / 4\nif ready:\n    s.scale(loss).backward()\n",
        "with torch.autocast('cpu'):\n    loss = model(x).mean()\n    loss = loss / 4\n"
        "if ready:\n    s.scale(loss).backward()\n",
    ),
    (
        "with ctx as c:  # none\n    loss = model(x)\nloss.backward()\n",
        "with torch.autocast('cpu'):\n    with ctx as c:  # none\n        loss = model(x)\n"
        "loss.backward()\n",
    ),
    (  # the two are in branches and blocks of one block
        "if x:\r\n\tself.loss = model(x)\r\nelse:\r\n\tpass\r\n"
        "with no_sync():\r\n\tself.loss.backward()\r\n",
        "with torch.autocast('cpu'):\r\n\tif x:\r\n\t\tself.loss = model(x)\r\n\telse:\r\n"
        "\t\tpass\r\nwith no_sync():\r\n\tself.loss.backward()\r\n",
    ),
    (
        'loss = model(\n    x, """a\nb""", f"""c\n{x}\n"""\n)\nloss.backward()',
        "with torch.autocast('cpu'):\n    loss = model(\n"
        '        x, """a\nb""", f"""c\n{x}\n"""\n    )\nloss.backward()',
    ),
]


@pytest.mark.parametrize(("source", "expected"), WRAPPED)
def test_what_computes_the_loss_is_put_into_a_block(patched, source, expected):
    result, patch = patched(source, AUTOCAST)
    assert result == expected
    assert patch.by_hand == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("model(x).mean().backward()\n", "one statement calls the model and goes backward"),
        ("loss = model(x); loss.backward()\n", "its statements share their lines with others"),
    ],
)
def test_a_loss_that_has_no_block_is_wrapped_by_hand(patched, source, why):
    result, patch = patched(source, AUTOCAST)
    assert (result, patch.diff) == (source, "")
    assert patch.by_hand[0].words == (
        "Call the model and compute the loss in `with torch.autocast('cpu'):`, and backward() "
        f"after it: {why}."
    )


def test_a_library_takes_arguments_instead(patched):
    edit = Edit(
        at="loss",
        around="{torch}.autocast('cpu')",
        library={"Accelerator": {"mixed": "'bf16'"}, "Arguments Config": {"bf16": "True"}},
    )
    source = (
        "a = lib.Accelerator()\nb = SomeArguments('out', bf16=False)\n"
        "loss = model(x)\nloss.backward()\n"
    )
    result, patch = patched(source, edit)
    assert result == source.replace("Accelerator()", "Accelerator(mixed='bf16')").replace(
        "False", "True"
    )
    assert patch.by_hand == []
    result, patch = patched(source.replace("False", "args.bf16"), edit)
    assert [one.words for one in patch.by_hand] == [
        "Set bf16=True in SomeArguments: the script decides it there."
    ]
    source = source.replace("a = lib.Accelerator()", "rank = lib.Accelerator().process_index")
    assert "mixed" not in patched(source, edit)[0]  # it computes nothing
    workers = Edit(at="loader", keywords={"num_workers": "4"}, library={"Config": {"workers": "4"}})
    source = "c = Config(a)\nd = DataLoader(x)\n"
    result, _ = patched(source, workers)  # the script makes the call itself
    assert result == "c = Config(a)\nd = DataLoader(x, num_workers=4)\n"
    trainer = Edit(at="loss", around="bf16()", library={"lightning:Trainer": {"precision": "16"}})
    source = "import lightning as L\nt = L.Trainer(epochs=1)\nloss = model(x)\nloss.backward()\n"
    assert patched(source, trainer)[0] == source.replace("epochs=1", "epochs=1, precision=16")
    assert patched(source.replace("lightning", "transformers"), trainer)[0].count("precision") == 0


LINES = [
    (
        "x()\n# all of it\n# at once\ntrainer.train()\n",
        "x()\nmodel.compile()\n# all of it\n# at once\ntrainer.train()\n",
    ),
    ("# a script\no = AdamW(p)\n", "# a script\no = AdamW(p)\nmodel.compile()\n"),
    ("o = AdamW(p)\nx()\n", "o = AdamW(p)\nmodel.compile()\nx()\n"),
    ("o = AdamW(p)", "o = AdamW(p)\nmodel.compile()\n"),
    (
        "o = AdamW(\n    p,\n)  # slow\n",
        "o = AdamW(\n    p,\n)  # slow\nmodel.compile()\n",
    ),
    (
        "def f():\r\n\treturn AdamW(p)\r\n",
        "def f():\r\n\tmodel.compile()\r\n\treturn AdamW(p)\r\n",
    ),
    (
        "if x:\n    trainer.train()\nelse:\n    y()\n",
        "if x:\n    model.compile()\n    trainer.train()\nelse:\n    y()\n",
    ),
    (
        "with trainer.train():\n    x()\n",
        "model.compile()\nwith trainer.train():\n    x()\n",
    ),
    # a library's optimizer only counts where the user makes none, and a model compiles once
    ("a = SGD(p)\nb = AdamW(q)\n", "a = SGD(p)\nmodel.compile()\nb = AdamW(q)\n"),
    (
        "trainer.train()\nb = AdamW(q)\n",
        "trainer.train()\nb = AdamW(q)\nmodel.compile()\n",
    ),
]


@pytest.mark.parametrize(("source", "expected"), LINES)
def test_lines_are_inserted_at_the_optimizer(patched, source, expected):
    result, patch = patched(source, COMPILE)
    assert result == expected
    assert patch.by_hand == []


def test_a_script_that_can_compile_its_model_is_not_told_to_do_it_twice(patched):
    source = "if options.compile:\n    model = torch.compile(model)\no = AdamW(p)\n"
    result, patch = patched(source, COMPILE)
    assert result == source
    assert "a torch.compile of its own" in patch.by_hand[0].words


def test_lines_keep_their_own_indentation_and_names(patched):
    edit = Edit(lines=("for module in {model}.modules():", "    {torch}.check(module, {{}})"))
    source = "class A:\n    def f(self):\n        self.o = AdamW(p)\n        self.q = SGD(p)\n"
    result, patch = patched(source, edit, names={"model": "self.model", "torch": "th"})
    assert result.splitlines()[2:] == [
        "        self.o = AdamW(p)",
        "        for module in self.model.modules():",
        "            th.check(module, {{}})",
        "        self.q = SGD(p)",
    ]
    assert patch.by_hand == []
    result, _ = patched("o = AdamW(p)\n", FAST, names={})
    assert result.splitlines()[1:] == [
        "import torch",
        'torch.set_float32_matmul_precision("high")',
    ]


REMOVED = [
    ("x()\ngc.collect()  # free\ny()\n", "x()\ny()\n"),
    ("x()\n    \ngc.collect()", "x()\n    \n"),
    ("if x:\n    gc.collect()\ny()\n", "if x:\n    pass\ny()\n"),
    ("if x: gc.collect()\n", "if x: pass\n"),
    ("import gc\nx()\ngc.collect()\n", "x()\n"),
    ("import gc, sys\nx()\ngc.collect()\n", "import gc, sys\nx()\n"),
    ("import gc\ngc.disable()\ngc.collect()\n", "import gc\ngc.disable()\n"),
    ("x(); gc.collect(); y()\n", "x(); pass; y()\n"),
    (
        "for x in y:\n    gc.collect()\n    torch.cuda.empty_cache()\n",
        "for x in y:\n    pass\n",
    ),
]


@pytest.mark.parametrize(("source", "expected"), REMOVED)
def test_statements_are_removed(patched, source, expected):
    result, patch = patched(source, NO_GC, NO_CACHE)
    assert result == expected
    assert [one.change for one in patch.by_hand] == ([] if "empty_cache" in source else ["c1"])


BY_HAND = [
    ("o = AdamW(p, **a, lr=1)\n", FUSED, "may contain fused"),
    ("o = AdamW(*more)\n", FUSED, "may contain fused"),
    ("o = AdamW(p, *more, 1, x)\n", FUSED, "may contain fused"),
    ("o = AdamW(q for q in p)\n", FUSED, "valid Python"),
    ("o = AdamW((p))\n", FUSED, "valid Python"),
    ("trainer.train()\n", FUSED, "a library makes it"),
    ("o = SGD(p)\n", Edit(at="optimizer", keywords={"fused": "True"}), "SGD takes no fused"),
    ("x()\n", WORKERS, "in loader: no line"),
    ("o = SGD(p)\n", FUSED, "in AdamW: no line"),
    ("n = gc.collect()\n", NO_GC, "part of a longer statement"),
    ("o = AdamW(p); x()\n", COMPILE, "no place for a separate line"),
    ("if x: o = AdamW(p)\n", COMPILE, "no place for a separate line"),
    ("for x in AdamW(p):\n    y()\n", COMPILE, "no place for a separate line"),
    ("if x:\n    y()\nelif trainer.train():\n    y()\n", COMPILE, "valid Python"),
    ("x()\n", FAST, "no line"),
    ("# coding: latin-1\no = AdamW('ä')\n".encode("latin-1"), FUSED, "as UTF-8"),
]


@pytest.mark.parametrize(("source", "edit", "why"), BY_HAND)
def test_what_has_no_exact_edit_is_left_to_the_user(patched, source, edit, why):
    result, patch = patched(source, edit)
    assert result == (source if isinstance(source, str) else source.decode(errors="replace"))
    assert patch.diff == ""
    assert [one.change for one in patch.by_hand] == ["c0"]
    assert why in patch.by_hand[0].words


def test_without_the_name_of_the_model_lines_are_left_to_the_user(patched):
    _, patch = patched("o = AdamW(p)\n", COMPILE, names={})
    (left,) = patch.by_hand
    assert left.line == 1
    assert left.words.splitlines() == [
        "Write these lines: the model has no name there.",
        "model.compile()",
    ]


def test_one_edit_that_is_not_possible_leaves_the_others(patched):
    result, patch = patched("a = AdamW(*m)\nb = AdamW(q)\n", FUSED)
    assert result == "a = AdamW(*m)\nb = AdamW(q, fused=True)\n"
    assert [one.line for one in patch.by_hand] == [1]


def test_files_that_are_elsewhere_changed_or_gone_are_left_alone(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    names = ("moved.py", "shorter.py", "longer_call.py", "gone.py")
    paths = [tmp_path / "outside.py", *(root / name for name in names)]
    for path in paths:
        path.write_text("x = 1\no = AdamW(p)\n")
    sites = [site for path in paths for site in sites_in(path)]
    for path, text in zip(
        paths[1:], ("x = 1\n\no = AdamW(p)\n", "", "x = 1\no = AdamW(p, q)\n"), strict=False
    ):
        path.write_text(text)
    paths[-1].unlink()
    patch = patch_of({"fused": FUSED}, sites, root)
    assert patch.diff == ""
    assert [one.file for one in patch.by_hand] == [str(path) for path in paths]
    reasons = ("is not in", "any more", "any more", "any more", "cannot be read")
    for left, why in zip(patch.by_hand, reasons, strict=True):
        assert why in left.words


def test_a_patch_spans_files_and_names_with_spaces(tmp_path):
    (tmp_path / "my code").mkdir()
    names = ("my code/opt.py", "train.py")
    for name in names:
        (tmp_path / name).write_text("o = AdamW(p)\n")
    sites = [site for name in names for site in sites_in(tmp_path / name)]
    patch = patch_of({"fused": FUSED}, sites, tmp_path)
    for tool in (["git", "apply", "--check", "-"], ["patch", "-p1", "-s"]):
        subprocess.run(tool, input=patch.diff.encode(), cwd=tmp_path, check=True)
    for name in names:
        assert (tmp_path / name).read_text() == "o = AdamW(p, fused=True)\n"
    assert Patch.model_validate_json(patch.model_dump_json()).diff == patch.diff


WORDS = st.sampled_from(
    ["p", "é", "'ü→'", "(a, b)", "f(x)[0]", "{'k': 1}", "lambda: (1)", "1 if x else 2"]
)
GAPS = st.sampled_from(["", " ", "\n    ", "\r\n  ", "\t", "  # ä (note),\n", "\\\n"])


@settings(deadline=None)
@given(st.data())
def test_keywords_are_set_wherever_there_are_blanks_and_comments(tmp_path_factory, data):
    """The syntax tree with the keyword is that of the source with one keyword more."""

    def gap() -> str:
        return data.draw(GAPS)

    count = data.draw(st.integers(0, 3))
    arguments = [data.draw(WORDS)]
    arguments += [f"k{i}{gap()}={gap()}{data.draw(WORDS)}" for i in range(count)]
    given_call = f"{gap()},{gap()}".join(arguments) + data.draw(st.sampled_from(["", ",", " ,"]))
    prefix = data.draw(st.sampled_from(["", "'äö'; ", "if x:\n\t"]))
    source = f"{prefix}o = [AdamW({gap()}{given_call}{gap()}), 'ß']\n"
    path = tmp_path_factory.mktemp("root") / "train.py"
    path.write_bytes(source.encode())
    patch = patch_of({"fused": FUSED}, sites_in(path), path.parent)
    assert patch.by_hand == []
    expected = ast.parse(source)
    call = next(
        n for n in ast.walk(expected) if getattr(getattr(n, "func", 0), "id", "") == "AdamW"
    )
    call.keywords.append(ast.keyword("fused", ast.Constant(True)))
    assert ast.dump(ast.parse(patch.files["train.py"])) == ast.dump(expected)
    new = patch.files["train.py"]
    cuts = (source[:at] == new[:at] and new.endswith(source[at:]) for at in range(len(source)))
    assert any(cuts), "one place has changed"
