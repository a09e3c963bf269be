"""Values of the wrong type or size, and values that contradict each other."""

from case import Case, table

ALIASES = "x0: &x0 [1]\n" + "\n".join(
    f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 9)}]" for level in range(1, 10)
)
"""A text whose aliases stand for 9 ** 9 values."""
CASES = [
    *table("""
text instead of a number
    train my.yaml optim.lr=fast
    optim.lr='fast' | a number -> 0.001
a learning rate that is not a number
    train my.yaml optim.lr=.nan
    optim.lr=nan | finite -> 0.001
NaN written as in Python
    train my.yaml optim.lr=nan
    optim.lr='nan' -> 0.001
a negative number of steps
    train my.yaml train.steps=-5
    train.steps=-5 | at least 1 -> remove it
more tokens than there are
    train my.yaml train.steps=null train.tokens=10000000000000000000000000000000
    train.tokens=10000000000000000000000000000000 | at most 1e+30 -> remove it
more epochs than there is time
    train my.yaml train.steps=null train.epochs=1e308
    train.epochs=1e+308 | at most 1e+09 -> remove it
a fractional number of steps
    train my.yaml train.steps=1.5
    train.steps=1.5 | a whole number -> remove it
an infinite time limit of `tune`
    tune my.yaml --minutes inf
    minutes=inf | a finite number from 1 -> Correct minutes
a time limit in which `tune` cannot measure anything
    tune my.yaml --minutes 0.5
    '--minutes' | x>=1 -> Remove --minutes for the default, 15
a price per hour that is not a number
    plan my.yaml --price-per-hour nan
    price_per_hour=nan | a finite number from 0 -> Correct price_per_hour
a profile of thousands of steps
    profile my.yaml --steps 2000
    --steps 2000 | may not fit in memory -> Profile at most 100 steps
a profile of no steps
    profile my.yaml --steps 0
    '--steps' | x>=1 -> Remove --steps for the default, 3
an unknown precision
    train my.yaml train.precision=bf17
    train.precision='bf17' | 'bf16' -> auto
a value instead of a section
    train my.yaml optim=3
    optim=3 | a section -> optim.lr,
a value instead of the section of the batch
    train my.yaml batch=5
    batch=5 | a section -> batch.tokens_per_step,
no bad step allowed
    train my.yaml train.max_bad_steps=0
    train.max_bad_steps=0 | at least 1 -> default, 10
an unknown device
    train my.yaml train.device=gpu
    train.device='gpu' -> 'cuda' | auto, cpu, cuda
a step that is not a whole number of sequences
    train my.yaml batch.tokens_per_step=100
    batch.tokens_per_step=100 | data.seq_len=32 -> batch.tokens_per_step=128
three batch sizes that contradict each other
    train my.yaml batch.tokens_per_step=128 batch.rows_per_device=4 batch.accumulate=3
    batch.tokens_per_step=128 | batch.accumulate=3 -> batch.tokens_per_step=384
a watchdog that is off and stops the run
    train my.yaml train.watchdog_minutes=0 train.watchdog_stop=true
    train.watchdog_stop has no effect | train.watchdog_minutes=0 -> Set train.watchdog_minutes=5
a width that the heads do not divide
    train my.yaml model.num_heads=3
    model.d_model=16 | model.num_heads=3 -> model.num_heads=
a vocabulary smaller than the data's
    train my.yaml model.vocab_size=10
    model.vocab_size=10 | data/book | 257 -> Remove model.vocab_size
"""),
    Case(
        "two lengths for one run",
        "train long.yaml",
        ("train.epochs", "train.steps"),
        ("Keep one",),
        lambda w: w.write("long.yaml", "train: {steps: 5, epochs: 1}\n"),
    ),
    *table("""
the cache of datasets at URLs, which is gone
    train my.yaml data.cache=cache
    data.cache -> flatout pull URL DIR
downloads to a URL
    prepare rows.jsonl --out data/new --cache s3://bucket/cache
    --cache s3://bucket/cache | URL -> local path
a number of devices that is a word
    train my.yaml train.devices=two
    train.devices | 'two' -> all
two intervals between evaluations
    train my.yaml train.eval_every=5 train.eval_every_epochs=1
    train.eval_every | train.eval_every_epochs -> Keep one
a final learning rate above the peak
    train my.yaml schedule.min_lr=1
    schedule.min_lr=1 | optim.lr=0.001 -> schedule.min_lr=0.0001
a warm-up of 5.0
    train my.yaml schedule.warmup=5.0
    schedule.warmup=5.0 -> schedule.warmup=5
only one beta
    train my.yaml optim.betas=[0.9]
    optim.betas -> [0.9, 0.95]
`none` together with a speedup
    train my.yaml speedups=none,tf32
    none,tf32 -> none alone
two speedups for one slot
    train my.yaml speedups=bf16,fp16
    'bf16' | 'fp16' -> Remove one of the two: speedups=bf16 or speedups=fp16
a precision and a speedup that contradict each other
    train my.yaml train.precision=fp32 speedups=auto,+bf16
    train.precision=fp32 | bf16 -> train.precision=bf16
a precision whose speedup is omitted
    train my.yaml train.precision=bf16 speedups=auto,-bf16
    train.precision=bf16 | 'bf16' | excludes -> train.precision=auto | speedups=auto
a negative temperature
    generate runs/first --temperature -1
    -1 -> 0
zero samples
    generate runs/first --num-samples 0
    '--num-samples' | x>=1 -> the default, 1
no tokens to generate
    generate runs/first --max-tokens 0
    '--max-tokens' | x>=1 -> the default, 256
speedups without a value
    train my.yaml speedups=
    speedups is empty -> speedups=none | auto
an edit of `auto` without its comma
    train my.yaml speedups=auto-compile
    'auto-compile' | comma -> speedups=auto,-compile
an empty run directory
    train my.yaml --run-dir ''
    '--run-dir' | empty -> Remove --run-dir
--resume that is neither a word nor a run
    train my.yaml --resume no
    --resume no -> 'never' | auto, never, or the path
zero minutes
    demo --minutes 0
    '--minutes' | x>=0.001 -> Remove --minutes | default: 2
a seed that is too large
    train my.yaml train.seed=99999999999999999999
    train.seed=99999999999999999999 | less than -> 0
a value that is not YAML
    train my.yaml optim.betas=[0.9
    'optim.betas=[0.9' -> quote
a dataset given twice in a mix
    train my.yaml 'data.mix={data/book: 3, data/book: 1}'
    line 1 | 'data/book' | twice -> Delete
a share of a mix that is too small
    train my.yaml 'data.mix={data/book: 1e6, data/code: 1}'
    data/code | The smallest share is 1 sequence in 65,536 -> 15.4 or more
an empty --stop
    generate runs/first --stop ''
    --stop must -> remove it
a seed for `generate` that is too large
    generate runs/first --seed 99999999999999999999
    seed 99999999999999999999 -> below
a URL as --out of `tune`
    tune my.yaml --out s3://bucket/tuned.yaml
    --out s3://bucket/tuned.yaml is a URL -> a local path
a file of another tool as --out of `tune`
    tune my.yaml --out my.yaml
    my.yaml exists | did not write it -> --out
a misspelt word of `tune --only`
    tune my.yaml --only bacth
    'bacth' -> 'batch'
nothing to tune
    tune my.yaml --only speedups speedups=none
    nothing to tune here in speedups -> speedups=auto
no word of `tune --only`
    tune my.yaml --only ,
    ',' names no part to tune -> batch, checkpointing, speedups
no change of `tune --only` of a script
    tune --only , -- python train.py
    ',' names no change -> compile
the data of a script as its --patch
    tune --patch book.txt -- python train.py
    book.txt exists | did not write it -> --patch
a sweep of what trials do not do
    bench my.yaml --sweep log.every=1,100
    log.every=1,100 | no values that trials measure -> batch.rows_per_device
a sweep over nothing
    bench my.yaml --sweep batch.rows_per_device=,
    names no values -> batch.rows_per_device=8,16
"""),
    Case(
        "aliases that stand for millions of values",
        "train aliases.yaml",
        ("aliases.yaml contains more than 50,000 values",),
        ("what an alias (*name) stands for counts each time",),
        lambda w: w.write("aliases.yaml", ALIASES),
    ),
]
