"""Unknown commands, options, keys and names."""

from case import Case, table

from flatout.assembly import preflight

BROKEN = "train:\n  steps: [1, 2\noptim: {}\n"

CASES = [
    *table("""
a misspelt command
    trian my.yaml
    'trian' -> 'train'
a misspelt option
    prepare book.txt --outt data/new
    --outt -> '--out'
"""),
    Case("an unknown command", "deploy runs/first", ("'deploy'",), ("Known: ",)),
    Case(
        "an unknown option",
        "train my.yaml --dry-run",
        ("--dry-run",),
        ("Known: --run-dir, ", "flatout train --help"),
    ),
    *table("""
a command without its arguments
    train
    flatout train | 'RECIPE' -> flatout train shakespeare-char
an option without its value
    prepare book.txt --out
    --out -> --out data/book
a misspelt recipe
    train shakespeare-chr
    'shakespeare-chr' -> 'shakespeare-char'
a setting in place of the recipe
    train data.path=data/book
    data.path=data/book is a setting, and there is no recipe before it -> demo data.path=data/book
a misspelt recipe of `diagnose`
    diagnose shakespeare-chr
    'shakespeare-chr' -> 'shakespeare-char'
a misspelt run of `diagnose`
    diagnose frist
    no recipe or run named 'frist' -> 'first' | shakespeare-char
a misspelt key of the model, and no data
    train my.yaml model.num_layer=2 data.path=data/new
    'model.num_layer' -> 'model.num_layers'
an unknown run
    generate nope
    no run directory nope or runs/nope -> flatout runs | The newest: first
a recipe of `tune` that would not be YAML
    tune my.yaml --out fast.txt
    --out fast.txt is not a YAML file -> --out recipe.yaml
an option of an earlier version
    diagnose my.yaml --fix
    no option '--fix' -> flatout tune RECIPE
a recipe file that does not exist
    train mine.yaml
    mine.yaml -> 'my.yaml'
a URL as a recipe
    train https://host/my.yaml
    https://host/my.yaml is a URL -> local path
a directory as a recipe
    train data
    data | directory -> YAML file
"""),
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
    *table("""
a misspelt key
    train my.yaml optim.lrr=1e-3
    'optim.lrr' -> 'optim.lr'
a section joined to its key
    train my.yaml train_steps=5
    'train_steps' -> 'train.steps'
a key of another tool
    train my.yaml learning_rate=1e-3
    'learning_rate' -> 'optim.lr'
"""),
    Case(
        "a misspelt section of a recipe",
        "train odd.yaml",
        ("odd.yaml", "'optimm'"),
        ("'optim'",),
        lambda w: w.write("odd.yaml", "optimm: {lr: 1}\n"),
    ),
    Case(
        "a dotted key in a recipe",
        "train odd.yaml",
        ("odd.yaml", "'train.steps'"),
        ("train: {steps: 10}",),
        lambda w: w.write("odd.yaml", "train.steps: 10\n"),
    ),
    *table("""
a misspelt key of the model
    train my.yaml model.num_layer=2
    'model.num_layer' -> 'model.num_layers'
a misspelt model
    train my.yaml model.kind=transfomer
    'transfomer' -> 'transformer'
a user's model that does not exist
    train my.yaml model.kind=nowhere:Model
    'nowhere' | 'nowhere:Model' -> run from the directory
a misspelt optimizer
    train my.yaml optim.kind=adamv
    'adamv' -> 'adamw'
a misspelt schedule
    train my.yaml schedule.kind=cosin
    'cosin' -> 'cosine'
a misspelt speedup
    train my.yaml speedups=auto,-compil
    'compil' -> 'compile'
an override without `=`
    train my.yaml optim.lr
    'optim.lr' -> optim.lr=3e-4
a key written as an option
    train my.yaml --optim.lr=1e-3
    '--optim.lr' -> optim.lr=VALUE
a misspelt kind of entry
    list modles
    'modles' -> 'models'
a misspelt dataset
    prepare shakespere --out data/new
    'shakespere' -> 'shakespeare'
a misspelt run
    generate frist
    frist -> runs/first
a directory that is not a run
    eval data
    data -> flatout runs
a step without a checkpoint
    generate runs/first --checkpoint 7
    runs/first | step 7 -> 2
--checkpoint that is not a step
    generate runs/first --checkpoint newest
    'newest' -> best, last
an empty text to stop at
    generate runs/first --stop ''
    --stop must not be empty -> remove it
a command that was removed
    launch slurm my.yaml
    'launch' -> docs/clusters
a directory of runs that does not exist
    runs rnus
    no run directory rnus or runs/rnus -> flatout runs
"""),
    *table("""
an option that was removed
    eval runs/first --tasks hellaswag
    '--tasks' -> lm_eval --model hf
a misspelt logger
    train my.yaml log.to=tensorboard,wanddb
    no logger named 'wanddb' -> 'wandb' | mlflow
"""),
    Case(
        "a logger whose package is not installed",
        "train my.yaml log.to=mlflow",
        ("log.to=mlflow", "mlflow, which is not installed"),
        ('pip install "flatout[mlflow]"',),
        lambda w: w.patch.setattr(preflight, "find_spec", lambda _: None),
    ),
    *table("""
a logger among the observers
    train my.yaml log.observers=wandb
    log.observers | 'wandb' -> package.module:MyObserver | log.to
a user's model that is not a model
    train my.yaml model.kind=os:path
    os:path | 'check' -> docs/extend.md
a user's source that is not a source
    prepare os:sep --out data/new
    os:sep | source -> docs/extend.md
"""),
]
