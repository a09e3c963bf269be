"""What the tests of all ops share."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Fresh tensors hold NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
