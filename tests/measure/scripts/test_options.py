"""A patch uses the options of a script, and adds one like them for what is not for everybody."""

from __future__ import annotations

import ast
import re
import textwrap

import pytest

from flatout.measure.attach.request import Site
from flatout.measure.scripts.changes import CHANGES, edit_of
from flatout.measure.scripts.options import Option
from flatout.measure.scripts.patch import Edit, patch_of

CALLS = {"model": "loss", "DataLoader": "loader", "AdamW": "optimizer"}
WORKERS = Edit(at="loader", keywords={"num_workers": "4", "persistent_workers": "True"})


def sites_of(path) -> list[Site]:
    """Return the sites of a file."""
    tree, sites = ast.parse(path.read_text()), []
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    for one in calls:
        name = ast.unparse(one.func).rpartition(".")[2]
        if name not in CALLS:
            continue
        end_line, end_column = one.end_lineno, one.end_col_offset
        if name == "model":
            backs = (each for each in calls if ast.unparse(each.func).endswith("backward"))
            back = min((b for b in backs if b.lineno >= one.lineno), key=lambda b: b.lineno)
            end_line, end_column = back.lineno, back.col_offset
        sites.append(
            Site(
                kind=CALLS[name],
                name=name,
                file=str(path),
                line=one.lineno,
                column=one.col_offset,
                end_line=end_line,
                end_column=end_column,
                names={"model": "model", "torch": "torch"},
                floats=["out"],
                parameters=("dataset", "shuffle", "num_workers", "persistent_workers"),
            )
        )
    return sites


@pytest.fixture
def patched(tmp_path):
    """Return a function that patches files, and returns them with the patch."""

    def patched(edit: Edit, has_options=True, **files: str):
        paths = {name: tmp_path / f"{name}.py" for name in files}
        for name, text in files.items():
            paths[name].write_text(textwrap.dedent(text))
        sites = [site for path in paths.values() for site in sites_of(path)]
        patch = patch_of({"c": edit}, sites, tmp_path, has_options=has_options)
        texts = {n: patch.files.get(f"{n}.py", p.read_text()) for n, p in paths.items()}
        for text in texts.values():
            ast.parse(text)
        return texts, patch

    return patched


LOOP = """\
    import argparse
    import torch

    def train(args, model, d):
        for x in d:
            loss = model(x).mean()
            loss.backward()
            if args.dry_run:
                break

    def main():
        parser = argparse.ArgumentParser()
        parser.add_argument('--batch-size', type=int, default=64, metavar='N',
                            help='rows')
        parser.add_argument('--dry-run', action='store_true')
        args = parser.parse_args()
        model = Net()
        optimizer = AdamW(model.parameters())
        train(args, model, DataLoader(rows[:args.batch_size]))

    main()
"""


def test_bf16_becomes_an_option_beside_the_others(patched):
    texts, patch = patched(edit_of("bf16", "cpu"), train=LOOP)
    lines = texts["train"].splitlines()
    assert patch.options == ["--bf16"]
    assert patch.by_hand == []
    added = lines.index("    parser.add_argument('--dry-run', action='store_true')") + 1
    assert lines[added] == (
        "    parser.add_argument('--bf16', action='store_true', help='train in bf16 autocast')"
    )
    assert lines[5:8] == [
        '        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):',
        "            loss = model(x).mean()",
        "        loss.backward()",
    ]
    assert len(lines) == len(textwrap.dedent(LOOP).splitlines()) + 2


def test_an_option_is_added_on_two_lines_where_others_are(patched):
    source = LOOP.replace("        parser.add_argument('--dry-run', action='store_true')\n", "")
    source = source.replace("args.dry_run", "args.batch_size")
    lines = patched(edit_of("bf16", "cpu"), train=source)[0]["train"].splitlines()
    assert "    parser.add_argument('--bf16', action='store_true'," in lines
    assert " " * 24 + "help='train in bf16 autocast')" in lines


def test_compiling_is_an_option_too(patched):
    texts, patch = patched(edit_of("compile"), train=LOOP)
    assert patch.options == ["--compile"]
    after = texts["train"].partition("AdamW(model.parameters())\n")[2]
    assert after.startswith("    if args.compile:\n        model.compile()\n")


UNSEEN = LOOP.replace("train(args, ", "train(").replace("args.dry_run", "dry")


def test_a_function_that_does_not_see_the_options_gets_a_parameter(patched):
    text = patched(edit_of("bf16", "cpu"), train=UNSEEN)[0]["train"]
    assert "def train(model, d, use_bf16=False):" in text
    assert "train(model, DataLoader(rows[:args.batch_size]), use_bf16=args.bf16)\n" in text
    assert "enabled=use_bf16)" in text
    guarded = UNSEEN.replace("def main():", "if __name__ == '__main__':").replace("main()\n", "")
    text = patched(edit_of("bf16", "cpu"), train=guarded)[0]["train"]
    assert "enabled=use_bf16)" in text, "another process imports the module"
    seen = LOOP.replace("train(args, ", "train(").replace("def main():", "if True:")
    text = patched(edit_of("bf16", "cpu"), train=seen)[0]["train"]
    assert "enabled=args.bf16)" in text, "which is a variable of the module"
    assert "def train(model, d):" in text


TRAINER = """\
    import torch

    class Trainer:
        def __init__(self, model, log_every: int = 10):
            \"\"\"Keep the model.\"\"\"
            super().__init__()
            self.model = model
            self.log_every = log_every

            # all of it
            print("ready")

        def step(self, x):
            loss = self.model(x).mean()
            loss.backward()
"""
MAIN = """\
    import argparse
    from trainer import Trainer

    def arguments():
        parser = argparse.ArgumentParser()
        parser.add_argument("--rows", type=int)
        return parser.parse_args()

    options = arguments()
    trainer = Trainer(Net(), log_every=options.rows)
    trainer.step(DataLoader(x))
"""


def test_a_class_of_another_file_gets_it_as_an_argument(patched):
    texts, patch = patched(edit_of("bf16", "cpu"), main=MAIN, trainer=TRAINER)
    assert patch.options == ["--bf16"]
    assert '    parser.add_argument("--bf16", action="store_true", help=' in texts["main"]
    assert "Trainer(Net(), log_every=options.rows, use_bf16=options.bf16)" in texts["main"]
    assert (
        "def __init__(self, model, log_every: int = 10, use_bf16: bool = False):"
        in texts["trainer"]
    )
    kept = "        self.log_every = log_every\n        self.use_bf16 = use_bf16\n\n"
    assert kept in texts["trainer"]
    assert "enabled=self.use_bf16)" in texts["trainer"]


def test_without_options_other_files_ask_for_it(patched):
    main = "from trainer import Trainer\nprint(Trainer.log_every)\n"
    main += "trainer = Trainer(Net(), log_every=2)\nDataLoader(x)\n"
    texts, patch = patched(edit_of("bf16", "cpu"), main=main, trainer=TRAINER)
    assert "Trainer(Net(), log_every=2, use_bf16=True)" in texts["main"]
    assert "use_bf16: bool = False" in texts["trainer"]
    assert "enabled=self.use_bf16)" in texts["trainer"]
    assert patch.options == []


def test_attributes_of_a_class_that_keeps_the_options_are_read(patched):
    kept = "self.model = model\n            self.o = options\n            print(self.o.rows)"
    trainer = TRAINER.replace("self.model = model", kept)
    texts, patch = patched(edit_of("bf16", "cpu"), main=MAIN, trainer=trainer)
    assert "enabled=self.o.bf16)" in texts["trainer"]
    assert "use_bf16: bool" not in texts["trainer"]
    assert patch.options == ["--bf16"]


def test_a_script_without_options_gets_the_edit_itself(patched):
    plain = "    import torch\n    loss = model(x).mean()\n    loss.backward()\n"
    texts, patch = patched(edit_of("bf16", "cpu"), train=plain)
    assert texts["train"].splitlines()[1] == 'with torch.autocast("cpu", dtype=torch.bfloat16):'
    assert patch.options == []
    texts, patch = patched(edit_of("bf16", "cpu"), has_options=False, train=LOOP)
    assert 'torch.autocast("cpu", dtype=torch.bfloat16):' in texts["train"], "no way to the script"
    assert patch.options == []
    commands = LOOP.replace("args = p", "parser.add_subparsers()\n        args = p")
    assert patched(edit_of("bf16", "cpu"), train=commands)[1].options == []


@pytest.mark.parametrize("own", ["--amp", "--no-mixed-precision", "--use_fp16", "--dtype"])
def test_an_option_that_does_the_same_is_named(patched, own):
    _, patch = patched(edit_of("bf16", "cpu"), train=LOOP.replace("--dry-run", own))
    assert (patch.diff, patch.options) == ("", [])
    assert patch.by_hand[0].words.endswith(f"the script has an option of its own, {own}.")
    of_group = LOOP.replace(
        "args = p", f"group.add_argument('{own}', dest='amp')\n        args = p"
    )
    assert patched(edit_of("bf16", "cpu"), train=of_group)[1].diff == ""
    name = "--sample"  # in which amp is no word
    assert patched(edit_of("bf16", "cpu"), train=LOOP.replace("--dry-run", name))[1].by_hand == []


def reading(text: str) -> str:
    """Return a script whose function `train` has the loss, and may see the options."""
    return f"""
import argparse
import torch

{text}

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int)
    args = parser.parse_args()
    print(args.rows)
    train(Net(), DataLoader(x))

main()
"""


LOSS = "    loss = model(d).mean()\n    loss.backward()\n"
METHOD = textwrap.indent("def fit(model, d):\n" + LOSS, "    ")
CLASS = f"class T:\n    def __init__(self, m):\n        self.m = m\n\n{METHOD}"
NOT_SEEN = {
    "starred": reading(f"def train(*args):\n{LOSS}"),
    "of another type": reading(f"def train(args: Model, **d):\n{LOSS}    print(args.rows)\n"),
    "missing by default": reading(f"def train(args=None, **kw):\n{LOSS}    print(args.rows)\n"),
    "never read": reading(f"def train(args, *d):\n{LOSS}"),
    "decorated": reading(f"@hydra.main()\ndef train(model, d):\n{LOSS}"),
    "passed on": reading(f"def train(model, d):\n{LOSS}\nspawn(train)\n"),
    "a method's name": UNSEEN.replace("train(model, D", "trainer.train(model, D"),
    "unpacked": UNSEEN.replace("main()\n", "main(**vars(args))\n"),
    "changed": UNSEEN.replace("model = Net()", "args = vars(args)"),
    "not known": UNSEEN.replace("'--dry-run'", "f'--{name}'"),
    "of two": UNSEEN.replace("model = Net()", "other = argparse.ArgumentParser()"),
    "positional": UNSEEN.replace("def train(model, d)", "def train(model, d, /)"),
    "static": reading(CLASS).replace("train(Net()", "T(Net()"),
}


@pytest.mark.parametrize("name", [*NOT_SEEN])
def test_what_may_not_see_the_options_gets_none(patched, name):
    texts, patch = patched(edit_of("bf16", "cpu"), train=NOT_SEEN[name])
    assert patch.options == []
    assert 'torch.autocast("cpu", dtype=torch.bfloat16):' in texts["train"]
    assert texts["train"].count("bf16") == 0


def test_a_line_that_no_option_reaches_is_left_to_the_user(patched):
    warm = "\n    def warm(**more):\n        loss = model(x)\n        loss.backward()\n"
    texts, patch = patched(edit_of("bf16", "cpu"), train=LOOP + warm)
    assert texts["train"].count("autocast(") == 1
    assert "its option does not reach this line" in patch.by_hand[0].words


def test_an_argument_that_does_the_same_is_named(patched):
    main = "from trainer import Trainer\ntrainer = Trainer(Net())\nDataLoader(x)\n"
    own = TRAINER.replace("log_every: int = 10", "log_every=10, amp=False")
    _, patch = patched(edit_of("bf16", "cpu"), main=main, trainer=own)
    assert patch.diff == ""
    assert patch.by_hand[0].words.endswith("an option of its own, amp of Trainer.")


def test_threads_that_autocast_does_not_reach_get_no_option(patched):
    source = LOOP.replace("model = Net()", "model = nn.DataParallel(Net())")
    _, patch = patched(edit_of("bf16", "cpu"), train=source)
    assert (patch.diff, patch.options) == ("", [])
    assert "DataParallel" in patch.by_hand[0].words
    source = LOOP.replace("model = Net()", "model = DistributedDataParallel(Net())")
    assert patched(edit_of("bf16", "cpu"), train=source)[1].options == ["--bf16"]


def test_a_constructor_uses_what_it_is_given(patched):
    source = """\
        import torch

        class Trainer:
            def __init__(self, model, d):
                self.model = model
                self.optimizer = AdamW(model.parameters())
                self.d = d
    """
    main = "from train import Trainer\nt = Trainer(Net(), DataLoader(x))\n"
    texts, _ = patched(edit_of("compile"), train=source, main=main)
    assert texts["train"].splitlines()[4:] == [
        "        self.model = model",
        "        self.use_compile = use_compile",
        "        self.optimizer = AdamW(model.parameters())",
        "        if use_compile:",
        "            model.compile()",
        "        self.d = d",
    ]
    assert "Trainer(Net(), DataLoader(x), use_compile=True)" in texts["main"]


KEPT = "self.use_bf16 = use_bf16\n"
CONSTRUCTORS = [  # bodies of constructors, with what the patch adds in brackets
    f"[{KEPT}]# a\nc = 1\nself.m = m\n",
    f"super().__init__()\nself.m = m\n[{KEPT}]c = 1\n",
    f'"""Doc."""\n[{KEPT}]\n# b\nself.c = f()\n',
    f'"""Doc.\n\n:param m: model\n[:param use_bf16: train in bf16 autocast\n]"""\n'
    f"self.m = m\n[{KEPT}]",
]


@pytest.mark.parametrize("body", CONSTRUCTORS)
def test_a_constructor_keeps_its_switch_where_it_keeps_others(patched, body):
    head = "import torch\nclass T:\n    def __init__(self, m{more}):\n"
    fit = "\n    def fit(self, x):\n        loss = self.model(x)\n        loss.backward()\n"
    before, after = (re.sub(one, "", body, flags=re.DOTALL) for one in (r"\[.*?\]", r"[\[\]]"))
    source = head.format(more="") + textwrap.indent(before, " " * 8) + fit
    main = "from train import T\nT(Net()).fit(DataLoader(x))\n"
    text = patched(edit_of("bf16", "cpu"), train=source, main=main)[0]["train"]
    made = head.format(more=", use_bf16=False") + textwrap.indent(after, " " * 8)
    assert text.startswith(made + "\n    def fit")
    assert "enabled=self.use_bf16)" in text


def test_a_line_comes_before_the_block_in_its_place(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\no = AdamW(p)\nloss = model(x)\nloss.backward()\n")
    edits = {name: edit_of(name, "cpu") for name in ("bf16", "compile")}
    text = patch_of(edits, sites_of(path), tmp_path).files["train.py"]
    assert text.splitlines()[2:5] == [
        "model.compile()",
        'with torch.autocast("cpu", dtype=torch.bfloat16):',
        "    loss = model(x)",
    ]


LOADERS = """\
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("-w", "--num-workers", type=int, default=0)
    parser.add_argument("--mixed", choices=["no", "bf16"])
    args = parser.parse_args()
    a = DataLoader(x, shuffle=True)
    b = DataLoader(y, num_workers=args.num_workers)
"""


def test_an_argument_that_is_an_option_is_set_by_the_command(patched):
    texts, patch = patched(WORKERS, train=LOADERS)
    assert patch.options == ["--num-workers", "4"]
    workers = "num_workers=args.num_workers, persistent_workers=args.num_workers > 0)"
    indented = f"a = DataLoader(x, shuffle=True,\n               {workers}\n"
    assert indented in texts["train"], "as the other loader, and no line of more than 88"
    alone = LOADERS.replace("    a = DataLoader(x, shuffle=True)\n", "")
    texts, patch = patched(WORKERS, train=alone)
    assert f"b = DataLoader(y, {workers}" in texts["train"]
    assert (patch.options, patch.by_hand) == (["--num-workers", "4"], [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("type=int, default=0", "type=int, choices=[1, 2, 16]"),
        ("type=int, default=0", "type=str"),
        ("type=int, default=0", "type=int, nargs=1"),
        ("num_workers=args.num_workers", "num_workers=2 * args.num_workers"),
        ("num_workers=args.num_workers", "num_workers=not args.num_workers"),
        ("args.num_workers", "others.num_workers"),
        ("num-workers", "eval-num-workers"),  # for another loader
    ],
)
def test_an_option_that_does_not_take_the_value_is_left_alone(patched, old, new):
    source = LOADERS.replace(old, new)
    if "eval" in new:
        source = source.replace("args.num", "args.eval_num")
    texts, patch = patched(WORKERS, train=source)
    assert patch.options == ([] if "eval" not in new else ["--eval-num-workers", "4"])
    workers = "num_workers=4, persistent_workers=True"
    assert f"a = DataLoader(x, shuffle=True, {workers})" in texts["train"]


@pytest.mark.parametrize(
    ("choices", "options"),
    [('["no", "bf16"]', ["--mixed", "bf16"]), ('["no", "fp16"]', [])],
)
def test_a_library_gets_what_the_option_says(patched, choices, options):
    source = LOADERS.replace('["no", "bf16"]', choices)
    source += "    c = Accelerator(mixed_precision=args.mixed)\n"
    _, patch = patched(edit_of("bf16", "cpu"), train=source)
    assert (patch.diff, patch.options) == ("", options)
    assert bool(patch.by_hand) == (not options)


def test_arguments_of_a_library_get_a_switch(patched):
    source = LOADERS.replace('"--mixed", choices=["no", "bf16"]', '"--mode"')
    source += "    c = TrainingArguments('out')\n    d = Accelerator()\n"
    texts, patch = patched(edit_of("bf16", "cuda"), train=source)
    assert "TrainingArguments('out', bf16=args.bf16)" in texts["train"]
    assert 'Accelerator(mixed_precision="bf16" if args.bf16 else "no")' in texts["train"]
    assert patch.options == ["--bf16"]


def test_results_of_which_a_function_reads_the_order_stay_as_they_are(patched):
    source = """\
        import torch

        def accuracy(output, y, topk=(1,)):
            _, best = output.topk(max(topk))
            return best == y

        def total(output):
            return output.sum()

        out = model(x)
        loss = f(out)
        loss.backward()
        print(accuracy(out, y))
    """
    edit = Edit(at="loss", around="torch.autocast('cpu')")
    assert ".float()" not in patched(edit, train=source)[0]["train"]
    source = source.replace("accuracy(out, y)", "total(out)")
    assert "out = out.float()" in patched(edit, train=source)[0]["train"]


def test_long_lines_continue_where_the_arguments_start(patched):
    source = (
        "if x:\n\td = f(DataLoader(rows,\n\t\t\tcollate_fn=lambda rows: " + "1 + " * 16 + "1))\n"
    )
    texts, _ = patched(WORKERS, train=source)
    assert texts["train"] == source.replace(
        "1))", "1,\n\t\t\tnum_workers=4, persistent_workers=True))"
    )
    source = "if x:\n\tloader = DataLoader(rows, collate_fn=lambda rows: " + "1 + " * 16 + "1)\n"
    added = "\t" + " " * 20 + "num_workers=4, persistent_workers=True)\n"
    assert patched(WORKERS, train=source)[0]["train"] == source[:-2] + ",\n" + added


SPREAD = [
    (
        "kw = {'batch_size': 2}\n",
        "kw = {'batch_size': 2, 'num_workers': 4, 'persistent_workers': True}\n",
    ),
    (
        'kw = {\n    "a": b,  # all\n}\n',
        'kw = {\n    "a": b,  # all\n    "num_workers": 4,\n    "persistent_workers": True,\n}\n',
    ),
    ("kw = dict(num_workers=0)\n", "kw = dict(num_workers=4, persistent_workers=True)\n"),
    ("kw = {}\n", 'kw = {"num_workers": 4, "persistent_workers": True}\n'),
    ("kw = {'num_workers': n}\n", None),  # the script decides
    ("kw = {}\nkw = {'a': 1}\n", None),
    ("kw = settings()\n", None),
    ("kw = dict(**base)\n", None),
    ("kw = {}\nSampler(x, **kw)\n", None),
    ("kw = {}\nsave(kw)\n", None),
    (
        "kw = {}\nkw.update(a=1)\n",
        'kw = {"num_workers": 4, "persistent_workers": True}\nkw.update(a=1)\n',
    ),
]


@pytest.mark.parametrize(("source", "expected"), SPREAD)
def test_arguments_that_a_dictionary_has_are_set_there(patched, source, expected):
    call = "d = DataLoader(rows, **kw)\ne = DataLoader(others, **kw)\n"
    texts, patch = patched(WORKERS, train=source + call)
    assert texts["train"] == (expected or source) + call
    assert bool(patch.by_hand) == (expected is None)


def test_every_change_under_an_option_has_names_that_python_and_a_shell_take():
    options = [one.edit.option for one in CHANGES.values() if one.edit.option]
    assert [one.name for one in options] == ["bf16", "compile"]
    assert all(isinstance(one, Option) and one.name.isidentifier() for one in options)
