"""What the tests of all ops share."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
"""attention_cases is shared by three files here."""


@pytest.fixture
def poisoned_memory():
    """Fresh tensors hold NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
