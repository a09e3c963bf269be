"""Checkpoints written beside training: the loop copies the state to the host's memory, a thread
writes the copy.
"""

from __future__ import annotations

from flatout.assembly.recipe import Promise, Speedup, lazy

SPEEDUP = Speedup(
    name="async-checkpoints",
    fills={"state_saver": lazy("flatout.training.checkpoint.savers:InBackground")},
    saves="time: the loop waits for a copy of the state, not for the disk; costs the host's memory one copy of it",
    promise=Promise.exact(),
)
