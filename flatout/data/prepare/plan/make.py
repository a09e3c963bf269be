"""Make the work plan, or restore the one in the work directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from flatout.data.prepare.pack.jobs import Job
from flatout.data.prepare.pack.records import count_skipped, no_documents
from flatout.data.prepare.pack.tokenize import Packing
from flatout.data.prepare.plan.limits import check_space
from flatout.data.prepare.plan.sample import (
    prompts_and_texts_of,
    sample_texts,
    texts_by_hash,
    texts_of,
)
from flatout.data.prepare.plan.split import make_plan
from flatout.data.prepare.plan.work_dir import WorkDir
from flatout.data.prepare.plan.work_plan import PlanFile, WorkPlan
from flatout.data.prepare.request.request import Request, difference
from flatout.data.store.manifest import SkippedRows
from flatout.data.tokenizers import Tokenizer, make_tokenizer
from flatout.errors import DataError, OutputInUse
from flatout.sources import Document, LeftOut


def plan_work(work: WorkDir, request: Request) -> tuple[WorkPlan, Packing]:
    """Return the stored work plan, or make and store one, and how to pack it.

    Raises: DataError when the stored plan is for a different dataset, naming the difference, or
            when no plan can be made.
    """
    stored = work.plan()
    if stored is None:
        plan = make_plan(request.corpus, request.options, request.progress)
        tokenizer = _tokenizer(request.options.tokenizer, plan, request)
        check_space(work.out, [job.read_task.num_bytes for job in plan.jobs], tokenizer)
        own = PlanFile.of(plan, request, tokenizer)
        stored = work.begin(own, tokenizer)
        if stored == own:
            return plan, _packing(plan, tokenizer, request)
    check_same(work, stored, request)
    plan = stored.restore(request.corpus.all_read_tasks)
    tokenizer = _tokenizer(str(work.tokenizer), plan, request)
    if tokenizer.digest() != stored.tokenizer:
        raise DataError(
            f"{work.tokenizer} is not the tokenizer that this work started with.",
            fix=f"Remove the directory {work.path} to start over.",
        )
    return plan, _packing(plan, tokenizer, request)


def check_same(work: WorkDir, stored: PlanFile, request: Request) -> None:
    """Check that the plan in the work directory is for the requested dataset.

    Raises: OutputInUse naming the difference; DataError when the text has changed since.
    """
    corpus = request.corpus
    different = difference(stored.source, request.source)
    if not different and stored.task_bytes != tuple(
        task.num_bytes for task in corpus.all_read_tasks
    ):
        different = "its text is divided into other read tasks"
    if different:
        raise OutputInUse(
            f"{work.path} contains an unfinished, different dataset: {different}.",
            fix="Request the same dataset, choose another --out, or remove the directory "
            f"{work.path}, which discards the work done so far.",
        )
    if stored.mtime_digest and stored.mtime_digest != corpus.mtime_digest:
        raise DataError(
            f"The text has changed since the work in {work.path} started: a file has another size "
            "or modification time.",
            fix="Restore the text, including its modification times, or remove the directory "
            f"{work.path}, which discards the work done so far.",
        )


def _packing(plan: WorkPlan, tokenizer: Tokenizer, request: Request) -> Packing:
    options = request.options
    return Packing(
        tokenizer,
        plan.assignment,
        options.on_bad_row,
        options.mask_field,
        options.duplicates,
        options.chat is not None,
    )


def _tokenizer(spec: str, plan: WorkPlan, request: Request) -> Tokenizer:
    in_parts = request.options.mask_field or request.options.chat
    read = prompts_and_texts_of if in_parts else texts_of

    def sample(limit: int | None) -> Iterator[str]:
        return _require_any(sample_texts(plan.jobs, limit, read), plan.jobs, request)

    def training_sample(limit: int) -> Iterator[str]:
        jobs = plan.training_jobs
        return _require_any(texts_by_hash(jobs, limit, read), jobs, request)

    return make_tokenizer(
        spec,
        sample,
        train_on=training_sample,
        pattern=request.options.pattern,
        end_of_text=request.options.end_of_text,
        progress=request.progress,
    )


def _require_any(texts: Iterator[str], jobs: Sequence[Job], request: Request) -> Iterator[str]:
    """Yield the texts.

    Raises: DataError when there are none.
    """
    first = next(texts, None)
    if first is None:
        skipped: list[SkippedRows] = []
        for row in chain.from_iterable(job.rows() for job in jobs):
            if not isinstance(row, Document):
                count = row.count if isinstance(row, LeftOut) else 1
                count_skipped(skipped, row.reason, (), count)
        raise no_documents(request.names, skipped)
    yield first
    yield from texts
