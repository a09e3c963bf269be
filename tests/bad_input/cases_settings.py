"""Values of the wrong kind or size, and values that contradict each other."""

from asking import Case

CASES = [
    Case(
        "text for a number",
        "train my.yaml optim.lr=fast",
        ("optim.lr='fast'", "a number"),
        ("0.001",),
    ),
    Case(
        "a learning rate that is not a number",
        "train my.yaml optim.lr=.nan",
        ("optim.lr=nan", "finite"),
        ("0.001",),
    ),
    Case("NaN written as in Python", "train my.yaml optim.lr=nan", ("optim.lr='nan'",), ("0.001",)),
    Case(
        "a negative number of steps",
        "train my.yaml train.steps=-5",
        ("train.steps=-5", "at least 1"),
        ("leave it out",),
    ),
    Case(
        "half a step",
        "train my.yaml train.steps=1.5",
        ("train.steps=1.5", "a whole number"),
        ("leave it out",),
    ),
    Case(
        "an unknown precision",
        "train my.yaml train.precision=bf17",
        ("train.precision='bf17'", "'bf16'"),
        ("auto",),
    ),
    Case(
        "a value for a section", "train my.yaml optim=3", ("optim=3", "a section"), ("optim.lr,",)
    ),
    Case(
        "an unknown device",
        "train my.yaml train.device=gpu",
        ("train.device='gpu'",),
        ("'cuda'", "auto, cpu, cuda"),
    ),
    Case(
        "a step that its windows do not fill",
        "train my.yaml batch.tokens_per_step=100",
        ("batch.tokens_per_step=100", "data.seq_len=32"),
        ("batch.tokens_per_step=128",),
    ),
    Case(
        "three batch sizes that contradict each other",
        "train my.yaml batch.tokens_per_step=128 batch.rows_per_device=4 batch.accumulate=3",
        ("batch.tokens_per_step=128", "batch.accumulate=3"),
        ("batch.tokens_per_step=384",),
    ),
    Case(
        "a head size that does not divide",
        "train my.yaml model.num_heads=3",
        ("model.d_model=16", "model.num_heads=3"),
        ("model.num_heads=",),
    ),
    Case(
        "a vocabulary smaller than the data's",
        "train my.yaml model.vocab_size=10",
        ("model.vocab_size=10", "data/book", "257"),
        ("Leave model.vocab_size out",),
    ),
    Case(
        "two lengths of a run",
        "train long.yaml",
        ("train.epochs", "train.steps"),
        ("Keep one",),
        lambda w: w.write("long.yaml", "train: {steps: 5, epochs: 1}\n"),
    ),
    Case(
        "a last learning rate above the peak",
        "train my.yaml schedule.min_lr=1",
        ("schedule.min_lr=1", "optim.lr=0.001"),
        ("schedule.min_lr=0.0001",),
    ),
    Case(
        "a warm-up of 5.0",
        "train my.yaml schedule.warmup=5.0",
        ("schedule.warmup=5.0",),
        ("schedule.warmup=5",),
    ),
    Case("one beta", "train my.yaml optim.betas=[0.9]", ("optim.betas",), ("[0.9, 0.95]",)),
    Case(
        "no speedups and some", "train my.yaml speedups=none,tf32", ("none,tf32",), ("none alone",)
    ),
    Case(
        "two speedups for one thing",
        "train my.yaml speedups=bf16,fp16",
        ("'bf16'", "'fp16'"),
        ("Leave out one of the two: speedups=bf16 or speedups=fp16",),
    ),
    Case(
        "a precision and a speedup that contradict it",
        "train my.yaml train.precision=fp32 speedups=auto,+bf16",
        ("train.precision=fp32", "bf16"),
        ("train.precision=bf16",),
    ),
    Case("a negative temperature", "generate runs/first --temperature -1", ("-1",), ("0",)),
    Case("no samples", "generate runs/first --num-samples 0", ("num-samples 0",), ("1 or more",)),
    Case("no time", "demo --minutes 0", ("--minutes 0",), ("--minutes 2",)),
    Case(
        "a seed that no generator takes",
        "train my.yaml train.seed=99999999999999999999",
        ("train.seed=99999999999999999999", "less than"),
        ("0",),
    ),
    Case(
        "a value that is not YAML",
        "train my.yaml optim.betas=[0.9",
        ("'optim.betas=[0.9'",),
        ("quote",),
    ),
    Case(
        "a folder given twice in a mix",
        "train my.yaml 'data.mix={data/book: 3, data/book: 1}'",
        ("line 1", "'data/book'", "twice"),
        ("Delete",),
    ),
    Case(
        "a share of a mix too small to be kept",
        "train my.yaml 'data.mix={data/book: 1e6, data/code: 1}'",
        ("data/code", "the smallest share is 1 sequence in 65,536"),
        ("15.4 or more",),
    ),
    Case(
        "an empty text to stop at",
        "generate runs/first --stop ''",
        ("--stop must",),
        ("leave it out",),
    ),
    Case(
        "a seed for a sample that no generator takes",
        "generate runs/first --seed 99999999999999999999",
        ("seed 99999999999999999999",),
        ("below",),
    ),
]
