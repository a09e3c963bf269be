"""Adapters (LoRA)."""

import shutil

from case import Case, World, run_command, table


def without_base(world: World) -> None:
    """Train adapters, and delete the weights that they belong to."""
    for line in (
        "export runs/first --out exported",
        "train my.yaml lora.rank=2 train.init_from=exported --run-dir runs/adapters",
    ):
        assert run_command(line, world.path).code == 0
    shutil.rmtree(world.path / "exported")


CASES = [
    *table("""
a rank of 0
    train my.yaml lora.rank=0 train.init_from=runs/first
    lora.rank=0 | at least 1 -> remove it
a rank above that of a layer
    train my.yaml lora.rank=17 train.init_from=runs/first
    lora.rank=17 | q | 16 x 16 -> Set lora.rank to 16 or less
no weights to adapt
    train my.yaml lora.rank=4
    lora.rank=4 | train.init_from names none -> Set train.init_from=RUN
a layer by another tool's name
    train my.yaml lora.rank=4 lora.targets=[q_proj] train.init_from=runs/first
    lora.targets names 'q_proj' | q, k, v, o, up, down -> Did you mean 'q'?
other keys without a rank
    train my.yaml lora.alpha=16 train.init_from=runs/first
    lora.alpha has no effect without lora.rank -> Set lora.rank=8
Muon
    train my.yaml lora.rank=4 optim.kind=muon train.init_from=runs/first
    optim.kind=muon -> optim.kind=adamw
"""),
    Case(
        "adapters whose base was deleted",
        "generate runs/adapters",
        ("runs/adapters/checkpoints/step-2", "exported", "do not exist"),
        ("Restore them there",),
        without_base,
    ),
    Case(
        "a checkpoint of whole weights to resume from",
        "train my.yaml lora.rank=4 train.steps=4 --resume runs/first --run-dir runs/adapters",
        ("contains whole weights", "lora.rank=4"),
        ("train.init_from=",),
        may_change=("runs/adapters",),
    ),
    Case("QLoRA", "train my.yaml load_in_4bit=true", ("'load_in_4bit'",), ("there is no QLoRA",)),
]
