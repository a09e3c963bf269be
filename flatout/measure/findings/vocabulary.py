"""The model's vocabulary is much larger than the dataset's."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

MOST_UNUSED = 0.2
"""Share of the model's vocabulary that may be unused, for padding to a round number."""
MIN_UNUSED = 512
"""Fewer unused tokens do no harm."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when much of the embedding and of the head is never used."""
    config, of_data = evidence.config, evidence.data.vocab_size
    if config is None or of_data is None or config.model.vocab_size is None:
        return None
    unused = config.model.vocab_size - of_data
    if unused < MIN_UNUSED or unused < MOST_UNUSED * config.model.vocab_size:
        return None
    return Finding(
        verdict=f"The model has {config.model.vocab_size:,} tokens, and the dataset only "
        f"{of_data:,}: embedding and loss compute the rest for nothing.",
        harm="slows",
        figures={"model.vocab_size": config.model.vocab_size, "dataset_vocab_size": of_data},
        fixes=(
            Fix(
                text="Leave model.vocab_size out.",
                overrides={"model.vocab_size": None},
                same_result=False,
            ),
        ),
    )


FINDING = FindingRule(name="vocabulary", look=look)
