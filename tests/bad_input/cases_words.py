"""Words and files of other tools."""

from case import Case, table

CASES = [
    *table("""
another tool's switch for a speedup
    train my.yaml gradient_checkpointing=true
    'gradient_checkpointing' -> 'speedups' | speedups=auto,+checkpointing
another tool's switch, turned off
    train my.yaml bf16=false
    'bf16' -> train.precision=fp32
another tool's key, misspelt
    train my.yaml gradient_clp=1
    'gradient_clp' | Other tools have 'gradient_clip' -> 'optim.clip'
another tool's key that flatout does not need
    train my.yaml pin_memory=true
    'pin_memory' -> Leave it out | pinned memory
another tool's key without a counterpart
    train my.yaml model.shared_attention_norm=true
    'model.shared_attention_norm' -> no counterpart | norms of their own
an option of `prepare` as a key
    train my.yaml subset_size=1000
    'subset_size' -> flatout prepare | --max-documents
another tool's value
    train my.yaml train.precision=no
    train.precision='no' -> Did you mean train.precision=fp32?
speedups turned off with false
    train my.yaml speedups=false
    speedups=False -> Did you mean speedups=none?
a preset of another tool
    train small_32k
    'small_32k' -> Did you mean 'eigenstate-small-32k'?
a dataset in place of a recipe
    train finewebedu
    'finewebedu' | the dataset fineweb-edu-10bt
    -> flatout prepare fineweb-edu-10bt | data.path=data/fineweb-edu-10bt
another tool's name of a dataset
    prepare finewebedu --out data/web
    'finewebedu' -> Did you mean 'fineweb-edu-10bt'?
another tool's name of a tokenizer
    prepare book.txt --out data/new --tokenizer gpt2
    'gpt2' -> Did you mean 'openai-community/gpt2'?
the recipe as an option
    train --config my.yaml
    '--config' -> flatout train RECIPE
`--resume` as a switch
    train my.yaml --resume
    '--resume' requires an argument -> Remove --resume for the default, auto
another tool's option of preparation
    prepare book.txt --out data/new --num_proc 8
    '--num_proc' -> `flatout prepare` has it: --workers
an option of preparation that nothing needs
    prepare book.txt --out data/new --chunk_size 1024
    '--chunk_size' -> Leave it out | data.seq_len
a config to convert that does not exist
    convert old.yaml --out new.yaml
    old.yaml -> Check the path
a config to convert without a recipe to write
    convert book.txt
    needs a config and --out -> --out my.yaml
the keys of a misspelt tool
    convert --keys nanogtp
    'nanogtp' -> Did you mean 'nanogpt'?
"""),
    Case(
        "a config to convert that is a list",
        "convert old.json --out new.yaml",
        ("old.json is not a mapping",),
        (),
        lambda w: w.write("old.json", "[1, 2]"),
    ),
    Case(
        "a config to convert that is a Python file",
        "convert old.py --out new.yaml",
        ("old.py is neither YAML nor JSON",),
        ("docs/coming-from.md",),
        lambda w: w.write("old.py", "lr = 1\n"),
    ),
    Case(
        "a config to convert with no key of a training tool",
        "convert old.yaml --out new.yaml",
        ("old.yaml has no key with a counterpart",),
        ("--keys nanogpt",),
        lambda w: w.write("old.yaml", "colour: red\n"),
    ),
    Case(
        "a converted recipe in place of another file",
        "convert old.yaml --out my.yaml",
        ("my.yaml exists",),
        ("a different file",),
        lambda w: w.write("old.yaml", "learning_rate: 1e-3\n"),
    ),
    Case(
        "a converted recipe that would not be YAML",
        "convert old.yaml --out new.txt",
        ("--out new.txt is not a YAML file",),
        ("--out recipe.yaml",),
        lambda w: w.write("old.yaml", "learning_rate: 1e-3\n"),
    ),
]
