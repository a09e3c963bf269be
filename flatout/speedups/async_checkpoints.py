"""Checkpoints written beside training: the loop copies the state to the host's memory, a thread
writes the copy.
"""

from __future__ import annotations

from flatout.assembly.recipe import Off, On, Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="async-checkpoints",
    fills={"state_saver": lazy("flatout.training.checkpoint.savers:InBackground")},
    saves="time: the loop waits for a copy of the state, not for the disk; costs the host's memory one copy of it",
    promise=Promise.exact(),
    rank=1030,
    auto={
        "cpu": Off(
            "the thread that writes takes cores and memory from training, which uses all of them"
        ),
        "cuda": On("training goes on while the disk is written"),
    },
)
