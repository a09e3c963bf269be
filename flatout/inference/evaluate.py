"""How well a trained model predicts text it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flatout.config.schema import ParallelConfig
from flatout.data.load.batches import ShardWindows
from flatout.data.store.mix import Part, distinct_names, parts_of
from flatout.data.store.remote import open_place
from flatout.errors import ConfigError, DataError
from flatout.inference.load import LoadedRun
from flatout.ops.attention import most_documents
from flatout.parallel.mesh import make_mesh
from flatout.parallel.rendezvous import Ranks
from flatout.progress import SILENT, Progress
from flatout.training.evaluation import Evaluation, Judge, say_unscored
from flatout.training.run_dir.data_location import require_tokenizer


def evaluate(
    loaded: LoadedRun,
    *,
    data: Sequence[str | Path] = (),
    max_tokens: int | None = None,
    progress: Progress = SILENT,
) -> Evaluation:
    """Score the validation text as the run itself evaluates: of its own data, or of the data sets
    `data`, each token of which counts alike.

    The model computes in the precision that it was loaded in: with `load_run(run,
    precision="trained")` the loss is the run's own.
    Raises: DataError when there is no validation text; CheckpointError when it was prepared with
            another tokenizer than the model's.
    """
    parts = other_parts(data, progress=progress) if data else parts_of(loaded.dataset)
    for part in parts:
        require_tokenizer(loaded.folder, part.dataset, loaded.checkpoint)
    mesh = make_mesh(ParallelConfig(), str(next(loaded.model.parameters()).device), Ranks())
    settings, precision = loaded.config.data, loaded.recipe.part("precision")
    rows, autocast = (
        int(loaded.config.batch.rows_per_device),
        partial(precision.context, mesh.device.type),
    )
    judge = Judge(
        loaded.model,
        mesh,
        ShardWindows(),
        autocast,
        settings.seq_len,
        rows,
        settings.document_mask,
        most_documents(loaded.model.ops.attention),
    )
    say_unscored(parts, progress)
    found = judge.score(parts, max_tokens=max_tokens, progress=progress)
    if found is None:
        raise DataError(
            f"{', '.join(part.dataset.place for part in parts)}: no validation text.",
            fix="Prepare it with a larger share, for example --split 'tail 0.1'.",
        )
    return found


def other_parts(data: Sequence[str | Path], *, progress: Progress = SILENT) -> list[Part]:
    """Open data sets that the run was not trained on; their shares are those of their validation
    tokens.
    """
    datasets = [open_place(place, progress=progress) for place in data]
    folders = [dataset.path.resolve() for dataset in datasets]
    twice = next(
        (
            dataset.place
            for dataset, folder in zip(datasets, folders, strict=True)
            if folders.count(folder) > 1
        ),
        None,
    )
    if twice is not None:
        raise ConfigError(f"--data names {twice} twice.", fix="Name each data set once.")
    tokens = [max(dataset.split("val").num_tokens - 1, 0) for dataset in datasets]
    names = distinct_names([dataset.place for dataset in datasets])
    return [
        Part(name, dataset, count / max(sum(tokens), 1))
        for name, dataset, count in zip(names, datasets, tokens, strict=True)
    ]
