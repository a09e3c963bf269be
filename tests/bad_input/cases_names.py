"""Unknown commands, options, keys and names."""

from case import Case

BROKEN = "train:\n  steps: [1, 2\noptim: {}\n"

CASES = [
    Case("a misspelt command", "trian my.yaml", ("'trian'",), ("'train'",)),
    Case("a misspelt option", "prepare book.txt --outt data/new", ("--outt",), ("'--out'",)),
    Case("an unknown command", "export runs/first", ("'export'",), ("Known: ",)),
    Case(
        "an unknown option",
        "train my.yaml --dry-run",
        ("--dry-run",),
        ("Known: --run-dir, ", "flatout train --help"),
    ),
    Case(
        "a command without its arguments",
        "train",
        ("flatout train", "'RECIPE'"),
        ("flatout train shakespeare-char",),
    ),
    Case("an option without its value", "prepare book.txt --out", ("--out",), ("--out data/book",)),
    Case(
        "a misspelt recipe",
        "train shakespeare-chr",
        ("'shakespeare-chr'",),
        ("'shakespeare-char'",),
    ),
    Case("a recipe file that does not exist", "train mine.yaml", ("mine.yaml",), ("'my.yaml'",)),
    Case(
        "a URL as a recipe",
        "train https://host/my.yaml",
        ("https://host/my.yaml is a URL",),
        ("local path",),
    ),
    Case("a directory as a recipe", "train data", ("data", "directory"), ("YAML file",)),
    Case(
        "a directory with the name of a recipe",
        "train set.yaml",
        ("set.yaml", "directory"),
        ("YAML file",),
        lambda w: w.write("set.yaml/a.txt", "a"),
    ),
    Case("a recipe without its suffix", "train my", ("'my'",), ("'my.yaml'",)),
    Case(
        "a recipe that is not YAML",
        "train broken.yaml",
        ("broken.yaml", "line 3, column 6"),
        ("Correct",),
        lambda w: w.write("broken.yaml", BROKEN),
    ),
    Case(
        "a recipe that is not UTF-8",
        "train latin.yaml",
        ("latin.yaml", "byte 7"),
        ("UTF-8",),
        lambda w: w.write("latin.yaml", b"name: n\xe9\n"),
    ),
    Case(
        "a key given twice",
        "train twice.yaml",
        ("twice.yaml, line 2", "'optim'"),
        ("Delete",),
        lambda w: w.write("twice.yaml", "optim: {}\noptim: {}\n"),
    ),
    Case(
        "a recipe that is a list",
        "train list.yaml",
        ("list.yaml",),
        ("optim:",),
        lambda w: w.write("list.yaml", "- 1\n- 2\n"),
    ),
    Case("a misspelt key", "train my.yaml optim.lrr=1e-3", ("'optim.lrr'",), ("'optim.lr'",)),
    Case(
        "a section joined to its key",
        "train my.yaml train_steps=5",
        ("'train_steps'",),
        ("'train.steps'",),
    ),
    Case(
        "a key of another tool",
        "train my.yaml learning_rate=1e-3",
        ("'learning_rate'",),
        ("'optim.lr'",),
    ),
    Case(
        "a misspelt section of a recipe",
        "train odd.yaml",
        ("odd.yaml", "'optimm'"),
        ("'optim'",),
        lambda w: w.write("odd.yaml", "optimm: {lr: 1}\n"),
    ),
    Case(
        "a misspelt key of the model",
        "train my.yaml model.num_layer=2",
        ("'model.num_layer'",),
        ("'model.num_layers'",),
    ),
    Case(
        "a misspelt model",
        "train my.yaml model.kind=transfomer",
        ("'transfomer'",),
        ("'transformer'",),
    ),
    Case(
        "a user's model that does not exist",
        "train my.yaml model.kind=nowhere:Model",
        ("'nowhere'", "'nowhere:Model'"),
        ("run from the directory",),
    ),
    Case("a misspelt optimizer", "train my.yaml optim.kind=adamv", ("'adamv'",), ("'adamw'",)),
    Case("a misspelt schedule", "train my.yaml schedule.kind=cosin", ("'cosin'",), ("'cosine'",)),
    Case(
        "a misspelt speedup", "train my.yaml speedups=auto,-compil", ("'compil'",), ("'compile'",)
    ),
    Case("an override without `=`", "train my.yaml optim.lr", ("'optim.lr'",), ("optim.lr=3e-4",)),
    Case(
        "a key written as an option",
        "train my.yaml --optim.lr=1e-3",
        ("'--optim.lr'",),
        ("optim.lr=VALUE",),
    ),
    Case("a misspelt kind of entry", "list modles", ("'modles'",), ("'models'",)),
    Case(
        "a misspelt dataset",
        "prepare shakespere --out data/new",
        ("'shakespere'",),
        ("'shakespeare'",),
    ),
    Case("a misspelt run", "generate frist", ("frist",), ("runs/first",)),
    Case("a directory that is not a run", "eval data", ("data",), ("flatout runs",)),
    Case(
        "a step without a checkpoint",
        "generate runs/first --checkpoint 7",
        ("runs/first", "step 7"),
        ("2",),
    ),
    Case(
        "--checkpoint that is not a step",
        "generate runs/first --checkpoint newest",
        ("'newest'",),
        ("best, last",),
    ),
    Case("a directory of runs that does not exist", "runs rnus", ("rnus",), ("flatout runs",)),
    Case(
        "a user's model that is not a model",
        "train my.yaml model.kind=os:path",
        ("os:path", "'check'"),
        ("docs/extend.md",),
    ),
    Case(
        "a user's source that is not a source",
        "prepare os:sep --out data/new",
        ("os:sep", "source"),
        ("docs/extend.md",),
    ),
]
