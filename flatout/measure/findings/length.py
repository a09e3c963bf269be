"""The length of the run does not suit its data: it memorises the text, or sees hardly any."""

from __future__ import annotations

from flatout.measure.diagnose.finding import Finding, FindingRule, Fix
from flatout.measure.instruments.evidence import Evidence

MOST_EPOCHS = 100.0
"""More passes over the text only memorise it."""


def look(evidence: Evidence) -> Finding | None:
    """Return the finding when epochs and data size make no sense."""
    epochs, steps, data = evidence.epochs, evidence.planned_steps, evidence.data
    figures = {
        "epochs": epochs,
        "steps": steps,
        "train_tokens": data.train_tokens,
        "tokens_per_step": evidence.tokens_per_step,
        "parameters": evidence.parameters,
    }
    if epochs is not None and epochs > MOST_EPOCHS:
        return Finding(
            verdict=f"The run reads its text {epochs:,.0f} times: it will memorise it.",
            harm="spoils",
            figures=figures,
            fixes=(
                Fix(text="Prepare more text, or shorten the run."),
                Fix(
                    text="Stop when the validation loss no longer falls: train.patience=5 with "
                    "train.eval_every.",
                ),
            ),
        )
    tokens, per_step = data.train_tokens, evidence.tokens_per_step
    if tokens and per_step and per_step > tokens:
        return Finding(
            verdict=f"One step reads {per_step:,} tokens, and the text has only {tokens:,}: each "
            "step sees it more than once.",
            harm="spoils",
            figures=figures,
            fixes=(Fix(text="Lower batch.tokens_per_step, or prepare more text."),),
        )
    if data.val_tokens == 0 and (evidence.setting("train.eval_every") or 0) > 0:
        return Finding(
            verdict="train.eval_every is set, and the dataset has no text for validation.",
            harm="warns",
            figures=figures,
            fixes=(Fix(text='Prepare it again with --split "tail 0.1".'),),
        )
    return None


FINDING = FindingRule(name="length", look=look)
