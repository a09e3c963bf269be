"""Score a loaded run on text that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.config.sections import ParallelConfig
from flatout.data.conversation.templates import CHAT_TEMPLATE, load_template, stored_template
from flatout.data.load.batches import ShardReader
from flatout.data.store.mix import Member, distinct_names, members_of
from flatout.data.store.shards import Dataset
from flatout.distributed.mesh import make_mesh
from flatout.distributed.rendezvous import Ranks
from flatout.errors import ConfigError, DataError
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
    """Score the validation text of the run's data, or of `data`, whose tokens all weigh the same.

    The model computes in the precision it was loaded with: after `load_run(run,
    precision="trained")` the loss equals the one that the run measured.
    Raises: DataError when there is no validation text; CheckpointError when the data was prepared
            with a different tokenizer from the model's.
    """
    members = open_datasets(data) if data else members_of(loaded.dataset)
    for member in members:
        require_tokenizer(loaded.folder, member.dataset, loaded.checkpoint)
        _warn_of_template(loaded.folder, member, progress)
    model = loaded.model
    mesh = make_mesh(ParallelConfig(), str(next(model.parameters()).device), Ranks())
    precision = loaded.parts.precision
    evaluator = Evaluator(loaded.config, model, mesh, ShardReader(), precision)
    warn_of_unscored(members, progress)
    found = evaluator.score(members, max_tokens=max_tokens, progress=progress)
    if found is None:
        raise DataError(
            f"{', '.join(str(member.dataset.path) for member in members)}: no validation text.",
            fix="Prepare it with a larger validation share, for example --split 'tail 0.1'.",
        )
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


def open_datasets(data: Sequence[str | Path]) -> list[Member]:
    """Open datasets as members of a mix, weighted by their validation tokens.

    Raises: ConfigError when one is given twice; DataError when one cannot be opened.
    """
    datasets = [Dataset.open(path) for path in data]
    folders = [dataset.path.resolve() for dataset in datasets]
    for dataset, folder in zip(datasets, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(f"--data names {dataset.path} twice.", fix="Give each dataset once.")
    tokens = [max(dataset.split("val").num_tokens - 1, 0) for dataset in datasets]
    names = distinct_names([str(dataset.path) for dataset in datasets])
    return [
        Member(name, dataset, count / max(sum(tokens), 1))
        for name, dataset, count in zip(names, datasets, tokens, strict=True)
    ]
