"""Score a loaded run on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatout.config.sections import ParallelConfig
from flatout.data.conversation.templates import CHAT_TEMPLATE, load_template, stored_template
from flatout.data.load.batches import ShardReader
from flatout.data.store.mix import Member, members_of, named_members
from flatout.data.store.shards import Dataset
from flatout.distributed.mesh import make_mesh
from flatout.distributed.rendezvous import Ranks
from flatout.errors import DataError
from flatout.inference.load import LoadedRun
from flatout.progress import SILENT, Progress
from flatout.training.evaluation import Evaluation, Evaluator, warn_of_unscored
from flatout.training.run_dir.data_location import require_tokenizer


def score_run(
    loaded: LoadedRun,
    *,
    data: Sequence[str | Path] = (),
    max_tokens: int | None = None,
    progress: Progress = SILENT,
) -> Evaluation:
    """Score the validation text of the run's data, or of `data`, whose targets all weigh the same.

    The model computes in the precision it was loaded with: after `load_run(run,
    precision="trained")` the loss equals the one that the run measured.
    Raises: DataError when there is no validation text, or a dataset cannot be opened; ConfigError
            when one is given twice; CheckpointError when the data was prepared with a different
            tokenizer from the model's.
    """
    if data:
        datasets = [Dataset.open(path) for path in data]
        tokens = [one.split("val").num_tokens for one in datasets]
        members = named_members(datasets, tokens, "--data")
    else:
        members = [*members_of(loaded.dataset)]
    for member in members:
        require_tokenizer(loaded.folder, member.dataset, loaded.checkpoint)
        _warn_of_template(loaded.folder, member, progress)
    device = next(loaded.model.parameters()).device
    mesh = make_mesh(ParallelConfig(), str(device), Ranks())
    evaluator = Evaluator(loaded.config, loaded.model, mesh, ShardReader(), loaded.parts.precision)
    warn_of_unscored(members, progress)
    found = evaluator.score(members, max_tokens=max_tokens, progress=progress)
    if found is None:
        raise DataError(
            f"{', '.join(str(member.dataset.path) for member in members)}: no validation text.",
            fix="Prepare it with a larger validation share, for example --split 'tail 0.1'.",
        )
    if data:  # of a dataset with a loss mask, fewer tokens are predicted than it has
        found = Evaluation(tuple(replace(one, share=one.tokens) for one in found.by_dataset))
    return found


def _warn_of_template(folder: Path, member: Member, progress: Progress) -> None:
    """Report a dataset whose conversations are written differently from the training data's."""
    own = load_template(folder / CHAT_TEMPLATE)
    other = stored_template(member.dataset.manifest.source)
    if own is not None and other is not None and not own.writes_as(other):
        progress.say(
            f"{member.dataset.path} was prepared with a different chat template than the "
            f"training data of {folder}: the model has not seen its form."
        )
