"""What is known about a checkpoint beside its state: info.json. No torch.

Lists of checkpoints show it; no state depends on it. Checkpoints of earlier versions have none.
"""

from __future__ import annotations

from pathlib import Path

from flatout.errors import CheckpointError
from flatout.files import Stored
from flatout.json_io import read_model

INFO = "info.json"


class CheckpointInfo(Stored, extra="ignore"):
    """The content of info.json; what was not measured is None."""

    step: int
    """Optimizer steps so far."""
    tokens: int
    """Tokens trained on so far."""
    train_loss: float | None = None
    """Training loss of this step, in nats per token."""
    val_loss: float | None = None
    """Validation loss at this step, in nats per token."""
    tokens_per_s: float | None = None
    """Throughput of the last record before it."""
    elapsed_s: float
    """Seconds of training, over all resumes."""
    saved_at: float
    """When the save began, in seconds since 1970."""
    config_digest: str
    """Digest of the run's resolved configuration."""
    host: str
    """The machine that wrote it; with several, that of the main rank."""
    world_size: int
    """Number of processes."""
    flatout: str
    """Version of flatout."""
    torch: str
    """Version of torch."""
    python: str
    """Version of Python."""
    records: int | None = None
    """Lines of metrics.jsonl up to this step."""
    records_crc32: int | None = None
    """Their CRC-32, by which a resume finds out whether metrics.jsonl is whole."""


def read_info(checkpoint: Path) -> CheckpointInfo | None:
    """Return what is known about a checkpoint; None when its info.json is missing or damaged."""
    try:
        return read_model(checkpoint / INFO, CheckpointInfo)
    except CheckpointError:
        return None
