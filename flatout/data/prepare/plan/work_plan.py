"""The work plan: which documents are packed, in which ranges, and which split each goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import Field

from flatout.data.prepare.pack.jobs import Assignment, Job, Range, Whole
from flatout.data.prepare.request.request import Request
from flatout.data.tokenizers import Tokenizer
from flatout.files import Stored
from flatout.json_io import JsonObject
from flatout.sources import ReadTask

FORMAT_VERSION = 1


@dataclass(frozen=True)
class WorkPlan:
    """The ranges of a dataset and its split; jobs of separate validation text come first."""

    ranges: tuple[Range, ...]
    rule: str
    """The split rule, as the manifest states it."""
    assignment: Assignment

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs of all ranges."""
        return tuple(job for work in self.ranges for job in work.jobs)

    @property
    def training_jobs(self) -> tuple[Job, ...]:
        """The jobs without those of separate validation text."""
        return tuple(job for job in self.jobs if job.assignment is None)


def validation_jobs(read_tasks: Sequence[ReadTask]) -> tuple[Job, ...]:
    """Return the jobs of separate validation text."""
    return tuple(Job(task, assignment=Whole("val")) for task in read_tasks)


class PlanFile(Stored, populate_by_name=True):
    """plan.json: the work plan without the text, and the request that it was made for."""

    format_version: int = FORMAT_VERSION
    """Version of this file's format."""
    source: JsonObject
    """Description of the text, with every option that shapes the dataset."""
    tokenizer: str
    """Digest of tokenizer.json."""
    rule: str
    """The split rule, as the manifest states it."""
    assignment: Assignment
    """Split of the documents, except those of separate validation text."""
    validation_jobs: int = 0
    """Number of jobs, counted from the first, that are separate validation text."""
    mtime_digest: str = Field("", alias="moment")
    """Changes when a file of the text is rewritten; empty in plans by older versions."""
    task_bytes: tuple[int, ...] = Field(alias="part_bytes")
    """Approximate bytes of each read task of the corpus."""
    jobs: tuple[tuple[int, int | None, int | None], ...]
    """For each job: its first document's index, documents to take, bytes of the last."""
    ranges: tuple[int, ...]
    """Number of jobs in each range."""

    @classmethod
    def of(cls, plan: WorkPlan, request: Request, tokenizer: Tokenizer) -> Self:
        """Return the plan file of a plan."""
        corpus = request.corpus
        return cls(
            source=request.source,
            tokenizer=tokenizer.digest(),
            rule=plan.rule,
            assignment=plan.assignment,
            validation_jobs=len(plan.jobs) - len(plan.training_jobs),
            mtime_digest=corpus.mtime_digest,
            task_bytes=tuple(task.num_bytes for task in corpus.all_read_tasks),
            jobs=tuple((job.first, job.take, job.last_bytes) for job in plan.jobs),
            ranges=tuple(len(work.jobs) for work in plan.ranges),
        )

    def restore(self, read_tasks: Sequence[ReadTask]) -> WorkPlan:
        """Return the plan for the read tasks that it was made for."""
        taken = [Job(task, *stored) for task, stored in zip(read_tasks, self.jobs, strict=False)]
        count = self.validation_jobs
        jobs = iter([*validation_jobs(read_tasks[:count]), *taken[count:]])
        ranges = tuple(
            Range(number, tuple(next(jobs) for _ in range(size)))
            for number, size in enumerate(self.ranges)
        )
        return WorkPlan(ranges, self.rule, self.assignment)
