"""Hardware and processes that this machine lacks."""

from case import Case

CASES = [
    Case(
        "a GPU recipe on a machine without one",
        "train my.yaml train.device=cuda",
        ("train.device=cuda", "no NVIDIA driver"),
        ("train.device=auto would run on the CPU (a CPU, 2 cores)",),
    ),
    Case(
        "a GPU that does not exist",
        "train my.yaml train.device=cuda:7",
        ("cuda:7",),
        ("train.device=auto",),
    ),
    Case(
        "a sharded run without torchrun",
        "train my.yaml parallel.shard=2",
        ("parallel.shard=2", "1 process"),
        ("torchrun --nproc-per-node 2",),
    ),
    Case(
        "some of torchrun's variables missing",
        "train my.yaml",
        ("WORLD_SIZE",),
        ("torchrun",),
        lambda w: w.patch.setenv("RANK", "0"),
    ),
    Case(
        "a speedup that needs a GPU",
        "train my.yaml speedups=tf32",
        ("'tf32'",),
        ("Leave it out: speedups=none",),
    ),
    Case(
        "a plan for a machine that is not known",
        "plan my.yaml --machine '8x H1000'",
        ("'H1000'",),
        ("'H100'",),
    ),
    Case(
        "a plan for a card of several kinds",
        "plan my.yaml --machine A800",
        ("'A800'", "several"),
        ("a800-pcie-80gb",),
    ),
    Case(
        "a plan of a CPU run for a GPU",
        "plan my.yaml --machine H100",
        ("train.device=cpu", "H100"),
        ("Leave one of the two out",),
    ),
    Case(
        "a plan without a vocabulary size",
        "plan my.yaml data.path=data/none",
        ("vocabulary size",),
        ("model.vocab_size",),
    ),
]
