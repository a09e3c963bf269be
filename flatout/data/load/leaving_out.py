"""Leaves some steps of the data out, so that a run continues with those after them."""

from __future__ import annotations

from collections.abc import Mapping

from flatout.data.load.batches import Shape, StepRead, StepReader
from flatout.data.store.integrity import Array
from flatout.json_io import JsonObject
from flatout.progress import SILENT, Progress


class LeavingOut:
    """A step reader that jumps over some positions of another one."""

    def __init__(self, steps: StepReader, left_out: Mapping[int, int]) -> None:
        """`left_out` maps the position of each step to leave out to that of the step after it."""
        self.plan, self.shapes, self.dtype = steps.plan, steps.shapes, steps.dtype
        self.has_mask, self.has_document_ids = steps.has_mask, steps.has_document_ids
        self._steps, self._left_out = steps, dict(left_out)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that read the whole split once."""
        return self._steps.steps_per_epoch

    @property
    def tokens_per_epoch(self) -> int:
        """Targets of the whole split, without padding."""
        return self._steps.tokens_per_epoch

    def shape_at(self, position: int) -> Shape:
        """Return the shape of the step that is read at `position`."""
        return self._steps.shape_at(self._past(position))

    def read(
        self, position: int, sequences_NW: Array, mask_NT: Array | None, doc_ids_NT: Array | None
    ) -> StepRead:
        """Read the first step at or after `position` that is not left out.

        Shapes:  sequences_NW (A * B, T + 1); mask_NT, doc_ids_NT (A * B, T) or None.
        """
        return self._steps.read(self._past(position), sequences_NW, mask_NT, doc_ids_NT)

    def data_at(self, position: int) -> list[JsonObject]:
        """Return where each row of the step at `position` is stored, left out or not."""
        return self._steps.data_at(position)

    def prime(self, position: int, steps: int, progress: Progress = SILENT) -> None:
        """Prepare the rows of the next `steps` steps, if the reader needs it."""
        self._steps.prime(position, steps, progress)

    def _past(self, position: int) -> int:
        while position in self._left_out:
            position = self._left_out[position]
        return position
